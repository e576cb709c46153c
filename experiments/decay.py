"""Measure the barriers of the line against weight decay, epochs and accuracy.

    python -m experiments.decay --setup mlp-digits --width 4    # five minutes on two CPU cores
    python -m experiments.decay --setup mlp-cifar10 --width 8 --train-examples 2000 --points 9 --pairs 2

The paper uses one weight decay and one number of epochs. This experiment compares several of both, because barriers are
comparable only between networks of similar accuracy.
"""

import itertools
from dataclasses import dataclass
from typing import Annotated, Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from mcomb.errors import UserError
from mcomb.io.paths import AnyPath
from mcomb.lab.cli import Flag
from mcomb.lab.figures import COLOURS, STYLE, save
from mcomb.lab.flags import LineConfig, convert_config, require_own_training
from mcomb.lab.runs.command import main
from mcomb.lab.runs.experiment import Experiment, Parts
from mcomb.lab.runs.measure import Run
from mcomb.lab.runs.pairs import pool
from mcomb.lab.runs.results import METRICS, VARIANTS, Number, Results, sides, spread
from mcomb.lab.runs.verdicts import Verdict
from mcomb.lab.tables import columns, with_range

from . import linear


@dataclass(frozen=True)
class DecayConfig(LineConfig):
    """Flags of `linear`, and the recipes to compare."""

    decays: Annotated[tuple[float, ...], Flag("weight decays to compare", at_least=0)] = (1e-4, 5e-4, 1e-3, 2e-3, 5e-3)
    lengths: Annotated[tuple[int, ...], Flag("numbers of epochs to compare", at_least=1)] = (5, 10, 20)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, instead in (("epochs", "lengths"), ("weight_decay", "decays")):
            if (value := getattr(self, name)) is not None:
                raise UserError(f"decay does not accept --{name.replace('_', '-')} {value:g}: use --{instead}.")
        require_own_training("decay", self)


@dataclass(frozen=True, kw_only=True)
class DecayResults(Results):
    """Results of `decay`, with one row for each weight decay and one column for each number of epochs.

    Attributes:
        decays: The weight decays.
        lengths: The numbers of epochs.
        level: The mean test accuracy of A and B.
        lost: The test barriers by variant and metric.
    """

    decays: list[Number]
    lengths: list[int]
    level: list[list[Number]]
    lost: dict[str, dict[str, list[list[Number]]]]


def lines(config: DecayConfig) -> Parts:
    """Return the experiment `linear` for every weight decay and number of epochs."""
    return {
        part_name(decay, length): (
            linear.EXPERIMENT,
            convert_config(config, linear.EXPERIMENT.config, weight_decay=decay, epochs=length),
        )
        for decay in sorted(set(config.decays))
        for length in sorted(set(config.lengths))
    }


def part_name(decay: float, length: int) -> str:
    """Return the name of a recipe."""
    return f"weight decay {decay:g}, {length} epochs"


def measure(run: Run) -> DecayResults:
    """Collect the mean test accuracy of A and B and the barriers for each recipe."""
    decays, lengths = (sorted(set(values)) for values in (run.config.decays, run.config.lengths))
    parts = [[run.parts[part_name(decay, length)] for length in lengths] for decay in decays]
    levels = [[[part.models[x]["test"]["accuracy"] for x in "AB"] for part in row] for row in parts]
    return DecayResults(
        models={f"{x}, {name}": part.models[x] for name, part in run.parts.items() for x in "AB"},
        guessing=parts[0][0].guessing,
        decays=decays,
        lengths=lengths,
        level=np.mean(levels, axis=-1).tolist(),
        lost={
            variant: {m: [[part.barriers[variant]["test"][m] for part in row] for row in parts] for m in METRICS}
            for variant in VARIANTS
        },
    )


