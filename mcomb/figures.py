"""Figures in one common style: naive and aligned, train and test look the same everywhere."""

import itertools
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import matplotlib
import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mcomb.results import METRICS, SPLITS, atomic

# Okabe and Ito's colours, which people with any colour vision tell apart.
COLOURS = {"naive": "#D55E00", "aligned": "#0072B2", "through A": "#0072B2", "direct": "#009E73"}
LINES: Any = {"train": "--", "test": "-"}
LEVELS = ((0, (1, 1)), (0, (4, 1, 1, 1)))  # the dashes of a sweep's two ends
STYLE: Any = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "grid.linewidth": 0.3,
    "grid.alpha": 0.5,
    "lines.linewidth": 1.2,
    "pdf.fonttype": 42,
    "savefig.dpi": 250,
    "svg.hashsalt": "mcomb",
}


def save(figure: Figure, folder: Path, name: str) -> None:
    """Writes a figure as PNG and as PDF, each whole or not at all and the same bytes every time."""
    for suffix, metadata in (("png", {"Software": None}), ("pdf", {"CreationDate": None})):
        with atomic(folder / f"{name}.{suffix}") as temporary:
            figure.savefig(temporary, metadata=metadata)


def sweep(results: Mapping[str, Any], folder: Path) -> None:
    """Draws loss and accuracy over a sweep: mean, band and points of each curve, and the levels of A and B."""
    values = np.array(results["parameter"]["values"])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 4.3), layout="constrained")
        panels = figure.subplots(2, 2, sharex=True, sharey="row")
        for row, metric in enumerate(METRICS):
            for column, split in enumerate(SPLITS):
                axes = panels[row, column]
                for (model, score), dashes in zip(results["models"].items(), LEVELS, strict=True):
                    level = score[split][metric]
                    axes.axhline(level, color="0.35", linewidth=0.8, linestyle=dashes, label=f"network {model}")
                for variant, curve in results["curves"].items():
                    samples = np.array(curve[split][metric])
                    colour = COLOURS[variant]
                    axes.fill_between(values, samples.min(1), samples.max(1), color=colour, alpha=0.2, linewidth=0)
                    axes.plot(values, samples.mean(1), LINES[split], color=colour, label=variant)
                    x = np.repeat(values, samples.shape[1])
                    axes.plot(x, samples.ravel(), ".", color=colour, markersize=2, markeredgewidth=0)
                if row == 0:
                    axes.set_title(split)
                else:
                    axes.set_xlabel(_wrapped(results["parameter"]["label"], 40))
                if column == 0:
                    axes.set_ylabel(metric)
        handles, labels = panels[0, 1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
        figure.suptitle(results["title"], fontsize=9)
        save(figure, folder, results["experiment"])


def triangle(results: Mapping[str, Any], folder: Path) -> None:
    """Draws test accuracy over the shares of B and C as an equilateral triangle, A at the lower left."""
    shares = np.array(results["shares"])
    accuracy = np.array(results["points"]["test"]["accuracy"])
    x, y = _equilateral(shares)
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(3.6, 3.3), layout="constrained")
        axes = figure.subplots()
        shades = axes.tripcolor(x, y, accuracy, shading="gouraud", cmap="viridis")
        figure.colorbar(shades, ax=axes, label="test accuracy", shrink=0.8)
        box = {"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 1}
        corners = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
        axes.plot(*_equilateral(corners), color="black", linewidth=0.8)
        for corner, name, (dx, dy) in zip(corners, "ABC", ((-0.06, -0.06), (0.06, -0.06), (0.0, 0.06)), strict=False):
            cx, cy = _equilateral(corner[None])
            level = results["models"][name]["test"]["accuracy"]
            note = axes.annotate(f"{name}\n{level:.3f}", (cx[0] + dx, cy[0] + dy), ha="center", va="center")
            note.set_bbox(box)
        best = results["best_index"]
        axes.plot(x[best], y[best], "*", color="white", markeredgecolor="black", markersize=11, markeredgewidth=0.8)
        note = axes.annotate(f"Θ* {accuracy[best]:.3f}", (x[best], y[best]), (6, 6), textcoords="offset points")
        note.set_bbox(box)
        axes.set_aspect("equal")
        axes.margins(0.12)
        axes.axis("off")
        figure.suptitle(_wrapped(results["title"], 48), fontsize=8)
        save(figure, folder, results["experiment"])


def _equilateral(shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The plane coordinates of points with shares (λ_B, λ_C): A at the origin, B at (1, 0), C above their middle."""
    return shares[:, 0] + shares[:, 1] / 2, shares[:, 1] * np.sqrt(3) / 2


def _wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width))


# Light for right, dark for wrong labels.
MATCH_COLOURS = {
    "both": ("#D9D9D9", "#8C8C8C"),
    "A only": ("#8FD3BC", "#009E73"),
    "B only": ("#F5D490", "#E69F00"),
    "neither": ("#E3B5D0", "#A23F78"),
}


def stacks(results: Mapping[str, Any], folder: Path) -> None:
    """Draws, for each sweep, the part of the test images whose label is both's, A's, B's or neither's."""
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        panels = figure.subplots(2, 3, sharey=True).ravel()
        lowest = 1.0
        for axes, (name, sweep_results) in zip(panels, results["sweeps"].items(), strict=False):
            counts = np.array(sweep_results["counts"]).mean(axis=1)  # over samples: value × match × correctness
            parts = counts / counts[0].sum()
            layers = [parts[:, results["matches"].index(match), i] for match in MATCH_COLOURS for i in (0, 1)]
            colours = [colour for pair in MATCH_COLOURS.values() for colour in pair]
            labels = [f"{match}, {how}" for match in MATCH_COLOURS for how in ("correct", "wrong")]
            axes.stackplot(sweep_results["parameter"]["values"], layers, colors=colours, labels=labels, linewidth=0)
            lowest = min(lowest, layers[0].min())
            axes.margins(x=0)
            axes.set_title(name)
            axes.set_xlabel(sweep_results["parameter"]["name"])
        # Most images are "both, correct" everywhere: show where the rest lie.
        panels[0].set_ylim(max(0, np.floor(20 * lowest - 0.2) / 20), 1)
        for axes in (panels[0], panels[3]):
            axes.set_ylabel("test images (axis cut)")
        panels[-1].axis("off")
        handles, labels = panels[0].get_legend_handles_labels()
        panels[-1].legend(handles, labels, loc="center", frameon=False, title="predicted label is that of")
        rate = results["disagreement"]
        figure.suptitle(f"{results['title']} (A and B disagree on {rate:.1%})", fontsize=9)
        save(figure, folder, results["experiment"])


def edges(results: Mapping[str, Any], folder: Path) -> None:
    """Draws the histograms of edge lengths, naive beside aligned, overall and for each layer."""
    bins = np.array(results["bins"])
    layers = list(results["layers"]["naive"])
    columns = 4
    rows = -(-len(layers) // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 2.2 + 1.2 * rows), layout="constrained")
        top, bottom = cast(Any, figure.subfigures(2, 1, height_ratios=[2.2, 1.2 * rows + 0.3]))
        whole = top.subplots()
        small = bottom.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
        panels = [(whole, results["overall"], "all layers")]
        panels += [
            (axes, {name: by_layer[layer] for name, by_layer in results["layers"].items()}, f"layer {layer}")
            for axes, layer in zip(small, layers, strict=False)
        ]
        for axes, counts, title in panels:
            for name, values in counts.items():
                axes.stairs(values, bins, color=COLOURS[name], label=name, linewidth=1)
            axes.set_yscale("log")
            axes.set_title(title)
        tops = [max(max(values) for values in by_layer.values()) for by_layer in results["layers"].values()]
        whole.set_ylim(bottom=0.8)
        small[0].set_ylim(0.8, 2 * max(tops))
        for axes in small[len(layers) :]:
            axes.axis("off")
        whole.set_ylabel("weights")
        whole.set_xlabel(r"$|\Theta_A - \Theta_B|$")
        whole.legend(frameon=False)
        bottom.supxlabel(r"$|\Theta_A - \Theta_B|$", fontsize=8)
        figure.suptitle(results["title"], fontsize=9)
        save(figure, folder, results["experiment"])


def widths(results: Mapping[str, Any], folder: Path) -> None:
    """Draws the barriers of every sweep against width: aligned and naive, train and test."""
    colours = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#CC79A7")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.8, 4.6), layout="constrained")
        panels = figure.subplots(2, 2, sharex=True, sharey="row")
        for (row, metric), (column, variant) in itertools.product(enumerate(METRICS), enumerate(("aligned", "naive"))):
            axes = panels[row, column]
            for (name, by_width), colour, marker in zip(results["by_width"].items(), colours, "osv^D", strict=True):
                for split in SPLITS:
                    values = [at[variant][split][metric] for at in by_width]
                    label = name if split == "test" else None
                    style: Any = {"color": colour, "marker": marker, "markersize": 3.5, "label": label}
                    axes.plot(results["widths"], values, LINES[split], **style)
            axes.set_xscale("log", base=2)
            axes.set_xticks(results["widths"], [str(width) for width in results["widths"]])
            if row == 0:
                axes.set_title(variant)
            else:
                axes.set_xlabel("width multiplier")
            if column == 0:
                axes.set_ylabel(f"{metric} barrier")
        handles, labels = panels[0, 0].get_legend_handles_labels()
        handles += [Line2D([], [], color="0.4", linestyle=LINES[split]) for split in SPLITS]
        figure.legend(handles, [*labels, *SPLITS], loc="outside lower center", ncols=7, frameon=False)
        figure.suptitle(results["title"], fontsize=9)
        save(figure, folder, results["experiment"])


def robustness(results: Mapping[str, Any], folder: Path) -> None:
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
                    values = layer["barriers"][split][metric]
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
        figure.suptitle(_wrapped(results["title"], 70), fontsize=9)
        save(figure, folder, results["experiment"])


SWEEPS = (("linear", "o", "#0072B2", 0.14), ("uniform", "s", "#D55E00", -0.14))


def matchers(results: Mapping[str, Any], folder: Path) -> None:
    """Draws each matcher's barriers, on the line and of uniform shares, and the inner product it reaches."""
    matchings = results["matchings"]
    at = np.arange(len(matchings))[::-1]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.8, 2.7), layout="constrained")
        *barriers, products = figure.subplots(1, 3, sharey=True)
        for axes, metric in zip(barriers, METRICS, strict=True):
            axes.set_xscale("symlog", linthresh=0.01)  # there are barriers of nothing, and naive ones are far away
            axes.xaxis.set_major_formatter("{x:g}")
            axes.axvline(0, color="0.35", linewidth=0.8)
            for (sweep, marker, colour, offset), split in itertools.product(SWEEPS, SPLITS):
                values = [results["barriers"][f"{sweep}, {name}"][split][metric] for name in matchings]
                style: Any = {"color": colour, "markersize": 4.5, "markeredgewidth": 0.9}
                face = colour if split == "test" else "white"
                axes.plot(values, at + offset, marker, markerfacecolor=face, label=f"{sweep}, {split}", **style)
            axes.set_xlabel(f"{metric} barrier")
        products.plot([matching["objective"] for matching in matchings.values()], at, "D", color="black", markersize=4)
        products.set_xlabel("inner product of A and B")
        times = [f"\n{matching['seconds']:.1f} s" if matching["seconds"] else "" for matching in matchings.values()]
        barriers[0].set_yticks(at, [name + time for name, time in zip(matchings, times, strict=True)])
        barriers[0].set_ylim(-0.6, len(matchings) - 0.4)
        handles, labels = barriers[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        figure.suptitle(results["title"], fontsize=9)
        save(figure, folder, results["experiment"])


def schematic(results: Mapping[str, Any], folder: Path) -> None:
    """Draws the layers of each combination as grids of cells, coloured by share and shaded by weight."""
    blue, orange = (np.array(to_rgb(colour)) for colour in ("#0072B2", "#E69F00"))
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(6.4, 2.6), layout="constrained")
        panels = figure.subplots(3, len(results["panels"]))
        for column, (name, panel) in zip(panels.T, results["panels"].items(), strict=True):
            for axes, layer in zip(column[::-1], panel["shares"], strict=True):  # the first layer at the bottom
                share, weight = (np.array(panel[kind][layer])[..., None] for kind in ("shares", "weights"))
                hue = (1 - share) * blue + share * orange
                height, width, _ = hue.shape
                box = (-width / 2, width / 2, -height / 2, height / 2)  # cells of one size in all layers
                axes.imshow(hue * weight + (1 - weight), interpolation="nearest", extent=box)
                axes.set(xlim=(-4, 4), ylim=(-4, 4))
                axes.axis("off")
            column[0].set_title(name)
        figure.supylabel("layers", fontsize=8)
        save(figure, folder, results["experiment"])
