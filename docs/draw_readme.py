"""Draw the README's picture from the results of one experiment.

python -m experiments.uniform --setup mlp-cifar10 --pretrained --train-images 2000
python -m docs.draw_readme runs/mlp-cifar10/width-32/uniform,train-images=2000,pretrained/results.json
"""

import json
import sys
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from docs.pictures import write_picture
from mcomb.evaluation.plotting import COLOURS, STYLE

LABELS = {"aligned": "mixtures after alignment", "naive": "mixtures without alignment"}


def draw(results: Path, picture: Path) -> None:
    """Draw test accuracy against s: the networks themselves, aligned mixtures and naive mixtures."""
    found = json.loads(results.read_text())
    points = np.array(found["parameter"]["values"])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 2.8), layout="constrained")
        axes = figure.subplots()
        own = np.mean([found["models"][letter]["test"]["accuracy"] for letter in "AB"])
        axes.axhline(own, color="0.35", linestyle="--", linewidth=1, label="the two networks themselves")
        for variant, label in LABELS.items():
            samples = np.array(found["curves"][variant]["test"]["accuracy"])
            colour = COLOURS[variant]
            axes.fill_between(points, samples.min(1), samples.max(1), color=colour, alpha=0.2, linewidth=0)
            axes.plot(points, samples.mean(1), color=colour, label=label)
        axes.set_xlabel("s: each weight's share of B is drawn from [½ − s, ½ + s]")
        axes.set_ylabel("test accuracy on CIFAR-10")
        axes.set_ylim(0, None)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.legend(loc="center right", bbox_to_anchor=(1.0, 0.66), frameon=False)
        write_picture(figure, picture)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(__file__).parent / "cifar10-uniform.png")
