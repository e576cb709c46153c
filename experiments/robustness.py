"""How much of a layer's matching matters: its k least correlated pairs are re-matched at random.

    python -m experiments.robustness --setup mlp-digits
    python -m experiments.robustness --setup tiny10-cifar10 --width 32     # the paper's, on an accelerator

For each permutation the matched pairs are ordered by the correlation of their activations; a random derangement of
the k lowest is applied to the aligned B, and the barrier of the line to A is measured. The paper, for Tiny-10: a large
part of each layer can be re-matched, and layers 1, 6, 7 and 8 survive even k = N. It says of a derangement that it
keeps the magnitude and the distribution of a layer's activations, and supposes that B's weights are distributed like
A's: both are checked.
"""

import zlib
from dataclasses import dataclass
from typing import Annotated, Any, cast

import jax
import matplotlib
import numpy as np
from matplotlib.figure import Figure

from mcomb.base import Params, named_leaves
from mcomb.combination import combine
from mcomb.files import AnyPath
from mcomb.lab.barriers import barrier
from mcomb.lab.cli import Flag
from mcomb.lab.config import CombinationConfig
from mcomb.lab.experiment import Experiment, main
from mcomb.lab.figures import COLOURS, LEVELS, LINES, STYLE, save, wrap
from mcomb.lab.measure import Run, Task
from mcomb.lab.pairs import spread
from mcomb.lab.results import METRICS, SPLITS, Results
from mcomb.lab.setups import SETUPS
from mcomb.lab.verdicts import Verdict, same_distribution, works
from mcomb.matching.activations import correlations
from mcomb.symmetry.intermediates import list_intermediates, unit_activations
from mcomb.symmetry.spec import Perms, PermutationSpec

IMAGES = 32  # on which activations are compared
VALUES = 100_000  # of a layer's activations or weights, for comparing distributions
PAPER = {("tiny10-cifar10", 32): ("conv1", "conv6", "conv7", "conv8")}  # layers that survive k = N


@dataclass(frozen=True)
class RobustnessConfig(CombinationConfig):
    """The flags of the re-matching."""

    counts: Annotated[int, Flag("values of k for each layer, from 2 to all its units", at_least=2)] = 8
    line_points: Annotated[int, Flag("points on each line, end points included", at_least=3)] = 5


def derangement(rng: np.random.Generator, n: int) -> np.ndarray:
    """A permutation of n ≥ 2 things that leaves none in place, uniform among all such."""
    while True:  # one in e permutations is a derangement
        order = rng.permutation(n)
        if (order != np.arange(n)).all():
            return order


def rematch(scores: np.ndarray, k: int, rng: np.random.Generator) -> np.ndarray:
    """The permutation that deranges the k units of lowest score and leaves the others."""
    lowest = np.argsort(scores, kind="stable")[:k]
    order = np.arange(len(scores))
    order[lowest] = lowest[derangement(rng, k)]
    return order


def counts(units: int, how_many: int) -> list[int]:
    """The values of k for a layer of so many units, from 2 to all of them."""
    return [int(k) for k in np.unique(np.linspace(2, units, how_many).round())]


def combinations(config: RobustnessConfig) -> int:
    """How many networks are evaluated: those of each line of each layer, and those of the line as matched."""
    units = SETUPS[config.setup].spec(config.width).sizes.values()
    return config.line_points * (1 + sum(len(counts(n, config.counts)) for n in units))


def lines(spec: PermutationSpec) -> tuple[Any, Any]:
    """The draw of the line from A to B under further permutations, which come with the parameter; and its ends."""

    def ends(parameter: tuple[Any, Any], a: Params, b: Params) -> tuple[Params, Params]:
        return a, spec.apply(parameter[1], b)

    def draw(key: Any, parameter: tuple[Any, Any], a: Params, b: Params) -> Params:
        return combine(*ends(parameter, a, b), 1 - parameter[0])

    return draw, ends


def layer_activations(run: Run, params: Params) -> dict[str, np.ndarray]:
    """The activations of each permutation's units on a few train images, all in one row."""
    spec, apply, images = run.store.spec, run.store.apply, run.store.data.train.first(IMAGES).images
    intermediates = list_intermediates(spec, apply, params, images)
    arrays = unit_activations(spec, intermediates)
    tapped = intermediates.tap({array.id for found in arrays.values() for array in found})
    found = jax.jit(tapped)(params, images)[1]
    return {perm: np.concatenate([np.ravel(found[array.id]) for array in arrays[perm]]) for perm in arrays}


def layer_weights(spec: PermutationSpec, params: Params, perm: str) -> np.ndarray:
    """The weights that a permutation re-orders, all in one row."""
    leaves = named_leaves(params)
    return np.concatenate([np.ravel(leaves[leaf]) for leaf in dict.fromkeys(name for name, _ in spec.axes_of(perm))])


def compare(x: np.ndarray, y: np.ndarray) -> Results:
    """Whether two samples have the same magnitude and distribution: a ratio, a distance, and a judgement."""
    rng = np.random.default_rng(0)
    some_x, some_y = (rng.choice(values, min(len(values), VALUES), replace=False) for values in (x, y))
    alike, distance = same_distribution(some_x, some_y)
    return {"magnitude": float(np.linalg.norm(y) / np.linalg.norm(x)), "distance": distance, "alike": alike}


