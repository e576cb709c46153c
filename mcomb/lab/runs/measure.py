"""Measure networks and their combinations: the tools of an experiment's `measure`."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int, Key

from mcomb.combination import Distribution, Draw
from mcomb.evaluation.barriers import barrier
from mcomb.evaluation.evaluate import Metrics, evaluate, measure_examples, score
from mcomb.evaluation.objectives import accuracy, agreement, cross_entropy, on_label, predicted
from mcomb.evaluation.repair import repaired
from mcomb.keys import stream
from mcomb.lab.cache.matchings import B_TO_A, KeptMatching, MatchingKey
from mcomb.lab.cache.networks import Network
from mcomb.lab.cache.store import Store
from mcomb.lab.data.datasets import Split
from mcomb.lab.runs import temperatures
from mcomb.lab.runs.results import METRICS, SPLITS, VARIANTS, Calibrated, Parameter, Scores, SweepResults, scores_of
from mcomb.lab.runs.rows import Rows
from mcomb.matching.matching import objective
from mcomb.runtime.batching import BATCH
from mcomb.runtime.devices import replicate
from mcomb.runtime.progress import progress_bar
from mcomb.trees import Apply, Array, Params

# Train examples whose statistics --repair takes; each combination pays for them. On digits more change nothing.
REPAIR_EXAMPLES = 2 * BATCH


class Task(NamedTuple):
    """Combinations to measure: `draw` combines the networks at each of k points, with a key for each.

    If `draw` changes the networks before it combines them, `ends(point, *networks)` returns the changed networks.
    """

    draw: Distribution | Draw
    networks: tuple[Params, ...]
    points: Any  # arrays with k rows
    rng_name: str | None = None  # the experiment that determines the keys; None for the current one
    ends: Callable[..., tuple[Params, ...]] | None = None

    def __len__(self) -> int:
        return len(jax.tree.leaves(self.points)[0])


@dataclass
class Run:
    """One run of an experiment: its networks and matchings, the results of its parts, and the rows so far."""

    experiment: str
    store: Store
    networks: Mapping[str, Network]
    matchings: Mapping[MatchingKey, KeptMatching]
    parts: Mapping[str, Any]  # results
    rows: Rows
    _aligned: dict[MatchingKey, Params] = field(default_factory=dict)

    @property
    def config(self) -> Any:
        """The flags of this run, an instance of the experiment's config class."""
        return self.store.config

    def align(self, key: MatchingKey = B_TO_A) -> Params:
        """Return a network's parameters with its units matched to another network."""
        if key not in self._aligned:
            network, matching = self.networks[key.moved], self.matchings[key].matching
            self._aligned[key] = self.store.permute(network, matching, key.groups)
        return self._aligned[key]

    @cached_property
    def splits(self) -> dict[str, Split]:
        """The examples to evaluate on, on every device."""
        counts, data = self.config.evaluation_examples, self.store.data._asdict()
        return {name: replicate(data[name].subset(count)) for name, count in counts.items()}

    @cached_property
    def halves(self) -> dict[str, Split]:
        """The test examples in two halves, on every device."""
        test = self.store.data.test.subset(self.config.test_examples)
        return {name: replicate(half) for name, half in temperatures.split_in_halves(test).items()}

    @cached_property
    def scores(self) -> dict[str, dict[str, Metrics]]:
        """The score of each network on each split."""
        with self.store.durations.timed("evaluation"):
            return {
                letter: {split: score(self.store.apply, network.params, *data) for split, data in self.splits.items()}
                for letter, network in self.networks.items()
            }

    @cached_property
    def basics(self) -> dict[str, Any]:
        """The fields of `Results` that every verdict needs: the scores of networks, of guessing and of matchings."""
        networks = {letter: scores_of(by_split) for letter, by_split in self.scores.items()}
        inner_products = {}
        for key in self.matchings:
            a, b = (self.networks[letter].params for letter in (key.reference, key.moved))
            naive, aligned = (objective(self.store.spec, a, other) for other in (b, self.align(key)))
            inner_products[str(key)] = {"naive": naive, "aligned": aligned}
        return {
            "models": networks,
            "guessing": {split: guessing(np.asarray(data.labels)) for split, data in self.splits.items()},
            "inner_products": inner_products,
        }

    def evaluate(self, tasks: Mapping[str, Task], ends: str = "AB") -> dict[str, dict[str, Metrics]]:
        """Return the metrics of each task on each split, and evaluate the combinations that the rows lack.

        Agreement counts the predictions that equal those of each network of `ends`.
        """
        sets = {
            name: (data.inputs, {"label": data.labels, "predicted": self._predictions(data, ends)})
            for name, data in self.splits.items()
        }
        metrics = {"accuracy": on_label(accuracy), "agreement": agreement}
        measured = self.evaluate_on(sets, tasks, {"loss": on_label(cross_entropy), "metrics": metrics})
        counts = {name: data.labels.size for name, data in self.splits.items()}

        def count_agreement(metrics: Metrics, split: str) -> Metrics:
            return Metrics({**metrics.values, "agreement": np.rint(metrics.agreement * counts[split]).astype(int)})

        return {
            name: {split: count_agreement(found, split) for split, found in by_split.items()}
            for name, by_split in measured.items()
        }

    def _predictions(self, data: Split, ends: str) -> Int[np.ndarray, "n 2 *positions"]:
        """Return the labels that two networks predict."""
        only = (("predicted", predicted),)
        networks = [self.networks[letter].params for letter in ends]
        found = [measure_examples(self.store.apply, params, *data, only)["predicted"][0] for params in networks]
        return np.stack(found, axis=1)

    def evaluate_on(
        self, sets: Mapping[str, tuple[Any, Any]], tasks: Mapping[str, Task], objectives: Mapping[str, Any]
    ) -> dict[str, dict[str, Metrics]]:
        """Return the loss and the metrics of each task on each set of examples."""
        rows = self.rows
        total = len(sets) * sum(len(task) for task in tasks.values())
        with self.store.durations.timed("evaluation"), progress_bar(total, "net", "evaluating") as bar:
            for of, (name, task) in itertools.product(sets, tasks.items()):
                names = [f"{name}/{of}/{i}" for i in range(len(task))]
                missing = [i for i in range(len(task)) if names[i] not in rows]
                bar.update(len(task) - len(missing))
                if missing:
                    self._add_rows(task, names, missing, sets[of], objectives, bar)

        def collect(name: str, of: str, metric: str) -> np.ndarray:
            return np.array([rows[f"{name}/{of}/{i}"][metric] for i in range(len(tasks[name]))])

        return {
            name: {of: Metrics({m: collect(name, of, m) for m in ("loss", *objectives["metrics"])}) for of in sets}
            for name in tasks
        }

    def keys(self, task: Task, these: Any = None) -> Key[Array, "k"]:
        """Return the random keys of a task's combinations: of `these`, or of all."""
        root = stream(self.config.seed, "coefficients", task.rng_name or self.experiment)
        return jax.vmap(jax.random.fold_in, (None, 0))(root, np.arange(len(task)) if these is None else these)

    def _add_rows(
        self,
        task: Task,
        names: list[str],
        missing: list[int],
        data: tuple[Any, Any],
        objectives: Mapping[str, Any],
        bar: Any,
    ) -> None:
        """Evaluate the missing combinations of a task, and add a row for each after every call."""
        # Not fewer than devices, if the task has more: so what is measured again is measured in the same way.
        these = np.resize(missing, max(len(missing), min(len(task), len(jax.devices()))))
        left = iter([names[i] for i in missing])

        def keep(metrics: Metrics) -> None:
            measured = zip(*(values.tolist() for values in metrics.values.values()), strict=True)
            named = [({"name": name}, values) for values, name in zip(measured, left, strict=False)]
            self.rows.add(name | dict(zip(metrics.values, values, strict=True)) for name, values in named)
            bar.update(len(named))

        points = jax.tree.map(lambda values: values[these], task.points)
        apply, draw, networks = self._repair_if_asked(task)
        how: Any = {"vmap_size": self.config.vmap_size, "report": keep, **objectives}
        evaluate(apply, networks, *data, draw, points, self.keys(task, these), **how)

    def _repair_if_asked(self, task: Task) -> tuple[Apply, Distribution | Draw, tuple[Any, ...]]:
        """Return a task's function, draw and networks, with REPAIR if the flags ask for it."""
        networks = replicate(task.networks)
        if not self.config.repair:
            return self.store.apply, task.draw, networks
        inputs = self.store.data.train.subset(REPAIR_EXAMPLES).inputs
        return repaired(self.store.apply, networks, inputs, task.draw, spec=self.store.spec, ends=task.ends)

    def measure_curves(
        self, tasks: Mapping[str, Task], shape: tuple[int, ...], ends: str = "AB", between: Any = ...
    ) -> dict[str, Any]:
        """Return the fields of `Curves`: curves between two networks, and barriers over the points `between`.

        With `--temperatures`, also measure test losses at the best temperature of each network and combination.
        """
        measured = self.evaluate(tasks, ends)
        curves = {
            name: {split: as_lists(metrics, shape) for split, metrics in by_split.items()}
            for name, by_split in measured.items()
        }
        scores = [self.basics["models"][letter] for letter in ends]
        barriers = {name: curve_barriers(scores, curve, between) for name, curve in curves.items()}
        found: dict[str, Any] = {"ends": list(ends), "curves": curves, "barriers": barriers}
        if self.config.temperatures:
            found["at_best_temperature"] = self._measure_at_best_temperature(tasks, shape, ends, between)
        return self.basics | found

    def _measure_at_best_temperature(
        self, tasks: Mapping[str, Task], shape: tuple[int, ...], ends: str, between: Any
    ) -> Calibrated:
        """Return test losses of the networks and on the curves, and barriers, each at its own best temperature."""
        apply, halves, objectives = self.store.apply, self.halves, temperatures.objectives()
        with self.store.durations.timed("evaluation"):
            networks = {
                letter: {
                    half: score(apply, self.networks[letter].params, *data, **objectives)
                    for half, data in halves.items()
                }
                for letter in ends
            }
        measured = self.evaluate_on(halves, tasks, objectives)
        counts = [len(data.labels) for data in halves.values()]
        return temperatures.calibrate(networks, measured, counts, shape, between)

    def measure_pair(
        self, draw: Distribution | Draw, name: str, label: str, values: Any, between: Any = ...
    ) -> SweepResults:
        """Measure the curves of A combined with B, naive and aligned, over the values of a parameter."""
        samples = self.config.samples
        parameters = np.repeat(np.asarray(values, np.float32), samples)
        a, b = (self.networks[letter].params for letter in "AB")
        pairs = {"naive": (a, b), "aligned": (a, self.align())}
        tasks = {variant: Task(draw, pairs[variant], parameters) for variant in VARIANTS}
        curves = self.measure_curves(tasks, (len(values), samples), between=between)
        return SweepResults(parameter=Parameter(name, label, np.asarray(values).tolist()), **curves)


def curve_barriers(ends: Sequence[Scores], curve: Scores, between: Any = ...) -> Scores:
    """Return the barriers of a curve between networks with the scores `ends`, over the points `between`."""

    def of(split: str, metric: str) -> float:
        return barrier(metric, np.array(curve[split][metric])[between], *(end[split][metric] for end in ends))

    return {split: {metric: of(split, metric) for metric in METRICS} for split in SPLITS}


def guessing(labels: np.ndarray) -> dict[str, float]:
    """Return the loss and accuracy of the best constant prediction, and the number of examples.

    For tokens, the best constant prediction is the unigram distribution.
    """
    counts = np.bincount(labels.ravel())
    frequencies = counts[counts > 0] / labels.size
    return {
        "loss": float(-(frequencies * np.log(frequencies)).sum()),
        "accuracy": float(frequencies.max()),
        "examples": len(labels),
    }


def as_lists(metrics: Metrics, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return loss, accuracy and agreement as nested lists, with the axis of combinations in the given shape."""
    kept = {"loss": metrics.loss, "accuracy": metrics.accuracy, "agreement": metrics.agreement}
    return {name: values.reshape(*shape, *values.shape[1:]).tolist() for name, values in kept.items()}
