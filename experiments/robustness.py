"""Re-match the k least important pairs of a layer at random.

    python -m experiments.robustness --setup mlp-digits
    python -m experiments.robustness --setup mlp-digits --by correlation norm fisher variance random
    python -m experiments.robustness --setup tiny10-cifar10 --width 32     # the paper's network, on an accelerator

For each permutation, the experiment orders the matched pairs by the correlation of their activations. It applies a
random derangement of the k lowest pairs to the aligned B, and measures the barrier of the line to A. In the paper, a
large part of each layer of Tiny-10 can be re-matched, and layers 1, 6, 7 and 8 tolerate even k = N. The experiment also
checks two of the paper's statements: that a derangement preserves the magnitude and distribution of activations, and
that B's weights are distributed like A's.

--by orders pairs by other measures: the norm of all incoming and outgoing weights of the two units, the sum of their
diagonal Fisher information, the variance of the activations, or a random order. A measure predicts unimportant pairs
well if the barrier grows little on average over layers and k < N.
"""

import itertools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, cast

import jax
import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mcomb.combination import combine
from mcomb.evaluation.barriers import barrier
from mcomb.io.paths import AnyPath
from mcomb.lab.cli import Flag
from mcomb.lab.figures import COLOURS, LEVELS, LINES, STYLE, save, wrap
from mcomb.lab.flags import CombinationConfig
from mcomb.lab.runs.command import main
from mcomb.lab.runs.experiment import Experiment
from mcomb.lab.runs.measure import Run, Task
from mcomb.lab.runs.pairs import pool
from mcomb.lab.runs.results import METRICS, SPLITS, Number, Results, Scores, sides, spread
from mcomb.lab.runs.results import table as networks_table
from mcomb.lab.runs.verdicts import Verdict, same_distribution, works
from mcomb.lab.setups import SETUPS
from mcomb.lab.tables import columns, with_range
from mcomb.matching.activations import correlations, variances
from mcomb.merging.fisher import fisher_information
from mcomb.symmetry.intermediates import list_intermediates, unit_activations
from mcomb.symmetry.spec import Perms, PermutationSpec
from mcomb.trees import Params, named_leaves

COMPARED_EXAMPLES = 32  # examples for comparing activations
MEASURING_EXAMPLES = 1000  # examples for estimating variances and the Fisher information
VALUES = 100_000  # samples of a layer's activations or weights for comparing distributions
PAPER_LAYERS = {("tiny10-cifar10", 32): ("conv1", "conv6", "conv7", "conv8")}  # layers that tolerate k = N


Importance = dict[str, np.ndarray]
"""The importance of each pair of units, for each permutation."""


def by_correlation(run: Run, a: Params, b: Params) -> Importance:
    """Return the correlation of each pair's activations on the train examples."""
    return correlations(run.store.spec, a, b, run.store.apply, run.splits["train"].inputs)


def by_norm(run: Run, a: Params, b: Params) -> Importance:
    """Return the norm of all incoming and outgoing weights of each pair."""
    squares = [run.store.spec.sum_weights(jax.tree.map(np.square, params)) for params in (a, b)]
    return jax.tree.map(lambda *both: np.sqrt(sum(both)), *squares)


def by_fisher(run: Run, a: Params, b: Params) -> Importance:
    """Return the diagonal Fisher information of both networks, summed over the weights of each pair."""
    some, apply = run.splits["train"].subset(MEASURING_EXAMPLES), run.store.apply
    informations = (fisher_information(apply, params, *some) for params in (a, b))
    return jax.tree.map(lambda *both: sum(both), *map(run.store.spec.sum_weights, informations))


def by_variance(run: Run, a: Params, b: Params) -> Importance:
    """Return the variance of activations on train examples, summed over the two units of each pair."""
    inputs = run.splits["train"].subset(MEASURING_EXAMPLES).inputs
    return jax.tree.map(
        lambda *both: sum(both), *(variances(run.store.spec, params, run.store.apply, inputs) for params in (a, b))
    )