def table(results: DecayResults) -> str:
    """Format one row for each recipe: the accuracy of its networks and the barriers."""
    head = ("weight decay", "epochs", "accuracy of A and B")
    rows = [(*head, *(f"{variant} {metric} barrier" for variant in VARIANTS for metric in METRICS))]
    for (i, decay), (j, length) in itertools.product(enumerate(results.decays), enumerate(results.lengths)):
        cells = [
            [part.level[i][j], *(part.lost[v][m][i][j] for v in VARIANTS for m in METRICS)] for part in sides(results)
        ]
        rows.append((f"{decay:g}", str(length), *(with_range(list(numbers)) for numbers in zip(*cells, strict=True))))
    return columns(rows, labels=2)


def judge(results: DecayResults) -> Verdict:
    """Name the recipes with the lowest and the highest barrier; the paper makes no claim."""
    naive, aligned = (np.array(results.lost[variant]["accuracy"]) for variant in VARIANTS)

    def said(at: int) -> str:
        i, j = divmod(at, len(results.lengths))
        recipe, level = part_name(results.decays[i], results.lengths[j]), results.level[i][j]
        lost = f"barrier {aligned[i, j]:.1%} aligned, {naive[i, j]:.1%} naive"
        return f"{recipe} (test accuracy {level:.1%}, {lost})"

    best, worst = int(aligned.argmin()), int(aligned.argmax())
    return Verdict(
        None,
        f"The paper does not vary the recipe. The accuracy barrier is lowest for {said(best)}, and highest for "
        f"{said(worst)}.",
    )


def draw(results: DecayResults, folder: AnyPath) -> None:
    """Draw the accuracy barrier over weight decay and epochs, naive and aligned, and over the networks' accuracy."""
    decays, lengths, level = map(np.array, (results.decays, results.lengths, results.level))
    least, largest = spread(results)
    top = max(np.max(largest.lost[variant]["accuracy"]) for variant in VARIANTS)
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(7.4, 3.2), layout="constrained")
        *maps, scatter = figure.subplots(1, 3)
        for axes, variant in zip(maps, VARIANTS, strict=True):
            lost = np.array(results.lost[variant]["accuracy"])
            shades = axes.imshow(lost, origin="lower", aspect="auto", cmap="viridis", vmin=0, vmax=top)
            axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
            axes.set_yticks(range(len(decays)), [f"{decay:g}" for decay in decays])
            for i, j in np.ndindex(lost.shape):
                colour = "white" if lost[i, j] < top / 2 else "black"
                axes.text(j, i, f"{lost[i, j]:.3f}", ha="center", va="center", color=colour, fontsize=6.5)
            axes.set_title(variant)
            axes.set_xlabel("epochs")
            low, high = (np.array(side.lost[variant]["accuracy"]).ravel() for side in (least, largest))
            colour = COLOURS[variant]
            scatter.vlines(level.ravel(), low, high, color=colour, linewidth=0.8)
            for i, decay in enumerate(decays):
                style: Any = {"color": colour, "alpha": 0.9, "markersize": 2 + 4 * i / max(1, len(decays) - 1)}
                label = f"{variant}, weight decay {decay:g}" if i in (0, len(decays) - 1) else None
                scatter.plot(level[i], lost[i], "o", label=label, markeredgewidth=0, **style)
        maps[0].set_ylabel("weight decay")
        figure.colorbar(shades, ax=maps, shrink=0.8, label="test accuracy barrier")
        scatter.set_xlabel("mean test accuracy of A and B")
        scatter.set_ylabel("test accuracy barrier")
        scatter.legend(frameon=False, fontsize=5.5)
        figure.suptitle(results.title, fontsize=9)
        save(figure, folder, results.experiment)


EXPERIMENT = Experiment(
    name="decay",
    title="barriers of the line against weight decay and epochs",
    claim="All networks are trained with one weight decay and one number of epochs.",
    alt="Accuracy barriers on a grid of weight decays and epochs, naive and aligned, and against accuracy.",
    networks="",
    parts=lines,
    config=DecayConfig,
    results=DecayResults,
    measure=measure,
    draw=draw,
    judge=judge,
    judge_together=lambda pairs: f"On average: {judge(pool(pairs)).finding}",
    table=table,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
