"""Plot the loss and accuracy of sweeps against their parameter."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mcomb.errors import UserError
from mcomb.io.paths import AnyPath, as_path, atomic

if TYPE_CHECKING:
    from mcomb.evaluation.sweep import Sweep

# The palette of Okabe and Ito, which people with any colour vision can distinguish.
COLOURS = {"naive": "#D55E00", "aligned": "#0072B2", "through A": "#0072B2", "direct": "#009E73"}
LEVELS = ((0, (1, 1)), (0, (4, 1, 1, 1)))  # dashes of the networks' levels
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
FORMATS = (".png", ".pdf", ".svg")


def plot_sweeps(path: str | AnyPath, sweeps: Mapping[str, "Sweep"], title: str = "") -> None:
    """Plot named sweeps of the same networks into one file."""
    import matplotlib  # importing it takes half a second
    from matplotlib.figure import Figure

    target = as_path(path)
    if target.suffix not in FORMATS:
        raise UserError(f"Cannot draw {target}: use a name that ends in one of {', '.join(FORMATS)}.")
    first = next(iter(sweeps.values()))
    if first.points.ndim > 1:
        raise UserError(f"Cannot draw points of shape {first.points.shape}: a sweep has one parameter.")
    shown = [name for name in ("loss", "accuracy") if name in first.values]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(2.9 * len(shown), 2.6), layout="constrained")
        for axes, metric in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
            for i, end in enumerate(first.ends):
                name = f"network {chr(ord('A') + i)}"
                axes.axhline(end.values[metric], color="0.35", linewidth=0.8, linestyle=LEVELS[i % 2], label=name)
            for name, sweep in sweeps.items():
                draw_curve(axes, sweep.points, sweep.values[metric], name)
            axes.set_xlabel(first.parameter)
            axes.set_ylabel(metric)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        figure.suptitle(title, fontsize=9)
        with atomic(target) as temporary:
            figure.savefig(temporary, format=target.suffix[1:])


def draw_curve(axes: Any, points: np.ndarray, samples: np.ndarray, name: str) -> None:
    """Plot the mean and the range of samples of shape (points, samples), and each sample as a dot."""
    colour = COLOURS.get(name, COLOURS["aligned"])
    axes.fill_between(points, samples.min(1), samples.max(1), color=colour, alpha=0.2, linewidth=0)
    axes.plot(points, samples.mean(1), color=colour, label=name)
    axes.plot(np.repeat(points, samples.shape[1]), samples.ravel(), ".", color=colour, markersize=2, markeredgewidth=0)
