"""Fine-tune A on a new task, and carry the update to B, which has never seen the task.

    python -m experiments.transport --setup mlp-digits    # a few minutes on two CPU cores, networks included
    python -m experiments.transport --setup vit-digits --pretrained
    python -m experiments.transport --setup decoder-text --pretrained --pairs abc

The new task of networks for images is the same images, turned by 45 degrees. That of language models is Python code:
three modules of the standard library. The update is fine-tuned A minus A. It is added to B in four ways:

- naive: as it is
- permutations: in B's order of units
- all groups: also through rotations, invertible matrices, scales and signs
- random order: in a random order of units, as a control

A scale multiplies each update. The line of networks B + scale · update is measured from −0.5 to 1.5, so it includes B
at 0 and, at negative scales, updates with the opposite sign. The scale with the lowest train loss counts. Gains are
fractions of the gain of B when it is fine-tuned itself. Compare accuracies first: confident wrong answers cost so much
that a random update of a large scale also lowers the loss. On digits, expect test accuracies of B of 0.22 before, 0.15
naive, 0.91 by permutations, 0.86 by all groups, 0.17 in random order, and 0.99 if B is fine-tuned itself. Published
gains in accuracy, for CLIP on EuroSAT, are −7.6 points naive, 1.0 by permutations and 5.0 by all symmetries.

Only weights are carried. Momentum can be carried as well, but not Adam's second moments, because a rotation mixes the
gradients of several weights: an optimizer has to estimate them again.
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.figure import Figure

from mcomb.combination import linear
from mcomb.evaluation.evaluate import score
from mcomb.evaluation.objectives import accuracy, cross_entropy
from mcomb.io.fingerprints import fingerprint
from mcomb.io.paths import AnyPath
from mcomb.keys import stream
from mcomb.lab.cache.matchings import MatchingKey
from mcomb.lab.cli import Flag
from mcomb.lab.data.datasets import Split, Splits, TextDataset
from mcomb.lab.data.text import encode, split_text
from mcomb.lab.figures import COLOURS, STYLE, save
from mcomb.lab.flags import Config
from mcomb.lab.runs.command import main
from mcomb.lab.runs.experiment import Experiment
from mcomb.lab.runs.measure import Run, Task
from mcomb.lab.runs.pairs import pool
from mcomb.lab.runs.results import METRICS, SPLITS, Number, Results, Scores, scores_of, sides, spread
from mcomb.lab.runs.verdicts import Verdict
from mcomb.lab.setups import SETUPS
from mcomb.lab.tables import columns, with_range
from mcomb.matching.align import Alignment
from mcomb.merging.fine_tuning import fine_tune
from mcomb.runtime.devices import replicate
from mcomb.trees import Params

KEYS = {"permutations": MatchingKey("A", "B", groups="permutations"), "all groups": MatchingKey("A", "B", groups="all")}
WAYS = {"naive": COLOURS["naive"], "permutations": COLOURS["aligned"], "all groups": "#009E73", "random order": "0.6"}
BEST = ", best"  # scale
SCALES = np.linspace(-0.5, 1.5, 9, dtype=np.float32)
ANGLE = 45  # degrees
MODULES = ("argparse", "inspect", "tarfile")  # the last one is longer than the test split


@dataclass(frozen=True)
class TransportConfig(Config):
    """Flags of `transport`, without --groups, because the experiment compares them."""

    groups: ClassVar[str] = "permutations"  # type: ignore[misc]
    steps: Annotated[int, Flag("maximum number of gradient steps of fine-tuning", at_least=1)] = 400


@dataclass(frozen=True, kw_only=True)
class TransportResults(Results):
    """Results of `transport`, all on the new task.

    Attributes:
        before: The scores of A and B.
        after: The scores of A and B after fine-tuning.
        curves: For each way, the scores of B plus the update, at each of SCALES.
        carried: For each way, the test scores of B plus the whole update, and plus the update at its best scale.
    """

    before: dict[str, Scores]
    after: dict[str, Scores]
    curves: dict[str, Scores]
    carried: dict[str, dict[str, Number]]


def new_task(setup: str, splits: Splits) -> Splits:
    """Return examples of the new task."""
    if isinstance(SETUPS[setup].dataset, TextDataset):
        return split_text(python_code(), splits.train.inputs.shape[1])
    return Splits(*(Split(turn(split.inputs), split.labels) for split in splits))


def python_code() -> np.ndarray:
    """Return the source code of MODULES as tokens."""
    return encode("".join(inspect.getsource(import_module(name)) for name in MODULES))


def code_fingerprint(config: TransportConfig) -> str:
    """Return the fingerprint of the source code if the new task reads it, because it differs between Pythons."""
    return fingerprint(python_code()) if isinstance(SETUPS[config.setup].dataset, TextDataset) else ""


def turn(images: np.ndarray) -> np.ndarray:
    """Return images turned by ANGLE."""
    import scipy.ndimage  # imported here because it is slow

    return scipy.ndimage.rotate(images, ANGLE, axes=(2, 1), reshape=False, order=1)


def tune(run: Run, letter: str, train: Split) -> Params:
    """Return a fine-tuned network; a file keeps it, because several pairs share a network."""
    network, config = run.networks[letter], run.config
    keep = run.store.folders.networks / f"{network.name},{run.experiment}.npz"
    how: Any = {"steps": config.steps, "seed": config.seed, "keep": keep}
    return fine_tune(run.store.apply, network.params, *train, **how).params


def carry(run: Run, update: Params) -> dict[str, Params]:
    """Return A's update in the units of B, in each of the ways."""
    store, found = run.store, {"naive": update}
    for way, key in KEYS.items():
        aligned = Alignment(run.align(key), run.matchings[key].matching, store.matchings.spec(key.groups))
        found[way] = aligned.transport(update)
    order = store.spec.random(stream(run.config.seed, "transport"))
    return found | {"random order": store.spec.apply(order, update)}


