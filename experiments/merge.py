"""Compare learned and fitted merges with their parents and with baselines.

    python -m experiments.merge --setup mlp-digits --split biased           # five minutes on two CPU cores
    python -m experiments.merge --setup mlp-digits --split none             # both parents see the same examples
    python -m experiments.merge --setup mlp-cifar10 --split biased

The parents A and B see different examples. With `--split biased`, A sees 80 % of the examples of one half of the
classes and 20 % of the other half, and B sees the rest. On digits these are 95 % and 5 %, because 80 % would be
enough to learn all classes. In place of classes, a text has ten parts. `dirichlet` draws the fraction of each class,
and with `none` both parents see the same examples.

A fifth of the train examples is withheld from both parents. Merges and baselines, except for C, use only these
examples. The experiment scores them on the test examples. The baselines are:

- parents with a corrected output bias
- a parent fine-tuned with the same data, steps and optimizer as the learned shares
- the ensemble: the mean of both parents' logits
- C, a network trained on all examples

`partial 1.25` keeps apart the units that match worst. It has the parameters, and about the FLOPs, of 1.25 networks.
Every other merge is one network. The paper draws shares at random and leaves open which points of the cube are better.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.figure import Figure

from mcomb.combination import mix, uniform
from mcomb.errors import UserError
from mcomb.evaluation.evaluate import evaluate, score
from mcomb.evaluation.objectives import cross_entropy
from mcomb.evaluation.repair import repaired
from mcomb.io.paths import AnyPath
from mcomb.keys import stream
from mcomb.lab.cli import Flag
from mcomb.lab.data.datasets import Split
from mcomb.lab.data.splits import PARTITIONS, Subset
from mcomb.lab.figures import COLOURS, STYLE, save
from mcomb.lab.flags import Config, require_own_training
from mcomb.lab.runs.command import main
from mcomb.lab.runs.experiment import Experiment
from mcomb.lab.runs.measure import REPAIR_EXAMPLES, Run
from mcomb.lab.runs.pairs import pool
from mcomb.lab.runs.results import METRICS, Number, Results, Scores, scores_of, sides, spread
from mcomb.lab.runs.verdicts import Verdict
from mcomb.lab.setups import SETUPS
from mcomb.lab.tables import columns, with_range
from mcomb.merging.fine_tuning import descend, fine_tune
from mcomb.merging.learned_shares import GRANULARITIES
from mcomb.merging.merge import Method as MergeMethod
from mcomb.merging.merge import learned, merge
from mcomb.merging.partial import merge_partly
from mcomb.runtime.progress import say
from mcomb.trees import Apply, Array, Inputs, Params

BUDGETS = (1.25, 1.5)  # parameters of partial merges, in multiples of one network
FISHER_EXAMPLES = 1000  # of the withheld examples, because each needs a gradient of its own
FINE_TUNING = (1e-2, 1e-3, 1e-4)  # learning rates; the best on held-out examples is used
MEASURED = ("withheld", "test")


@dataclass(frozen=True)
class MergeConfig(Config):
    """Flags of `merge`."""

    pairs: Annotated[int, Flag("independent triples of networks, for consecutive values of --seed", 1, 1000)] = 3
    split: Annotated[str, Flag("how the parents' train examples differ", choices=PARTITIONS)] = "biased"
    skew: Annotated[
        float | None, Flag("A's fraction of its classes (biased), or the concentration (dirichlet) [setup]", 0, 10**6)
    ] = None
    withheld: Annotated[int | None, Flag("train examples that no parent sees (default: a fifth)", at_least=20)] = None
    candidates: Annotated[int, Flag("random combinations; the best one counts", at_least=1)] = 100
    steps: Annotated[int, Flag("maximum number of gradient steps of learned and fine-tuned networks", at_least=1)] = 400

    def __post_init__(self) -> None:
        super().__post_init__()
        require_own_training("merge", self)
        if self.skew is not None and (self.split == "none" or (self.split == "biased" and self.skew > 1)):
            range_ = "remove it" if self.split == "none" else "use a fraction from 0 to 1"
            raise UserError(f"--skew {self.skew:g} is invalid with --split {self.split}: {range_}.")
        if (self.withheld or 0) >= (examples := SETUPS[self.setup].dataset.count()[0]):
            raise UserError(f"--withheld {self.withheld} leaves none of {examples:,} train examples: withhold fewer.")
        if self.split == "dirichlet" and self.skew == 0:
            raise UserError("--skew 0 is invalid with --split dirichlet: use a concentration above 0.")

    def subset(self, who: str) -> Subset:
        """Return the train examples of A or B, or the withheld examples."""
        dataset = SETUPS[self.setup].dataset
        default = {"biased": 0.95 if "digits" in dataset.name else 0.8, "dirichlet": 0.5, "none": 1.0}[self.split]
        skew = default if self.skew is None else self.skew
        return Subset(self.split, skew, self.withheld or dataset.count()[0] // 5, self.seed, who)

    def examples_of(self, letter: str) -> Subset | None:
        """Return the train examples of network A or B, or None for C, which sees all."""
        return None if letter == "C" else self.subset(letter)


@dataclass(frozen=True, kw_only=True)
class MergeResults(Results):
    """Results of `merge`: the scores of each method, and the numbers of A's, B's and withheld examples."""

    methods: dict[str, Scores]
    seen: dict[str, Number]


class MergedFunction(NamedTuple):
    """A function and its parameters: one network, or for example an ensemble."""

    apply: Apply
    params: Any


class Pair(NamedTuple):
    """The arguments of a method: a run, its parents, B aligned to A, and the withheld examples."""

    run: Run
    a: Params
    b: Params
    aligned: Params
    withheld: Split

    @property
    def apply(self) -> Apply:
        return self.run.store.apply

    @property
    def seed(self) -> int:
        return self.run.config.seed

    @property
    def learning(self) -> dict[str, Any]:
        """Return the options shared by all gradient-based methods."""
        return {"steps": self.run.config.steps, "seed": self.seed}

    def merge(self, method: str | MergeMethod) -> Params:
        """Merge A and the aligned B by a method of the library."""
        return merge(self.apply, (self.a, self.aligned), *self.withheld, method=method, spec=self.run.store.spec).params


ComparedMethod = Callable[[Pair], MergedFunction]


def network(params: Callable[[Pair], Params]) -> ComparedMethod:
    """Return a method whose result is one network."""
    return lambda pair: MergedFunction(pair.apply, params(pair))


@dataclass(frozen=True)
class _Bias:
    """A bias for each class, added to a network's logits."""

    def combine(self, numbers: Array, networks: Any) -> Any:
        return networks[0][0], numbers


