"""Measuring networks and their combinations: what an experiment's `measure` works with."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int, Key

from mcomb.combination import Distribution, Draw
from mcomb.evaluation.evaluate import Metrics, evaluate, measure_examples, score
from mcomb.evaluation.objectives import accuracy, agreement, cross_entropy, on_label, predicted, tempered_cross_entropy
from mcomb.evaluation.repair import repaired
from mcomb.keys import stream
from mcomb.lab.cache.matchings import B_TO_A, KeptMatching, MatchingKey
from mcomb.lab.cache.networks import Network
from mcomb.lab.cache.store import Store
from mcomb.lab.data.datasets import Split
from mcomb.lab.runs.barriers import barrier, barriers
from mcomb.lab.runs.results import METRICS, VARIANTS, Results
from mcomb.lab.runs.rows import Rows
from mcomb.matching.matching import objective
from mcomb.runtime.batching import BATCH
from mcomb.runtime.devices import replicate
from mcomb.runtime.progress import progress_bar
from mcomb.trees import Apply, Array, Params

TEMPERATURES = tuple(2.0 ** (i / 4) for i in range(-16, 17))  # from a sixteenth to sixteen
HALVES = ("test, even images", "test, odd images")  # a temperature is fitted on one and measured on the other

# Train images whose statistics --repair takes; each combination pays for them. On digits more change nothing.
REPAIR_IMAGES = 2 * BATCH


class Task(NamedTuple):
    """Combinations to measure: k points, each given with its own key to `draw` over the networks.

    `ends` are, for a parameter, the networks that the draw combines, where these are not those given to it.
    """

    draw: Distribution | Draw
    networks: tuple[Params, ...]
    points: Any  # arrays with k rows
    rng_name: str | None = None  # the experiment whose keys to draw with, if not this one's own
    ends: Callable[..., tuple[Params, ...]] | None = None

    def __len__(self) -> int:
        return len(jax.tree.leaves(self.points)[0])


@dataclass
class Run:
    """One run of an experiment: its networks and matchings, the results it builds on, and the rows measured so far."""

    experiment: str
    store: Store
    networks: Mapping[str, Network]
    matchings: Mapping[MatchingKey, KeptMatching]
    parts: Mapping[str, Results]
    rows: Rows
    _aligned: dict[MatchingKey, Params] = field(default_factory=dict)

    @property
    def config(self) -> Any:
        """The flags of this run, a Config of the experiment's own class."""
        return self.store.config

    def align(self, key: MatchingKey = B_TO_A) -> Params:
        """Return a network's parameters with its units matched to those of another network."""
        if key not in self._aligned:
            self._aligned[key] = self.store.permute(self.networks[key.moved], self.matchings[key].matching)
        return self._aligned[key]

    @cached_property
    def splits(self) -> dict[str, Split]:
        """The images to evaluate on, on every device."""
        counts, data = self.config.images, self.store.data._asdict()
        return {name: replicate(data[name].first(count)) for name, count in counts.items()}

    @cached_property
    def halves(self) -> dict[str, Split]:
        """The test images in two halves, on every device."""
        test = self.store.data.test.first(self.config.test_images)
        return {name: replicate(test.take(slice(i, None, 2))) for i, name in enumerate(HALVES)}

    @cached_property
    def scores(self) -> dict[str, dict[str, Metrics]]:
        """The score of each network by itself on each split."""
        with self.store.durations.timed("evaluation"):
            return {
                letter: {split: score(self.store.apply, network.params, *data) for split, data in self.splits.items()}
                for letter, network in self.networks.items()
            }

    @cached_property
    def basics(self) -> Results:
        """What every verdict needs to know of the networks, the data and the matchings."""
        networks = {
            letter: {split: {m: getattr(score, m) for m in METRICS} for split, score in by_split.items()}
            for letter, by_split in self.scores.items()
        }
        inner_products = {}
        for key, kept in self.matchings.items():
            b, a = (self.networks[letter].params for letter in (key.moved, key.reference))
            perms = (None, kept.matching.perms)
            naive, aligned = (objective(self.store.spec, a, b, perms=p) for p in perms)
            inner_products[str(key)] = {"naive": naive, "aligned": aligned}
        return {
            "models": networks,
            "guessing": {split: guessing(np.asarray(data.labels)) for split, data in self.splits.items()},
            "inner_products": inner_products,
        }

    def evaluate(self, tasks: Mapping[str, Task], ends: str = "AB") -> dict[str, dict[str, Metrics]]:
        """The metrics of each task on each split, from the rows there are and the evaluation of all others.

        Agreement is counted with the labels that the two networks `ends` predict.
        """
        sets = {
            name: (data.images, {"label": data.labels, "predicted": self._predictions(data, ends)})
            for name, data in self.splits.items()
        }
        metrics = {"accuracy": on_label(accuracy), "agreement": agreement}
        measured = self._evaluate_on(sets, tasks, {"loss": on_label(cross_entropy), "metrics": metrics})
        counts = {name: len(data.labels) for name, data in self.splits.items()}

        def count_agreement(metrics: Metrics, split: str) -> Metrics:
            return Metrics({**metrics.values, "agreement": np.rint(metrics.agreement * counts[split]).astype(int)})

        return {
            name: {split: count_agreement(found, split) for split, found in by_split.items()}
            for name, by_split in measured.items()
        }

    def _predictions(self, data: Split, ends: str) -> Int[np.ndarray, "n 2"]:
        """The labels that two networks predict."""
        only = (("predicted", predicted),)
        networks = [self.networks[letter].params for letter in ends]
        found = [measure_examples(self.store.apply, params, *data, only)["predicted"][0] for params in networks]
        return np.stack(found, axis=1)

    def _evaluate_on(
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
        """The random keys of the combinations of a task, of `these` or of all."""
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
        """Evaluates the missing combinations of a task, and keeps them under their names call by call."""
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
        """The function, the draw and the networks that give a task's combinations, repaired or as they are."""
        networks = replicate(task.networks)
        if not self.config.repair:
            return self.store.apply, task.draw, networks
        images = self.store.data.train.first(REPAIR_IMAGES).images
        return repaired(self.store.apply, networks, images, task.draw, spec=self.store.spec, ends=task.ends)

    def measure_curves(
        self, tasks: Mapping[str, Task], shape: tuple[int, ...], ends: str = "AB", between: Any = ...
    ) -> Results:
        """Curves between two networks, and their barriers over the points that `between` picks.

        With --temperatures also the test losses of each network and combination at its own best temperature.
        """
        measured = self.evaluate(tasks, ends)
        curves = {
            name: {split: as_lists(metrics, shape) for split, metrics in by_split.items()}
            for name, by_split in measured.items()
        }
        scores = [self.basics["models"][letter] for letter in ends]
        found = {"ends": list(ends), "curves": curves, "barriers": barriers(scores, curves, between)}
        if self.config.temperatures:
            found["at_best_temperature"] = self._measure_at_best_temperature(tasks, shape, ends, between)
        return found

    def _measure_at_best_temperature(
        self, tasks: Mapping[str, Task], shape: tuple[int, ...], ends: str, between: Any
    ) -> Results:
        """Test losses of the networks and on the curves, and barriers: each loss at a temperature of its own."""
        counts = [len(data.labels) for data in self.halves.values()]
        at_all: Any = {"loss": cross_entropy, "metrics": {"tempered": tempered_cross_entropy(TEMPERATURES)}}
        with self.store.durations.timed("evaluation"):
            networks = {
                x: [score(self.store.apply, self.networks[x].params, *data, **at_all) for data in self.halves.values()]
                for x in ends
            }
        levels = {x: float(cross_fit([at.tempered for at in halves], counts)) for x, halves in networks.items()}
        measured = self._evaluate_on(self.halves, tasks, at_all)
        curves = {
            name: cross_fit([at.tempered for at in halves.values()], counts).reshape(shape)
            for name, halves in measured.items()
        }
        lost = {name: barrier("loss", curve[between], *levels.values()) for name, curve in curves.items()}
        return {
            "models": {x: {"test": {"loss": loss}} for x, loss in levels.items()},
            "curves": {name: {"test": {"loss": curve.tolist()}} for name, curve in curves.items()},
            "barriers": {name: {"test": {"loss": loss}} for name, loss in lost.items()},
        }

    def measure_pair(
        self, draw: Distribution | Draw, name: str, label: str, values: Any, between: Any = ...
    ) -> Results:
        """The curves of A combined with B, naive and aligned, over the values of a parameter."""
        samples = self.config.samples
        parameters = np.repeat(np.asarray(values, np.float32), samples)
        a, b = (self.networks[letter].params for letter in "AB")
        pairs = {"naive": (a, b), "aligned": (a, self.align())}
        tasks = {variant: Task(draw, pairs[variant], parameters) for variant in VARIANTS}
        curves = self.measure_curves(tasks, (len(values), samples), between=between)
        return {"parameter": {"name": name, "label": label, "values": np.asarray(values).tolist()}, **curves}


def guessing(labels: np.ndarray) -> Results:
    """What a network that looks at no image can reach: its loss and accuracy, and of how many images."""
    counts = np.bincount(labels)
    frequencies = counts[counts > 0] / len(labels)
    return {
        "loss": float(-(frequencies * np.log(frequencies)).sum()),
        "accuracy": float(frequencies.max()),
        "images": len(labels),
    }


def as_lists(metrics: Metrics, shape: tuple[int, ...]) -> Results:
    """Loss, accuracy and agreement as nested lists, the axis of combinations in the given shape."""
    kept = {"loss": metrics.loss, "accuracy": metrics.accuracy, "agreement": metrics.agreement}
    return {name: values.reshape(*shape, *values.shape[1:]).tolist() for name, values in kept.items()}


def cross_fit(tempered: Sequence[Float[np.ndarray, "*k t"]], counts: Sequence[int]) -> Float[np.ndarray, "*k"]:
    """Return the mean loss over two halves of the examples, each at the temperature that is best on the other half.

    Args:
        tempered: For each half, the mean loss at each of t temperatures.
        counts: How many examples each half has.
    """
    losses = [
        np.take_along_axis(own, np.argmin(other, axis=-1)[..., None], axis=-1)[..., 0]
        for own, other in (tempered, tempered[::-1])
    ]
    return np.asarray(np.average(losses, axis=0, weights=counts))