def by_chance(run: Run, a: Params, b: Params) -> Importance:
    """Return random scores that depend only on the seed and the permutation's name."""
    return {
        perm: np.random.default_rng([run.config.seed, zlib.crc32(perm.encode())]).random(run.store.spec.shape(perm))
        for perm in run.store.spec.sizes
    }


MEASURES: dict[str, Callable[[Run, Params, Params], Importance]] = {
    "correlation": by_correlation,
    "norm": by_norm,
    "fisher": by_fisher,
    "variance": by_variance,
    "random": by_chance,
}
MEASURE_COLOURS = dict(zip(MEASURES, (COLOURS["aligned"], "#D55E00", "#009E73", "#CC79A7", "0.45"), strict=True))


@dataclass(frozen=True)
class RobustnessConfig(CombinationConfig):
    """Flags of `robustness`."""

    by: Annotated[tuple[str, ...], Flag("measures of a pair's importance", choices=MEASURES.keys())] = ("correlation",)
    counts: Annotated[int, Flag("values of k for each layer, from 2 to all its units", at_least=2)] = 8
    line_points: Annotated[int, Flag("points on each line, including end points", at_least=3)] = 5


@dataclass(frozen=True)
class Comparison:
    """Two samples: the ratio of their norms, the distance of their distributions, and whether these agree."""

    magnitude: Number
    distance: Number
    alike: bool | Number  # with --pairs, the fraction of pairs


@dataclass(frozen=True)
class PerturbedLayer:
    """The units of one permutation.

    Attributes:
        units: The number of units.
        k: The numbers of re-matched pairs.
        correlation: The correlations of all pairs, in ascending order.
        barriers: The barriers over k by the first measure.
        by: The barriers over k by each measure.
        activations: Activations before and after a derangement of all units.
        weights: The weights of A and of the deranged B.
    """

    units: int
    k: list[int]
    correlation: list[Number]
    barriers: Scores
    by: dict[str, Scores]
    activations: Comparison
    weights: Comparison


@dataclass(frozen=True, kw_only=True)
class RobustnessResults(Results):
    """Results of `robustness`: each layer, the barriers as matched, and their mean increase by each measure."""

    layers: dict[str, PerturbedLayer]
    unperturbed: Scores
    extra: dict[str, Scores]


def derangement(rng: np.random.Generator, n: int) -> np.ndarray:
    """Sample a uniform random permutation of n ≥ 2 elements without fixed points."""
    while True:  # one in e permutations is a derangement
        order = rng.permutation(n)
        if (order != np.arange(n)).all():
            return order


def rematch(scores: np.ndarray, k: int, rng: np.random.Generator) -> np.ndarray:
    """Return a permutation that deranges the k units with the lowest scores and fixes the others.

    A batched permutation has one row of scores for each batch, such as each attention head; k counts in each row.
    """
    if scores.ndim > 1:
        return np.stack([rematch(row, k, rng) for row in scores])
    lowest = np.argsort(scores, kind="stable")[:k]
    order = np.arange(len(scores))
    order[lowest] = lowest[derangement(rng, k)]
    return order


def counts(units: int, how_many: int) -> list[int]:
    """Return the values of k for a layer, from 2 to its number of units."""
    return [int(k) for k in np.unique(np.linspace(2, units, how_many).round())]


def measures(config: RobustnessConfig) -> list[str]:
    """Return the requested measures without duplicates, the paper's first."""
    return [name for name in MEASURES if name in config.by]


def combinations(config: RobustnessConfig) -> int:
    """Count the evaluated networks: the points of each line for each layer and measure, and of the line as matched."""
    units = SETUPS[config.setup].spec(config.width, frozen=config.frozen).sizes.values()
    return config.line_points * (1 + len(measures(config)) * sum(len(counts(n, config.counts)) for n in units))


def lines(spec: PermutationSpec) -> tuple[Any, Any]:
    """Return the draw of the line from A to a further permuted B, and the function that returns its ends."""

    def ends(parameter: tuple[Any, Any], a: Params, b: Params) -> tuple[Params, Params]:
        return a, spec.apply(parameter[1], b)

    def draw(key: Any, parameter: tuple[Any, Any], a: Params, b: Params) -> Params:
        return combine(*ends(parameter, a, b), parameter[0])

    return draw, ends