def measure(run: Run) -> TransportResults:
    """Fine-tune A and B on the new task, and measure the lines from B along A's update."""
    new, a, b = new_task(run.config.setup, run.store.data), *(run.networks[letter].params for letter in "AB")
    tuned = {letter: tune(run, letter, new.train) for letter in "AB"}
    counts = run.config.evaluation_examples
    splits = {name: replicate(split.subset(counts[name])) for name, split in new._asdict().items()}

    def scores(params: Params) -> Scores:
        return scores_of({name: score(run.store.apply, params, *split) for name, split in splits.items()})

    moved = carry(run, jax.tree.map(jnp.subtract, tuned["A"], a))
    tasks = {way: Task(linear, (b, jax.tree.map(jnp.add, b, update)), SCALES) for way, update in moved.items()}
    curves = run.evaluate_on(splits, tasks, {"loss": cross_entropy, "metrics": {"accuracy": accuracy}})
    best = {way: int(curve["train"].loss.argmin()) for way, curve in curves.items()}
    chosen = {way: (way, int(np.abs(SCALES - 1).argmin())) for way in WAYS}
    chosen |= {f"{way}{BEST}": (way, best[way]) for way in WAYS}
    return TransportResults(
        **run.basics,
        before={"A": scores(a), "B": scores(b)},
        after={letter: scores(params) for letter, params in tuned.items()},
        curves={
            way: {name: {m: curve[name].values[m].tolist() for m in METRICS} for name in SPLITS}
            for way, curve in curves.items()
        },
        carried={
            name: {"scale": float(SCALES[i])} | {m: float(curves[way]["test"].values[m][i]) for m in METRICS}
            for name, (way, i) in chosen.items()
        },
    )


def gains(results: TransportResults, scores: Mapping[str, Number]) -> list[float]:
    """Return the gains of B with these scores, in each metric, as fractions of its gains by fine-tuning itself."""
    start, end = (of["B"]["test"] for of in (results.before, results.after))
    return [(scores[m] - start[m]) / (end[m] - start[m]) if end[m] != start[m] else math.nan for m in METRICS]