@cache
def _with_bias(apply: Apply) -> Apply:
    def run(params: tuple[Params, Array], inputs: Inputs) -> Array:
        logits = apply(params[0], inputs)
        return logits + jnp.broadcast_to(params[1], logits.shape)

    return run


def correct_bias(pair: Pair, params: Params) -> MergedFunction:
    """Fit a network's output bias to the withheld examples, which are drawn from all groups alike."""
    apply, start = _with_bias(pair.apply), jnp.zeros(pair.run.store.setup.dataset.classes)
    how: Any = {"loss": cross_entropy, "batch_size": 100, "learning_rate": 0.1, "keep": None} | pair.learning
    how |= {"describe": "fitting the output bias"}
    found = descend(_Bias(), start, [(params, start)], apply, *pair.withheld, **how)
    return MergedFunction(apply, found.params)


def best_sample(pair: Pair) -> Params:
    """Return the combination with uniform shares that has the lowest loss on the withheld examples."""
    both = pair.a, pair.aligned
    halves = np.full(pair.run.config.candidates, 0.5, np.float32)
    keys = jax.random.split(stream(pair.seed, "coefficients", "merge"), len(halves))
    how: Any = {"vmap_size": pair.run.config.vmap_size}
    losses = evaluate(pair.apply, both, *pair.withheld, uniform, halves, keys, **how).loss
    return jax.jit(mix(uniform))(keys[losses.argmin()], halves[0], *both)


def refit_and_repair(pair: Pair) -> MergedFunction:
    """Refit the average, then restore the variance of its activations by REPAIR."""
    fitted, both = pair.merge("refit"), (pair.a, pair.aligned)
    inputs = pair.withheld.first(REPAIR_EXAMPLES).inputs
    apply, draw, given = repaired(pair.apply, both, inputs, _take_parameter, spec=pair.run.store.spec)
    return MergedFunction(apply, jax.jit(draw)(stream(0), fitted, *given))


def merge_to_budget(budget: float, pair: Pair) -> MergedFunction:
    """Merge the units that match best, and keep the others apart within a budget of parameters."""
    store = pair.run.store
    found = merge_partly(pair.apply, (pair.a, pair.aligned), pair.withheld.inputs, spec=store.spec, budget=budget)
    return MergedFunction(found.apply, found.params)


def _take_parameter(key: Any, parameter: Params, *networks: Params) -> Params:
    return parameter


