"""Measure the barriers of five sweeps against the width of the network.

    python -m experiments.width --setup mlp-digits
    python -m experiments.width --setup mlp-digits --widths 1 2 4

In the paper, all aligned barriers fall as the network widens, and width is a necessary condition. The experiment reuses
existing networks and sweeps, and runs the missing ones.
"""

import itertools
from dataclasses import dataclass
from typing import Annotated, Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mcomb.errors import UserError
from mcomb.io.paths import AnyPath
from mcomb.lab.cli import Flag
from mcomb.lab.figures import LINES, STYLE, save
from mcomb.lab.flags import CHECKPOINT_FLAGS, SweepConfig, convert_config
from mcomb.lab.runs.command import main
from mcomb.lab.runs.experiment import Experiment, Parts
from mcomb.lab.runs.measure import Run
from mcomb.lab.runs.results import METRICS, SPLITS, Results, Scores, spread
from mcomb.lab.runs.verdicts import Verdict, falls
from mcomb.lab.setups import WIDEST

from . import bernoulli, hyperplane, linear, subcube, uniform

WIDTH_SWEEPS = {
    module.EXPERIMENT.name: module.EXPERIMENT for module in (linear, uniform, subcube, hyperplane, bernoulli)
}


@dataclass(frozen=True)
class WidthConfig(SweepConfig):
    """Flags of the sweeps, and the widths to compare."""

    widths: Annotated[tuple[int, ...], Flag("widths to compare", 1, WIDEST)] = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, kw_only=True)
class WidthResults(Results):
    """Results of `width`: the widths, and the barriers of each sweep at each width."""

    widths: list[int]
    by_width: dict[str, list[dict[str, Scores]]]

    @property
    def measured_widths(self) -> list[int]:
        """The widths of the networks."""
        return self.widths


def sweeps(config: WidthConfig) -> Parts:
    """Return every sweep at every width, narrowest first."""
    if given := next(filter(None, (getattr(config, name) for name in CHECKPOINT_FLAGS)), None):
        raise UserError(f"width does not accept checkpoint {given}, which has one width: remove it.")
    return {
        f"{name}, width {width}": (sweep, convert_config(config, sweep.config, width=width))
        for width in sorted(set(config.widths))
        for name, sweep in WIDTH_SWEEPS.items()
    }


def measure(run: Run) -> WidthResults:
    """Collect the barriers of each sweep, one for each width."""
    widths = sorted(set(run.config.widths))
    lines = {width: run.parts[f"linear, width {width}"] for width in widths}
    return WidthResults(
        models={f"{x}, width {w}": line.models[x] for w, line in lines.items() for x in "AB"},
        guessing=lines[widths[0]].guessing,
        widths=widths,
        by_width={name: [run.parts[f"{name}, width {width}"].barriers for width in widths] for name in WIDTH_SWEEPS},
    )


def judge(results: WidthResults) -> Verdict:
    """Require that the aligned barriers of every sweep fall with the width in loss and accuracy."""
    narrow, wide = results.widths[0], results.widths[-1]
    if narrow == wide:
        return Verdict(None, f"No verdict: width {narrow} alone shows no trend. Give several --widths.")
    lost = {
        (name, m): [at["aligned"]["test"][m] for at in by_width]
        for name, by_width in results.by_width.items()
        for m in METRICS
    }
    worst = {m: [max(values[i] for (_, of), values in lost.items() if of == m) for i in (0, -1)] for m in METRICS}
    loss, accuracy = worst["loss"], worst["accuracy"]
    return Verdict(
        all(map(falls, lost.values())),
        f"The largest aligned barriers of the five sweeps are {loss[0]:.3f} in loss and {accuracy[0]:.1%} in accuracy "
        f"at width {narrow}, and {loss[1]:.3f} and {accuracy[1]:.1%} at width {wide}.",
    )


def draw(results: WidthResults, folder: AnyPath) -> None:
    """Draw the barriers of every sweep against width: aligned and naive, train and test."""
    colours = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#CC79A7")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.8, 4.6), layout="constrained")
        panels = figure.subplots(2, 2, sharex=True, sharey="row")
        for (row, metric), (column, variant) in itertools.product(enumerate(METRICS), enumerate(("aligned", "naive"))):
            axes = panels[row, column]
            for name, colour, marker in zip(results.by_width, colours, "osv^D", strict=False):
                for split in SPLITS:
                    values, low, high = (
                        [at[variant][split][metric] for at in part.by_width[name]]
                        for part in (results, *spread(results))
                    )
                    label = name if split == "test" else None
                    style: Any = {"color": colour, "marker": marker, "markersize": 3.5, "label": label}
                    axes.plot(results.widths, values, LINES[split], **style)
                    axes.fill_between(results.widths, low, high, color=colour, alpha=0.15, linewidth=0)
            axes.set_xscale("log", base=2)
            axes.set_xticks(results.widths, [str(width) for width in results.widths])
            if row == 0:
                axes.set_title(variant)
            else:
                axes.set_xlabel("width multiplier")
            if column == 0:
                axes.set_ylabel(f"{metric} barrier")
        handles, labels = panels[0, 0].get_legend_handles_labels()
        handles += [Line2D([], [], color="0.4", linestyle=LINES[split]) for split in SPLITS]
        figure.legend(handles, [*labels, *SPLITS], loc="outside lower center", ncols=7, frameon=False)
        figure.suptitle(results.title, fontsize=9)
        save(figure, folder, results.experiment)


EXPERIMENT = Experiment(
    name="width",
    title="barriers against width",
    claim="Barriers of aligned combinations fall as the network widens, and width is a necessary condition.",
    alt="Loss and accuracy barriers of five sweeps against the width multiplier, naive and aligned.",
    in_paper=dict.fromkeys(("resnet20-cifar10", "tiny10-cifar10"), (1, 2, 4, 8, 16, 32)),
    networks="",
    varies_width=True,
    parts=sweeps,
    config=WidthConfig,
    results=WidthResults,
    measure=measure,
    draw=draw,
    judge=judge,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
