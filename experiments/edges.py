"""Measure the edge lengths |Θ_A − Θ_B| of the box between A and B.

    python -m experiments.edges --setup mlp-digits
    python -m experiments.edges --setup tiny10-cifar10 --width 16     # the paper's network, on an accelerator

In the paper, many lengths are near zero, because many weights are small, and many are far from zero.
"""

import itertools
from dataclasses import dataclass
from typing import Any, cast

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from mcomb.io.paths import AnyPath
from mcomb.lab.figures import COLOURS, STYLE, save
from mcomb.lab.runs.command import main
from mcomb.lab.runs.experiment import Experiment
from mcomb.lab.runs.measure import Run
from mcomb.lab.runs.results import Number, Results, pairs_of, spread
from mcomb.lab.runs.verdicts import Verdict
from mcomb.trees import Params, named_leaves

BINS = 80
# Thresholds in units of the weights' root mean square.
NEAR_ZERO = 0.1  # shorter edges are near zero
LOW = 0.5  # smaller weights are low
LONG = 1.0  # longer edges are long


@dataclass(frozen=True, kw_only=True)
class EdgesResults(Results):
    """Results of `edges` for the naive and the aligned pair.

    Attributes:
        bins: The edges of the histograms' bins.
        overall: The histogram of all lengths.
        layers: The histogram of each layer.
        weight_scale: The root mean square of A's weights.
        mean: The mean length.
        near_zero: The fraction of edges near zero.
        long: The fraction of long edges.
        low: The fraction of edges between two low weights.
        low_of_near_zero: The same among edges near zero.
    """

    bins: list[Number]
    overall: dict[str, list[Number]]
    layers: dict[str, dict[str, list[Number]]]
    weight_scale: Number
    mean: dict[str, Number]
    near_zero: dict[str, Number]
    long: dict[str, Number]
    low: dict[str, Number]
    low_of_near_zero: dict[str, Number]


def flat(params: Params) -> np.ndarray:
    """Concatenate all weights of a network."""
    return np.concatenate([np.ravel(leaf) for leaf in named_leaves(params).values()])


def measure(run: Run) -> EdgesResults:
    """Compute histograms of the edge lengths, overall and by layer, and fractions of short and long edges."""
    a = run.networks["A"].params
    pairs = {"naive": run.networks["B"].params, "aligned": run.align()}
    layer_of = run.store.setup.model.layer_of
    layer = np.concatenate([np.full(np.size(leaf), layer_of(name)) for name, leaf in named_leaves(a).items()])
    weights = {name: flat(params) for name, params in pairs.items()}
    lengths = {name: np.abs(flat(a) - values) for name, values in weights.items()}
    bins = np.linspace(0, max(values.max() for values in lengths.values()), BINS + 1)
    scale = float(np.sqrt(np.mean(flat(a) ** 2)))
    near = {name: values < NEAR_ZERO * scale for name, values in lengths.items()}
    low = {name: np.maximum(np.abs(flat(a)), np.abs(values)) < LOW * scale for name, values in weights.items()}

    def histogram(values: np.ndarray) -> list[Number]:
        counts: list[Number] = np.histogram(values, bins)[0].tolist()
        return counts

    return EdgesResults(
        **run.basics,
        bins=bins.tolist(),
        overall={name: histogram(values) for name, values in lengths.items()},
        layers={
            name: {str(number): histogram(values[layer == number]) for number in np.unique(layer)}
            for name, values in lengths.items()
        },
        weight_scale=scale,
        mean={name: float(values.mean()) for name, values in lengths.items()},
        near_zero={name: float(values.mean()) for name, values in near.items()},
        long={name: float((values > LONG * scale).mean()) for name, values in lengths.items()},
        low={name: float(values.mean()) for name, values in low.items()},
        low_of_near_zero={name: float(low[name][near[name]].mean()) for name in low},
    )


def judge(results: EdgesResults) -> Verdict:
    """Require many aligned edges near zero, most of them between low weights, and many long edges."""
    near, long, mean = results.near_zero, results.long, results.mean
    between_low, low = results.low_of_near_zero["aligned"], results.low["aligned"]
    shorter = mean["aligned"] < mean["naive"] and near["aligned"] > near["naive"]
    return Verdict(
        bool(shorter and near["aligned"] > 0.05 and long["aligned"] > 0.05 and between_low > 0.5),
        f"{near['aligned']:.1%} of the aligned edges are shorter than a tenth of the weights' root mean square "
        f"({near['naive']:.1%} naive), and {long['aligned']:.1%} are longer than the root mean square "
        f"({long['naive']:.1%} naive). The mean length is {mean['aligned']:.4f} aligned and {mean['naive']:.4f} naive. "
        f"Both weights are below half the root mean square for {between_low:.0%} of the shortest edges, and for "
        f"{low:.0%} of all edges.",
    )


DIFFERENCE = r"difference between paired weights, $|\Theta_A - \Theta_B|$"


def draw(results: EdgesResults, folder: AnyPath) -> None:
    """Draw the histograms of edge lengths of each pair, naive and aligned, overall and for each layer."""
    pairs = pairs_of(results)
    layers = list(results.layers["naive"])
    columns = 4
    rows = -(-len(layers) // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 2.2 + 1.2 * rows), layout="constrained")
        top, bottom = cast(Any, figure.subfigures(2, 1, height_ratios=[2.2, 1.2 * rows + 0.3]))
        whole = top.subplots()
        small = bottom.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
        for (i, pair), name in itertools.product(enumerate(pairs), results.overall):
            style: Any = {"color": COLOURS[name], "linewidth": 1 if len(pairs) == 1 else 0.6}
            whole.stairs(pair.overall[name], pair.bins, label=None if i else name, **style)
            for axes, layer in zip(small, layers, strict=False):
                axes.stairs(pair.layers[name][layer], pair.bins, **style)
        for axes, title in zip((whole, *small), ("all layers", *(f"layer {layer}" for layer in layers)), strict=False):
            axes.set_yscale("log")
            axes.set_title(title)
        _, largest = spread(results)
        tops = [max(max(values) for values in by_layer.values()) for by_layer in largest.layers.values()]
        whole.set_ylim(bottom=0.8)
        small[0].set_ylim(0.8, 2 * max(tops))
        for axes in small[len(layers) :]:
            axes.axis("off")
        whole.set_ylabel("number of weights")
        whole.set_xlabel(DIFFERENCE)
        whole.legend(frameon=False)
        bottom.supxlabel(DIFFERENCE, fontsize=8)
        figure.suptitle(results.title, fontsize=9)
        save(figure, folder, results.experiment)


EXPERIMENT = Experiment(
    name="edges",
    title="edge lengths of the box between A and B",
    claim="Edge lengths vary widely: many are near zero, because many weights are small, and many are far from zero.",
    alt="Histograms of the absolute differences of paired weights on a log scale, overall and by layer.",
    in_paper={"tiny10-cifar10": (16,)},
    results=EdgesResults,
    measure=measure,
    draw=draw,
    judge=judge,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