def fine_tuned(pair: Pair) -> Params:
    """Fine-tune the better parent on the withheld examples at the best of three learning rates."""
    parents = [pair.a, pair.b]
    losses = [score(pair.apply, parent, *pair.withheld).loss for parent in parents]
    parent = parents[int(np.argmin(losses))]
    tuned = [fine_tune(pair.apply, parent, *pair.withheld, learning_rate=rate, **pair.learning) for rate in FINE_TUNING]
    return min(tuned, key=lambda found: found.loss).params


@cache
def _mean_logits(apply: Apply) -> Apply:
    def run(networks: tuple[Params, ...], inputs: Inputs) -> Array:
        return jnp.mean(jnp.stack([apply(params, inputs) for params in networks]), axis=0)

    return run


COMPARED_METHODS: Mapping[str, ComparedMethod] = {
    "A": network(lambda pair: pair.a),
    "B": network(lambda pair: pair.b),
    "A, bias corrected": lambda pair: correct_bias(pair, pair.a),
    "B, bias corrected": lambda pair: correct_bias(pair, pair.b),
    "midpoint, naive": network(lambda pair: jax.tree.map(lambda a, b: (a + b) / 2, pair.a, pair.b)),
    "midpoint, aligned": network(lambda pair: pair.merge("average")),
    "best sample": network(best_sample),
    "Fisher": network(lambda pair: pair._replace(withheld=pair.withheld.first(FISHER_EXAMPLES)).merge("fisher")),
    **{
        f"learned per {per}": network(lambda pair, per=per: pair.merge(learned(per=per, **pair.learning)))  # type: ignore[misc]
        for per in GRANULARITIES
    },
    "refit": network(lambda pair: pair.merge("refit")),
    "refit + REPAIR": refit_and_repair,
    **{f"partial {budget:g}": partial(merge_to_budget, budget) for budget in BUDGETS},
    "fine-tuned": network(fine_tuned),
    "ensemble": lambda pair: MergedFunction(_mean_logits(pair.apply), (pair.a, pair.b)),
    "joint": network(lambda pair: pair.run.networks["C"].params),
}

PARENTS = ("A", "B", "A, bias corrected", "B, bias corrected")
CONTROLS = ("fine-tuned", "ensemble", "joint")
MERGES = tuple(name for name in COMPARED_METHODS if name not in (*PARENTS, *CONTROLS))
ONE_NETWORK = tuple(name for name in MERGES if not name.startswith("partial"))
IN_THE_CUBE = tuple(name for name in ONE_NETWORK if name != "midpoint, naive" and not name.startswith("refit"))


def measure(run: Run) -> MergeResults:
    """Measure loss and accuracy of every method on the withheld and on the test examples."""
    train = run.store.data.train
    groups = run.store.setup.dataset.groups(train.labels)
    withheld = train.take(run.config.subset("withheld").rows(groups))
    pair = Pair(run, run.networks["A"].params, run.networks["B"].params, run.align(), withheld)
    splits = {"withheld": withheld, "test": run.splits["test"]}
    for name, method in COMPARED_METHODS.items():
        if name not in run.rows:
            say(f"{name} …")
            with run.store.durations.timed("merging"):
                merged = method(pair)
            with run.store.durations.timed("evaluation"):
                found = {split: score(*merged, *splits[split]) for split in MEASURED}
            run.rows.add([{"name": name, **scores_of(found)}])
    counts: dict[str, Number] = {who: len(run.config.subset(who).rows(groups)) for who in ("A", "B", "withheld")}
    scores = {name: {split: run.rows[name][split] for split in MEASURED} for name in COMPARED_METHODS}
    return MergeResults(**run.basics, methods=scores, seen=counts)


def chosen_merge(results: MergeResults, among: tuple[str, ...] = ONE_NETWORK) -> str:
    """Return the merge with the lowest loss on the withheld examples."""
    return min(among, key=lambda name: results.methods[name]["withheld"]["loss"])


def closed(results: MergeResults, name: str) -> float:
    """Return the fraction of the accuracy gap between the aligned midpoint and the ensemble that a method closes."""
    at = {n: results.methods[n]["test"]["accuracy"] for n in (name, "midpoint, aligned", "ensemble")}
    way = at["ensemble"] - at["midpoint, aligned"]
    return (at[name] - at["midpoint, aligned"]) / way if way > 0 else float(at[name] >= at["ensemble"])