def layer_activations(run: Run, params: Params) -> dict[str, np.ndarray]:
    """Concatenate the activations of each permutation's units on a few train examples."""
    spec, apply, inputs = run.store.spec, run.store.apply, run.store.data.train.subset(COMPARED_EXAMPLES).inputs
    intermediates = list_intermediates(spec, apply, params, inputs)
    arrays = unit_activations(spec, intermediates)
    tapped = intermediates.tap({array.id for found in arrays.values() for array in found})
    found = jax.jit(tapped)(params, inputs)[1]
    return {perm: np.concatenate([np.ravel(found[array.id]) for array in arrays[perm]]) for perm in arrays}


def layer_weights(spec: PermutationSpec, params: Params, perm: str) -> np.ndarray:
    """Concatenate the weights that a permutation reorders."""
    leaves = named_leaves(params)
    return np.concatenate([np.ravel(leaves[leaf]) for leaf in dict.fromkeys(name for name, _ in spec.axes_of(perm))])


def compare(x: np.ndarray, y: np.ndarray) -> Comparison:
    """Compare two samples: the ratio of their norms, the distance of their distributions, and whether they agree."""
    rng = np.random.default_rng(0)
    some_x, some_y = (rng.choice(values, min(len(values), VALUES), replace=False) for values in (x, y))
    alike, distance = same_distribution(some_x, some_y)
    return Comparison(float(np.linalg.norm(y) / np.linalg.norm(x)), distance, alike)


def measure(run: Run) -> RobustnessResults:
    """Measure the barriers over k for each permutation, and the effect of a derangement of all its units."""
    config, spec = run.config, run.store.spec
    a, aligned = run.networks["A"].params, run.align()
    by = measures(config)
    scores = {name: MEASURES[name](run, a, aligned) for name in by}
    correlation = scores["correlation"] if "correlation" in by else by_correlation(run, a, aligned)

    shares = np.linspace(0, 1, config.line_points, dtype=np.float32)
    ks = {perm: counts(spec.sizes[perm], config.counts) for perm in spec.sizes}
    cases: dict[tuple[str, str, int], Perms] = {("", "as matched", 0): spec.identity()}
    for name, perm in itertools.product(by, spec.sizes):
        for k in ks[perm]:
            rng = np.random.default_rng([config.seed, zlib.crc32(perm.encode()), k])
            cases[name, perm, k] = spec.identity() | {perm: rematch(scores[name][perm], k, rng)}
    stacked = jax.tree.map(lambda *orders: np.repeat(np.stack(orders), len(shares), axis=0), *cases.values())
    draw, ends = lines(spec)
    task = Task(draw, (a, aligned), (np.tile(shares, len(cases)), stacked), ends=ends)
    measured = run.evaluate({"lines": task})["lines"]
    levels = [run.basics["models"][letter] for letter in "AB"]

    def line_barrier(case: int, split: str, metric: str) -> float:
        part = slice(case * len(shares), (case + 1) * len(shares))
        return barrier(metric, getattr(measured[split], metric)[part], *(at[split][metric] for at in levels))

    found = {
        case: {split: {m: line_barrier(i, split, m) for m in METRICS} for split in SPLITS}
        for i, case in enumerate(cases)
    }
    as_matched = found["", "as matched", 0]
    before = layer_activations(run, aligned)
    layers: dict[str, PerturbedLayer] = {}
    for perm in spec.sizes:
        deranged = spec.apply(cases[by[0], perm, ks[perm][-1]], aligned)
        curves = {
            name: {split: {m: [found[name, perm, k][split][m] for k in ks[perm]] for m in METRICS} for split in SPLITS}
            for name in by
        }
        layers[perm] = PerturbedLayer(
            units=spec.sizes[perm],
            k=ks[perm],
            correlation=np.sort(correlation[perm], axis=None).tolist(),
            barriers=curves[by[0]],
            by=curves,
            activations=compare(before[perm], layer_activations(run, deranged)[perm]),
            weights=compare(layer_weights(spec, a, perm), layer_weights(spec, deranged, perm)),
        )

    def mean_extra(name: str, split: str, metric: str) -> float:
        # Without k = N, which is the same for every measure.
        curves = [layer.by[name][split][metric][:-1] for layer in layers.values() if len(layer.k) > 1]
        return float(np.mean([np.mean(curve) for curve in curves])) - as_matched[split][metric]

    extra = {name: {split: {m: mean_extra(name, split, m) for m in METRICS} for split in SPLITS} for name in by}
    return RobustnessResults(**run.basics, layers=layers, unperturbed=as_matched, extra=extra)


