"""Draw the README's pictures from the results of experiments.

python -m experiments.uniform --setup mlp-cifar10 --pretrained --train-examples 2000
python -m docs.draw_readme mixtures runs/mlp-cifar10/width-32/uniform,train-examples=2000,pretrained

python -m experiments.linear --setup decoder-text --pretrained
python -m experiments.linear --setup decoder-text --pretrained --groups all
python -m experiments.linear --setup decoder-text --pretrained --groups all --matcher ste
RUNS=runs/decoder-text/width-8/linear
python -m docs.draw_readme line $RUNS,pretrained $RUNS,groups=all,pretrained $RUNS,matcher=ste,groups=all,pretrained
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from docs.pictures import write_picture
from mcomb.evaluation.plotting import COLOURS, STYLE

DOCS = Path(__file__).parent
LABELS = {"aligned": ("mixtures after alignment", -12), "naive": ("mixtures without alignment", 12)}  # and height
LINES = (  # of the average of two transformers, after one alignment each
    ("units permuted", "#CC79A7"),
    ("rotated, by weights", "#009E73"),
    ("rotated, learned", COLOURS["aligned"]),
)
BESIDE: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 8}


def draw_mixtures(found: dict[str, Any]) -> Figure:
    """Draw test accuracy against s: the networks themselves, aligned mixtures and naive mixtures."""
    points = np.array(found["parameter"]["values"])
    figure = Figure(figsize=(5.6, 2.8), layout="constrained")
    axes = figure.subplots()
    own = np.mean([found["models"][letter]["test"]["accuracy"] for letter in "AB"])
    axes.axhline(own, color="0.35", linestyle="--", linewidth=1)
    axes.annotate("the two networks themselves", (0, own), (0, 7), color="0.35", **BESIDE)
    for variant, (label, height) in LABELS.items():
        samples = np.array(found["curves"][variant]["test"]["accuracy"])
        colour = COLOURS[variant]
        axes.fill_between(points, samples.min(1), samples.max(1), color=colour, alpha=0.2, linewidth=0)
        axes.plot(points, samples.mean(1), color=colour)
        axes.annotate(label, (0, samples[0].mean()), (0, height), color=colour, weight="bold", **BESIDE)
    axes.set_xticks([0, 0.25, 0.5], ["½\n(average)", "from ¼ to ¾", "from 0 to 1"])
    axes.set_xlabel("range of the random share of B in each weight")
    axes.set_ylabel("test accuracy on CIFAR-10")
    axes.set_ylim(0, 0.7)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return figure


def draw_line(*runs: dict[str, Any]) -> Figure:
    """Draw the test loss on the line between two transformers, naive and after each alignment."""
    shares = np.array(runs[0]["parameter"]["values"])
    losses = [("as trained", COLOURS["naive"], runs[0]["curves"]["naive"])]
    losses += [(label, colour, run["curves"]["aligned"]) for (label, colour), run in zip(LINES, runs, strict=True)]
    figure = Figure(figsize=(5.6, 2.8), layout="constrained")
    axes = figure.subplots()
    for label, colour, curve in losses:
        axes.plot(shares, np.mean(curve["test"]["loss"], axis=1), color=colour, label=label)
    axes.set_xticks([0, 0.5, 1], ["A", "average of A and B", "B"])
    axes.set_ylabel("test loss per character")
    axes.set_ylim(0)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return figure


DRAWINGS: dict[str, tuple[Callable[..., Figure], str]] = {
    "mixtures": (draw_mixtures, "cifar10-uniform.png"),
    "line": (draw_line, "decoder-line.png"),
}


if __name__ == "__main__":
    _, name, *folders = sys.argv
    draw, picture = DRAWINGS[name]
    results = [json.loads((Path(folder) / "results.json").read_text()) for folder in folders]
    with matplotlib.rc_context(STYLE):
        write_picture(draw(*results), DOCS / picture)