def judge(results: MergeResults) -> Verdict:
    """Require that the merge chosen on withheld examples clearly beats both parents, and that learning beats sampling.

    The margin is two standard errors of an accuracy. With split data, the merge must also close half of the gap
    between the aligned midpoint and the ensemble.
    """
    test = {name: by_split["test"] for name, by_split in results.methods.items()}
    accuracy = {name: at["accuracy"] for name, at in test.items()}
    best, inside = chosen_merge(results), chosen_merge(results, IN_THE_CUBE)
    parent = max(accuracy["A"], accuracy["B"])
    examples = results.guessing["test"]["examples"]
    error = (parent * (1 - parent) / examples) ** 0.5
    learned, sampled = test["learned per unit"], test["best sample"]
    learning_pays = learned["loss"] <= sampled["loss"] and learned["accuracy"] >= sampled["accuracy"] - error
    is_split = results.config["split"] != "none"
    part = closed(results, best)
    way = ""
    if is_split and accuracy["ensemble"] > accuracy["midpoint, aligned"]:
        gap = f"It closes {part:.0%} of the gap between the aligned midpoint and the ensemble."
        way = f" {gap}" if part <= 1 else " It is better than the ensemble."
    return Verdict(
        bool(
            accuracy[best] > parent + 2 * error
            and accuracy["midpoint, aligned"] > accuracy["midpoint, naive"]
            and learning_pays
            and (not is_split or part >= 0.5)
        ),
        f"The best merge on the withheld examples ({best}) has a test accuracy of {accuracy[best]:.1%}. The better "
        f"parent has {parent:.1%}, the midpoint {accuracy['midpoint, aligned']:.1%} aligned and "
        f"{accuracy['midpoint, naive']:.1%} naive, the ensemble {accuracy['ensemble']:.1%}, and a parent fine-tuned on "
        f"the same examples {accuracy['fine-tuned']:.1%}.{way} The best merge inside the cube ({inside}) has "
        f"{accuracy[inside]:.1%}. Shares learned per unit have a test loss of {learned['loss']:.3f}, and the best of "
        f"{results.config['candidates']} random combinations has {sampled['loss']:.3f}.",
    )


def table(results: MergeResults) -> str:
    """Format one row for each method: accuracy and loss on the test and on the withheld examples."""
    rows = [("", *(f"{split} {metric}" for split in reversed(MEASURED) for metric in reversed(METRICS)))]
    parts = sides(results)
    for name in results.methods:
        cells = [
            [part.methods[name][split][metric] for part in parts]
            for split in reversed(MEASURED)
            for metric in reversed(METRICS)
        ]
        rows.append((name, *map(with_range, cells)))
    return columns(rows)


def draw(results: MergeResults, folder: AnyPath) -> None:
    """Draw test accuracy and loss of every method, with the range over pairs."""
    methods = results.methods
    at = np.arange(len(methods))[::-1]
    kinds = {"parents": (PARENTS, "0.35"), "merges": (MERGES, COLOURS["aligned"]), "baselines": (CONTROLS, "#D55E00")}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.0, 0.19 * len(methods) + 1.3), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for axes, metric in zip(panels, reversed(METRICS), strict=True):
            values, low, high = (
                np.array([part.methods[name]["test"][metric] for name in methods])
                for part in (results, *spread(results))
            )
            best = (np.max if metric == "accuracy" else np.min)(values[[list(methods).index(x) for x in "AB"]])
            axes.axvline(best, color="0.35", linewidth=0.8, linestyle=":", label="better parent")
            for kind, (names, colour) in kinds.items():
                mine = np.isin(list(methods), names)
                axes.hlines(at[mine], low[mine], high[mine], color=colour, linewidth=1)
                axes.plot(values[mine], at[mine], "o", color=colour, markersize=4, label=kind)
            axes.set_xlabel(f"test {metric}")
        panels[1].set_xscale("log")  # the naive midpoint's loss is far above all others
        panels[1].xaxis.set_major_formatter("{x:g}")
        panels[0].set_yticks(at, list(methods))
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        figure.suptitle(results.title, fontsize=9)
        save(figure, folder, results.experiment)


EXPERIMENT = Experiment(
    name="merge",
    title="learned and fitted merges",
    claim="Are well-chosen element-wise combinations better than both parents?",
    is_open=True,
    alt="Test accuracy and loss of parents, merges and baselines, one row each, with the range over pairs.",
    networks="ABC",
    config=MergeConfig,
    results=MergeResults,
    measure=measure,
    draw=draw,
    judge=judge,
    judge_together=lambda pairs: f"On average: {judge(replace(pool(pairs), config=pairs[0].config)).finding}",
    table=table,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