def table(results: RobustnessResults) -> str:
    """Format the networks and, for several measures, the mean increase of the barriers."""
    if len(results.extra) == 1:
        return networks_table(results)
    rows = [("barrier increase by", *(f"{split} {metric}" for metric in METRICS for split in SPLITS))]
    for name in results.extra:
        of_name = [side.extra[name] for side in sides(results)]
        rows.append((name, *(with_range([at[s][m] for at in of_name]) for m in METRICS for s in SPLITS)))
    return f"{networks_table(results)}\n{columns(rows)}"


def rank(results: RobustnessResults) -> str:
    """Name the measure that predicts unimportant pairs best, if there are several."""
    extra = {name: at["test"] for name, at in results.extra.items()}
    if len(extra) == 1:
        return ""
    best, *_ = ranked = sorted(extra, key=lambda name: extra[name]["loss"])
    each = (f"{name} {extra[name]['loss']:.3f} / {extra[name]['accuracy']:.1%}" for name in ranked)
    return (
        f"The measure {best} predicts unimportant pairs best. The mean increase of the test loss / accuracy barrier "
        f"over layers and k < N is: {', '.join(each)}."
    )


def judge(results: RobustnessResults) -> Verdict:
    """Require that half of each layer can be re-matched, and some layers completely.

    There is no verdict unless pairs are ordered by correlation, as in the paper.
    """
    layers, as_matched = results.layers, results.unperturbed["test"]

    def extra(layer: PerturbedLayer, k: float) -> dict[str, float]:
        """Return the increase of the barrier when k of a layer's pairs are re-matched."""
        at = layer.barriers["test"]
        return {m: max(0.0, float(np.interp(k, layer.k, at[m])) - as_matched[m]) for m in METRICS}

    half = {name: extra(layer, layer.units / 2) for name, layer in layers.items()}
    survive = [name for name, layer in layers.items() if works(results, extra(layer, layer.units))]
    expected = PAPER_LAYERS.get((results.config["setup"], results.config["width"]), survive[:1] or ["any layer"])
    kept = all(layer.activations.alike and abs(layer.activations.magnitude - 1) < 0.01
               for layer in layers.values())  # fmt: skip
    alike = all(layer.weights.alike for layer in layers.values())
    worst = max(half, key=lambda name: half[name]["accuracy"])
    by = next(iter(results.extra))
    before, which = ("", "") if by == "correlation" else ("The paper orders pairs by correlation. ", f", by {by},")
    agrees = (
        works(results, as_matched)
        and all(works(results, cost) for cost in half.values())
        and set(expected) <= set(survive)
        and kept
        and alike
    )
    return Verdict(
        bool(agrees) if by == "correlation" else None,
        f"{before}The test accuracy barrier of the line as matched is {as_matched['accuracy']:.1%} (loss barrier "
        f"{as_matched['loss']:.3f}). Re-matching the lower half of a layer's pairs{which} adds at most "
        f"{half[worst]['accuracy']:.1%} ({worst}). {len(survive)} of {len(layers)} layers "
        f"({', '.join(survive) or 'none'}) tolerate re-matching all pairs. A derangement "
        f"{'preserves' if kept else 'does not preserve'} the magnitude and distribution of activations. B's weights "
        f"are {'' if alike else 'not '}distributed like A's in every layer. "
        f"{rank(results)}".rstrip(),
    )


