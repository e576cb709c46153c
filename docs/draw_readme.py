"""Draw the README's picture from the results of one experiment.

python -m experiments.uniform --setup mlp-cifar10 --pretrained --train-examples 2000
python -m docs.draw_readme runs/mlp-cifar10/width-32/uniform,train-examples=2000,pretrained/results.json
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from docs.pictures import write_picture
from mcomb.evaluation.plotting import COLOURS, STYLE

LABELS = {"aligned": ("mixtures after alignment", -12), "naive": ("mixtures without alignment", 12)}  # and height


def draw(results: Path, picture: Path) -> None:
    """Draw test accuracy against s: the networks themselves, aligned mixtures and naive mixtures."""
    found = json.loads(results.read_text())
    points = np.array(found["parameter"]["values"])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 2.8), layout="constrained")
        axes = figure.subplots()
        own = np.mean([found["models"][letter]["test"]["accuracy"] for letter in "AB"])
        axes.axhline(own, color="0.35", linestyle="--", linewidth=1)
        beside: Any = {"textcoords": "offset points", "va": "center", "fontsize": 8}
        axes.annotate("the two networks themselves", (0, own), (0, 7), color="0.35", **beside)
        for variant, (label, height) in LABELS.items():
            samples = np.array(found["curves"][variant]["test"]["accuracy"])
            colour = COLOURS[variant]
            axes.fill_between(points, samples.min(1), samples.max(1), color=colour, alpha=0.2, linewidth=0)
            axes.plot(points, samples.mean(1), color=colour)
            axes.annotate(label, (0, samples[0].mean()), (0, height), color=colour, weight="bold", **beside)
        axes.set_xticks([0, 0.25, 0.5], ["½\n(average)", "from ¼ to ¾", "from 0 to 1"])
        axes.set_xlabel("range of the random share of B in each weight")
        axes.set_ylabel("test accuracy on CIFAR-10")
        axes.set_ylim(0, 0.7)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        write_picture(figure, picture)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(__file__).parent / "cifar10-uniform.png")