def measure(run: Run) -> Results:
    """For each permutation, the barriers of the line over k, and what a derangement of all its units keeps."""
    config, spec = run.config, run.store.spec
    a, aligned = run.networks["A"].params, run.align()
    correlation = correlations(spec, a, aligned, run.store.apply, run.splits["train"].images)

    shares = np.linspace(0, 1, config.line_points, dtype=np.float32)
    cases: list[tuple[str, int, Perms]] = [("as matched", 0, spec.identity())]
    for perm in spec.sizes:
        for k in counts(spec.sizes[perm], config.counts):
            rng = np.random.default_rng([config.seed, zlib.crc32(perm.encode()), k])
            cases.append((perm, k, spec.identity() | {perm: rematch(correlation[perm], k, rng)}))
    stacked = jax.tree.map(lambda *orders: np.repeat(np.stack(orders), len(shares), axis=0), *(c[2] for c in cases))
    draw, ends = lines(spec)
    task = Task(draw, (a, aligned), (np.tile(shares, len(cases)), stacked), ends=ends)
    measured = run.evaluate({"lines": task})["lines"]
    levels = [run.basics["models"][letter] for letter in "AB"]

    def barriers(case: int) -> Results:
        part = slice(case * len(shares), (case + 1) * len(shares))
        return {
            split: {m: barrier(m, getattr(measured[split], m)[part], *(at[split][m] for at in levels)) for m in METRICS}
            for split in SPLITS
        }

    before = layer_activations(run, aligned)
    layers: Results = {}
    for perm in spec.sizes:
        mine = [i for i, case in enumerate(cases) if case[0] == perm]
        found = [barriers(i) for i in mine]
        deranged = spec.apply(cases[mine[-1]][2], aligned)
        layers[perm] = {
            "units": spec.sizes[perm],
            "k": [cases[i][1] for i in mine],
            "correlation": np.sort(correlation[perm]).tolist(),
            "barriers": {split: {m: [at[split][m] for at in found] for m in METRICS} for split in SPLITS},
            "activations": compare(before[perm], layer_activations(run, deranged)[perm]),
            "weights": compare(layer_weights(spec, a, perm), layer_weights(spec, deranged, perm)),
        }
    return {"layers": layers, "unperturbed": barriers(0)}


def judge(results: Results) -> Verdict:
    """Whether the matching works, half of each layer can be re-matched, and some layers survive it whole."""
    layers, as_matched = results["layers"], results["unperturbed"]["test"]

    def extra(layer: Results, k: float) -> dict[str, float]:
        """What re-matching k of a layer's pairs adds to the barrier."""
        at = layer["barriers"]["test"]
        return {m: max(0.0, float(np.interp(k, layer["k"], at[m])) - as_matched[m]) for m in METRICS}

    half = {name: extra(layer, layer["units"] / 2) for name, layer in layers.items()}
    survive = [name for name, layer in layers.items() if works(results, extra(layer, layer["units"]))]
    expected = PAPER.get((results["config"]["setup"], results["config"]["width"]), survive[:1] or ["any layer"])
    kept = all(layer["activations"]["alike"] and abs(layer["activations"]["magnitude"] - 1) < 0.01
               for layer in layers.values())  # fmt: skip
    alike = all(layer["weights"]["alike"] for layer in layers.values())
    worst = max(half, key=lambda name: half[name]["accuracy"])
    return Verdict(
        bool(
            works(results, as_matched)
            and all(works(results, cost) for cost in half.values())
            and set(expected) <= set(survive)
            and kept
            and alike
        ),
        f"As matched, the line loses {as_matched['accuracy']:.1%} of test accuracy (loss barrier "
        f"{as_matched['loss']:.3f}). Re-matching the lower half of a layer's pairs costs at most "
        f"{half[worst]['accuracy']:.1%} more ({worst}); re-matching all of them costs little in {len(survive)} of "
        f"{len(layers)} layers ({', '.join(survive) or 'none'}). A derangement "
        f"{'keeps' if kept else 'does not keep'} the magnitude and distribution of activations; B's weights are "
        f"{'' if alike else 'not '}distributed like A's, layer by layer.",
    )


def draw(results: Results, folder: AnyPath) -> None:
    """Draws, for each layer, loss and accuracy barriers against how many of its pairs are re-matched."""
    layers = results["layers"]
    columns = min(4, len(layers))
    rows = -(-len(layers) // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(1.75 * columns + 0.6, 3.0 * rows + 1.0), layout="constrained")
        parts = cast(Any, figure.subfigures(2, 1))
        for part, metric in zip(parts, METRICS, strict=True):
            panels = part.subplots(rows, columns, sharey=True, squeeze=False).ravel()
            for axes, (name, layer) in zip(panels, layers.items(), strict=False):
                for split in SPLITS:
                    values, low, high = (
                        part["layers"][name]["barriers"][split][metric] for part in (results, *spread(results))
                    )
                    axes.fill_between(layer["k"], low, high, color=COLOURS["aligned"], alpha=0.15, linewidth=0)
                    axes.plot(layer["k"], values, LINES[split], color=COLOURS["aligned"], marker=".", label=split)
                level = results["unperturbed"]["test"][metric]
                axes.axhline(level, color="0.35", linewidth=0.8, linestyle=LEVELS[0], label="as matched, test")
                axes.set_title(f"{name} (N = {layer['units']})")
            for axes in panels[len(layers) :]:
                axes.axis("off")
            part.supylabel(f"{metric} barrier", fontsize=8)
        parts[1].supxlabel("k: re-matched pairs, those of lowest correlation", fontsize=8)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(wrap(results["title"], 70), fontsize=9)
        save(figure, folder, results["experiment"])


EXPERIMENT = Experiment(
    name="robustness",
    title="re-matching the least correlated pairs of a layer",
    claim="A large part of each layer's matching can be exchanged at random; some layers survive it whole. A "
    "derangement keeps a layer's activations as they are distributed, and B's weights are distributed like A's.",
    alt="For each layer, loss and accuracy barriers against the number of re-matched pairs.",
    config=RobustnessConfig,
    combinations=combinations,
    measure=measure,
    draw=draw,
    judge=judge,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
