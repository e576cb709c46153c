"""Compare the labels that combinations predict with those of A and B.

    python -m experiments.functional --setup mlp-digits

In the paper, A and B differ on a substantial part of the test set, and labels change gradually from A to B. This
experiment reuses the results of bernoulli, subcube, hyperplane, uniform and linear, and runs the missing ones.
"""

from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from mcomb.evaluation.objectives import AGREES_WITH
from mcomb.io.paths import AnyPath
from mcomb.lab.figures import STYLE, save
from mcomb.lab.flags import SweepConfig, convert_config
from mcomb.lab.runs.command import main
from mcomb.lab.runs.experiment import Experiment, Parts
from mcomb.lab.runs.measure import Run
from mcomb.lab.runs.results import Number, Parameter, Results
from mcomb.lab.runs.verdicts import Verdict, rate_is_above
from mcomb.lab.setups import SETUPS

from . import bernoulli, hyperplane, linear, subcube, uniform

FUNCTIONAL_SWEEPS = {
    module.EXPERIMENT.name: module.EXPERIMENT for module in (bernoulli, subcube, hyperplane, uniform, linear)
}
FROM_A_TO_B = ("bernoulli", "subcube", "hyperplane", "linear")  # not uniform, which starts at the midpoint
SUBSTANTIAL = 0.01  # of the test labels
LARGEST_STEP = 0.35  # of the whole change from A to B; a larger step between neighbouring values is a jump


@dataclass(frozen=True)
class Counts:
    """The labels of a sweep by value, sample, AGREES_WITH and correctness."""

    parameter: Parameter
    counts: list[Any]


@dataclass(frozen=True, kw_only=True)
class FunctionalResults(Results):
    """Results of `functional`.

    Attributes:
        matches: The names of the rows of each sample's counts.
        sweeps: The counts of each sweep.
        differing: The number of test labels that A and B predict differently.
        labels: The number of test labels.
    """

    matches: list[str]
    sweeps: dict[str, Counts]
    differing: Number
    labels: Number


def sweeps(config: SweepConfig) -> Parts:
    """Return the five sweeps."""
    return {name: (sweep, convert_config(config, sweep.config)) for name, sweep in FUNCTIONAL_SWEEPS.items()}


def measure(run: Run) -> FunctionalResults:
    """Collect the eight counts of each sample, and the number of test labels that A and B predict differently."""
    counts = {name: part.curves["aligned"]["test"]["agreement"] for name, part in run.parts.items()}
    at_a = np.array(counts["linear"])[0, 0]  # λ = 0 is A, so "A only" counts the labels that B predicts differently
    return FunctionalResults(
        **run.basics,
        matches=list(AGREES_WITH),
        sweeps={n: Counts(part.parameter, counts[n]) for n, part in run.parts.items()},
        differing=int(at_a[0].sum()),
        labels=int(at_a.sum()),
    )


def largest_step(counts: np.ndarray) -> float:
    """Return the largest change between neighbouring values of a sweep, as a fraction of the change from A to B.

    The changing quantity is the number of predictions equal to A's only, minus those equal to B's only.
    """
    lead = counts[:, :, 0].sum(-1).mean(1) - counts[:, :, 1].sum(-1).mean(1)
    return float(np.abs(np.diff(lead)).max() / abs(lead[0] - lead[-1]))


def judge(results: FunctionalResults) -> Verdict:
    """Require that A and B differ on clearly more than 1% of the test labels, and that labels change gradually."""
    differing, labels = results.differing, results.labels
    guess, unit = results.guessing["test"], SETUPS[results.config["setup"]].dataset.unit
    middle = np.array(results.sweeps["linear"].counts).mean(1)
    a, b, _, neither = middle[len(middle) // 2].sum(1) / labels
    text = (
        f"A and B predict different labels for {differing:,} of {labels:,} test {unit}s ({differing / labels:.1%}). At "
        f"the midpoint of the line, {a:.1%} of the labels are those of A only, {b:.1%} those of B only and "
        f"{neither:.1%} those of neither."
    )
    substantial = rate_is_above(differing / labels, guess["examples"], SUBSTANTIAL)
    if substantial is None:
        return Verdict(
            None, f"No verdict: too few examples to tell whether A and B differ on more than {SUBSTANTIAL:.0%}. {text}"
        )
    if not substantial:
        return Verdict(False, text)
    steps = {name: largest_step(np.array(results.sweeps[name].counts)) for name in FROM_A_TO_B}
    worst = max(steps, key=steps.__getitem__)
    return Verdict(
        steps[worst] <= LARGEST_STEP,
        f"{text} The largest step between neighbouring values is {steps[worst]:.0%} of the change from A to B "
        f"({worst}).",
    )


# Light colours for correct labels, dark colours for wrong ones.
MATCH_COLOURS = {
    "both": ("#D9D9D9", "#8C8C8C"),
    "A only": ("#8FD3BC", "#009E73"),
    "B only": ("#F5D490", "#E69F00"),
    "neither": ("#E3B5D0", "#A23F78"),
}


def draw(results: FunctionalResults, folder: AnyPath) -> None:
    """Draw, for each sweep, the fractions of test labels predicted by both networks, A only, B only or neither."""
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        panels = figure.subplots(2, 3, sharey=True).ravel()
        lowest = 1.0
        for axes, (name, sweep_results) in zip(panels, results.sweeps.items(), strict=False):
            counts = np.array(sweep_results.counts).mean(axis=1)  # over samples: value × match × correctness
            parts = counts / counts[0].sum()
            layers = [parts[:, results.matches.index(match), i] for match in MATCH_COLOURS for i in (0, 1)]
            colours = [colour for pair in MATCH_COLOURS.values() for colour in pair]
            labels = [f"{match}, {how}" for match in MATCH_COLOURS for how in ("correct", "wrong")]
            axes.stackplot(sweep_results.parameter.values, layers, colors=colours, labels=labels, linewidth=0)
            lowest = min(lowest, layers[0].min())
            axes.margins(x=0)
            axes.set_title(name)
            axes.set_xlabel(sweep_results.parameter.name)
        # Cut the axis, because most labels are "both, correct" everywhere.
        panels[0].set_ylim(max(0, np.floor(20 * lowest - 0.2) / 20), 1)
        for axes in (panels[0], panels[3]):
            axes.set_ylabel(f"fraction of {SETUPS[results.config['setup']].dataset.unit}s (axis cut)")
        panels[-1].axis("off")
        handles, labels = panels[0].get_legend_handles_labels()
        panels[-1].legend(handles, labels, loc="center", frameon=False, title="label also predicted by")
        rate = results.differing / results.labels
        figure.suptitle(f"{results.title} (A and B disagree on {rate:.1%})", fontsize=9)
        save(figure, folder, results.experiment)


EXPERIMENT = Experiment(
    name="functional",
    title="labels of combinations",
    claim="A and B differ on a substantial part of the test set, and combinations change gradually from A to B.",
    alt="Stacked areas for five sweeps: test labels predicted by both networks, by A only, by B only or by neither.",
    parts=sweeps,
    config=SweepConfig,
    results=FunctionalResults,
    measure=measure,
    draw=draw,
    judge=judge,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
