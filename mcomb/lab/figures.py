"""Draw the figures of the experiments in one style."""

import textwrap
from typing import Any

import numpy as np

from mcomb.evaluation.plotting import COLOURS, LEVELS, STYLE
from mcomb.io.paths import AnyPath, atomic
from mcomb.lab.runs.results import METRICS, SPLITS, SweepResults, spread

LINES: Any = {"train": "--", "test": "-"}  # line styles of splits that share a panel


def save(figure: Any, folder: AnyPath, name: str) -> None:
    """Write a figure as PNG and PDF, atomically and with the same bytes every time."""
    for suffix, metadata in (("png", {"Software": None}), ("pdf", {"CreationDate": None})):
        with atomic(folder / f"{name}.{suffix}") as temporary:
            figure.savefig(temporary, metadata=metadata)
        figure.set_layout_engine("none")  # compute the layout once for both files


def draw_sweep(results: SweepResults, folder: AnyPath) -> None:
    """Draw loss and accuracy over a sweep: mean, range and points of each curve, and the levels of A and B.

    Results of a single pair also show each sample as a point. With --temperatures, a thin line shows the test loss at
    each network's best temperature.
    """
    import matplotlib  # imported here because it takes half a second
    from matplotlib.figure import Figure

    values = np.array(results.parameter.values)
    least, largest = spread(results)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 4.5), layout="constrained")
        panels = figure.subplots(2, 2, sharex=True, sharey="row")
        for row, metric in enumerate(METRICS):
            for column, split in enumerate(SPLITS):
                axes = panels[row, column]
                for letter, dashes in zip(results.ends, LEVELS, strict=True):
                    level = results.models[letter][split][metric]
                    axes.axhline(level, color="0.35", linewidth=0.8, linestyle=dashes, label=f"network {letter}")
                for variant, curve in results.curves.items():
                    samples = np.array(curve[split][metric])
                    colour = COLOURS[variant]
                    low, high = (np.array(side.curves[variant][split][metric]) for side in (least, largest))
                    axes.fill_between(values, low.min(1), high.max(1), color=colour, alpha=0.2, linewidth=0)
                    axes.plot(values, samples.mean(1), color=colour, label=variant)
                    if least is results:
                        x = np.repeat(values, samples.shape[1])
                        axes.plot(x, samples.ravel(), ".", color=colour, markersize=2, markeredgewidth=0)
                    if results.at_best_temperature and (split, metric) == ("test", "loss"):
                        at_best = np.array(results.at_best_temperature.curves[variant][split][metric]).mean(1)
                        label = f"{variant}, best temperature"
                        axes.plot(values, at_best, color=colour, linewidth=0.5, label=label)
                if row == 0:
                    axes.set_title(split)
                else:
                    axes.set_xlabel(wrap(results.parameter.label, 40))
                if column == 0:
                    axes.set_ylabel(metric)
        handles, labels = panels[0, 1].get_legend_handles_labels()
        in_a_row = len(labels) if len(labels) <= 5 else 3
        figure.legend(handles, labels, loc="outside lower center", ncols=in_a_row, frameon=False)
        figure.suptitle(results.title, fontsize=9)
        save(figure, folder, results.experiment)


def wrap(text: str, width: int) -> str:
    """Break a text into lines of at most `width` characters."""
    return "\n".join(textwrap.wrap(text, width))
