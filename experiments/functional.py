"""Whose label do combinations predict: A's only, B's only, both's or neither's, rightly or wrongly.

    python -m experiments.functional --setup mlp-digits

The paper: the two ends differ on a substantial part of the test set, and the labels change gradually in between. It
needs the sweeps bernoulli, subcube, hyperplane, uniform and linear, and runs what is missing.
"""

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from mcomb.evaluation.objectives import AGREES_WITH
from mcomb.io.paths import AnyPath
from mcomb.lab.figures import STYLE, save
from mcomb.lab.runs.experiment import Experiment, Parts, main
from mcomb.lab.runs.flags import SweepConfig, convert_config
from mcomb.lab.runs.measure import Run
from mcomb.lab.runs.results import Results
from mcomb.lab.runs.verdicts import Verdict, rate_is_above

from . import bernoulli, hyperplane, linear, subcube, uniform

SWEEPS = {module.EXPERIMENT.name: module.EXPERIMENT for module in (bernoulli, subcube, hyperplane, uniform, linear)}
FROM_A_TO_B = ("bernoulli", "subcube", "hyperplane", "linear")  # both ends of uniform are mixtures already
SUBSTANTIAL = 0.01  # of the test images
LARGEST_STEP = 0.35  # of all that changes from A to B, between neighbouring values: more is a jump


def sweeps(config: SweepConfig) -> Parts:
    """The five sweeps."""
    return {name: (sweep, convert_config(config, sweep.config)) for name, sweep in SWEEPS.items()}


def measure(run: Run) -> Results:
    """For each sweep the eight counts of each sample, and how many test images A and B label differently."""
    counts = {name: part["curves"]["aligned"]["test"]["agreement"] for name, part in run.parts.items()}
    at_a = np.array(counts["linear"])[0, 0]  # λ = 0 is A itself: where B says otherwise, A is alone
    return {
        "matches": AGREES_WITH,
        "sweeps": {n: {"parameter": part["parameter"], "counts": counts[n]} for n, part in run.parts.items()},
        "differing": int(at_a[0].sum()),
        "images": int(at_a.sum()),
    }


def largest_step(counts: np.ndarray) -> float:
    """The largest change between neighbouring values of a sweep from A to B, as a part of the whole change.

    What changes is how many more images have A's label alone than B's alone.
    """
    lead = counts[:, :, 0].sum(-1).mean(1) - counts[:, :, 1].sum(-1).mean(1)
    return float(np.abs(np.diff(lead)).max() / abs(lead[0] - lead[-1]))


def judge(results: Results) -> Verdict:
    """Whether A and B differ on clearly more than a hundredth of the test images, and labels change step by step."""
    differing, images = results["differing"], results["images"]
    middle = np.array(results["sweeps"]["linear"]["counts"]).mean(1)
    a, b, _, neither = middle[len(middle) // 2].sum(1) / images
    text = (
        f"A and B give different labels to {differing} of {images} test images ({differing / images:.1%}). Half way on "
        f"the line, the label is A's alone for {a:.1%}, B's alone for {b:.1%} and neither's for {neither:.1%}."
    )
    substantial = rate_is_above(differing, images, SUBSTANTIAL)
    if substantial is None:
        return Verdict(
            None, f"No verdict: so few images cannot tell whether that is more than {SUBSTANTIAL:.0%}. {text}"
        )
    if not substantial:
        return Verdict(False, text)
    steps = {name: largest_step(np.array(results["sweeps"][name]["counts"])) for name in FROM_A_TO_B}
    worst = max(steps, key=steps.__getitem__)
    return Verdict(
        steps[worst] <= LARGEST_STEP,
        f"{text} From A to B, the largest step between neighbouring values is {steps[worst]:.0%} of the whole change "
        f"({worst}).",
    )


# Light for right, dark for wrong labels.
MATCH_COLOURS = {
    "both": ("#D9D9D9", "#8C8C8C"),
    "A only": ("#8FD3BC", "#009E73"),
    "B only": ("#F5D490", "#E69F00"),
    "neither": ("#E3B5D0", "#A23F78"),
}


def draw(results: Results, folder: AnyPath) -> None:
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
        rate = results["differing"] / results["images"]
        figure.suptitle(f"{results['title']} (A and B disagree on {rate:.1%})", fontsize=9)
        save(figure, folder, results["experiment"])


EXPERIMENT = Experiment(
    name="functional",
    title="whose labels combinations predict",
    claim="A and B differ on a substantial part of the test set, and combinations go gradually from one to the other.",
    alt="Stacked areas for five sweeps: test images whose label is that of both networks, A only, B only or neither.",
    parts=sweeps,
    config=SweepConfig,
    measure=measure,
    draw=draw,
    judge=judge,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