def judge(results: TransportResults) -> Verdict:
    """Answer whether all groups carry more than the naive update and the control, in loss and in accuracy."""
    arrived = {way: gains(results, results.carried[f"{way}{BEST}"]) for way in WAYS}
    least = [max(0.0, *others) for others in zip(arrived["naive"], arrived["random order"], strict=True)]
    each = [f"{way} {loss:z.0%} and {accuracy:z.0%}" for way, (loss, accuracy) in arrived.items()]
    start, end = (of["B"]["test"] for of in (results.before, results.after))
    return Verdict(
        all(gain > limit for gain, limit in zip(arrived["all groups"], least, strict=True)),
        f"Fine-tuning B changes its test loss from {start['loss']:.3f} to {end['loss']:.3f} and its accuracy from "
        f"{start['accuracy']:.1%} to {end['accuracy']:.1%}. At its best scale, A's update gives B these parts of the "
        f"gains in loss and accuracy: {', '.join(each)}.",
    )


def rows_of(results: TransportResults) -> dict[str, Mapping[str, Number]]:
    """Return the test scores of each network by its name in the table."""
    (a, b), (tuned_a, tuned_b) = ([of[letter]["test"] for letter in "AB"] for of in (results.before, results.after))
    carried = {f"B + {name}": scores for name, scores in results.carried.items()}
    return {"A": a, "A, fine-tuned": tuned_a, "B": b, **carried, "B, fine-tuned": tuned_b}


def table(results: TransportResults) -> str:
    """Format the scale and the test scores of each network, and its shares of B's gains in loss and in accuracy."""
    rows = [("", "scale", *(f"test {m}" for m in METRICS), "share of gain")]
    for name, scores in rows_of(results).items():
        each = [rows_of(side)[name] for side in sides(results)]
        scale = f"{scores['scale']:.2f}" if "scale" in scores else ""
        arrived = " / ".join(f"{gain:z.0%}" for gain in gains(results, scores)) if "+" in name else ""
        rows.append((name, scale, *(with_range([one[m] for one in each]) for m in METRICS), arrived))
    return columns(rows)


def draw(results: TransportResults, folder: AnyPath) -> None:
    """Draw test loss and accuracy of B plus A's update over the scale, for each way."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.0, 2.8), layout="constrained")
        for axes, metric in zip(figure.subplots(1, 2), METRICS, strict=True):
            start, end = (of["B"]["test"][metric] for of in (results.before, results.after))
            axes.axhline(end, color="0.35", linewidth=0.8, linestyle="-", label="B, fine-tuned itself")
            axes.axhline(start, color="0.35", linewidth=0.8, linestyle=":", label="B")
            for way, colour in WAYS.items():
                values, low, high = (side.curves[way]["test"][metric] for side in (results, *spread(results)))
                axes.fill_between(SCALES, low, high, color=colour, alpha=0.2, linewidth=0)
                axes.plot(SCALES, values, color=colour, marker="o", markersize=2.5, label=way)
            axes.set_xlabel("scale of A's update, added to B")
            axes.set_ylabel(f"test {metric} on the new task")
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(results.title, fontsize=9)
        save(figure, folder, results.experiment)


EXPERIMENT = Experiment(
    name="transport",
    title="A's fine-tuning update, carried to B",
    claim="Does a fine-tuning update help another network more if the networks' symmetries carry it?",
    is_open=True,
    alt="Test loss and accuracy of B on a new task over the scale of A's update, added in four ways.",
    matchings=lambda config: tuple(KEYS.values()),
    extra_data=code_fingerprint,
    config=TransportConfig,
    combinations=lambda config: len(WAYS) * len(SCALES),
    results=TransportResults,
    measure=measure,
    draw=draw,
    judge=judge,
    judge_together=lambda pairs: f"On average: {judge(pool(pairs)).finding}",
    table=table,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