def draw(results: RobustnessResults, folder: AnyPath) -> None:
    """Draw loss and accuracy barriers against the number of re-matched pairs, for each layer.

    One measure is drawn for both splits. Several are drawn for the test set only, with their means in a last panel.
    """
    layers, by = results.layers, list(results.extra)
    count, splits = len(layers) + (len(by) > 1), SPLITS if len(by) == 1 else ("test",)
    columns = min(4, count)
    rows = -(-count // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(1.75 * columns + 0.6, 3.0 * rows + 1.0), layout="constrained")
        parts = cast(Any, figure.subfigures(2, 1))
        for part, metric in zip(parts, METRICS, strict=True):
            panels = part.subplots(rows, columns, squeeze=False).ravel()
            for i, (axes, (layer_name, layer)) in enumerate(zip(panels, layers.items(), strict=False)):
                axes.sharey(panels[0])  # before drawing, so that the limits include all panels
                for name, split in itertools.product(by, splits):
                    values, low, high = (
                        side.layers[layer_name].by[name][split][metric] for side in (results, *spread(results))
                    )
                    style: Any = {"color": MEASURE_COLOURS[name], "marker": ".", "label": split}
                    if len(by) > 1:
                        style |= {"label": name, "linewidth": 1, "markersize": 4}
                    axes.fill_between(layer.k, low, high, color=style["color"], alpha=0.15 / len(by), linewidth=0)
                    axes.plot(layer.k, values, LINES[split], **style)
                level = results.unperturbed["test"][metric]
                axes.axhline(level, color="0.35", linewidth=0.8, linestyle=LEVELS[0], label="as matched, test")
                title = f"{layer_name} (N = {layer.units})"
                axes.set_title(title if len(title) < 24 else title.replace(" ", "\n", 1))
                axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))  # few heads
                if i % columns:
                    axes.tick_params(labelleft=False)
            for axes in panels[len(layers) :]:
                axes.axis("off")
            if len(by) > 1:
                _draw_means(panels[len(layers)], results, metric)
            part.supylabel(f"{metric} barrier" if len(by) == 1 else f"test {metric} barrier", fontsize=8)
        of_lowest = f"with the lowest {by[0]}" if len(by) == 1 else "with the lowest scores"
        parts[1].supxlabel(f"k: re-matched pairs {of_lowest}", fontsize=8)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        figure.suptitle(wrap(results.title, 25 * columns), fontsize=9)
        save(figure, folder, results.experiment)


def _draw_means(axes: Any, results: RobustnessResults, metric: str) -> None:
    """Draw the mean increase of a barrier for each measure, with the range over pairs."""
    axes.axis("on")
    names = list(results.extra)
    for at, name in enumerate(reversed(names)):
        colour = MEASURE_COLOURS[name]
        for split, face in (("train", "white"), ("test", colour)):
            value, low, high = (side.extra[name][split][metric] for side in (results, *spread(results)))
            axes.hlines(at, low, high, color=colour, linewidth=0.8)
            axes.plot(value, at, "o", color=colour, markerfacecolor=face, markersize=4, markeredgewidth=0.9)
    axes.axvline(0, color="0.35", linewidth=0.8, linestyle=LEVELS[0])
    axes.set_yticks(range(len(names)), names[::-1])
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.yaxis.tick_right()
    axes.spines["left"].set_visible(False)
    axes.set_title("mean increase, k < N\n(● test, ○ train)")


EXPERIMENT = Experiment(
    name="robustness",
    title="re-matching the least important pairs of a layer",
    claim="A large part of each layer can be re-matched at random, and some layers completely. A derangement preserves "
    "the distribution of a layer's activations, and B's weights are distributed like A's.",
    alt="For each layer, loss and accuracy barriers against the number of re-matched pairs.",
    in_paper={"tiny10-cifar10": (32,)},
    config=RobustnessConfig,
    combinations=combinations,
    results=RobustnessResults,
    measure=measure,
    draw=draw,
    judge=judge,
    judge_together=lambda pairs: rank(pool(pairs)),
    table=table,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
