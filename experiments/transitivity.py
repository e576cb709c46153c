"""Interpolate between B and C, both matched to A and not to each other.

    python -m experiments.transitivity --setup mlp-digits

In the paper, B and C are then linearly connected. The baselines are B and C without matching, and C matched to B.
"""

import numpy as np

from mcomb.combination import linear
from mcomb.lab import figures
from mcomb.lab.cache.matchings import B_TO_A, C_TO_A, MatchingKey
from mcomb.lab.flags import LineConfig
from mcomb.lab.runs.command import main
from mcomb.lab.runs.experiment import Experiment
from mcomb.lab.runs.measure import Run, Task
from mcomb.lab.runs.results import Parameter, SweepResults
from mcomb.lab.runs.verdicts import Verdict, clearly_less, works

C_TO_B = MatchingKey("C", "B")


def measure(run: Run) -> SweepResults:
    """Measure the curves from B to C: naive, matched through A, and matched directly."""
    b, c = (run.networks[letter].params for letter in "BC")
    values = np.linspace(0, 1, run.config.points, dtype=np.float32)
    pairs = {
        "naive": (b, c),
        "through A": (run.align(B_TO_A), run.align(C_TO_A)),
        "direct": (b, run.align(C_TO_B)),
    }
    tasks = {name: Task(linear, pair, values) for name, pair in pairs.items()}
    curves = run.measure_curves(tasks, (len(values), 1), ends="BC")
    return SweepResults(parameter=Parameter("λ", "λ: B at 0, C at 1", values.tolist()), **curves)


def judge(results: SweepResults) -> Verdict:
    """Require that B and C are linearly connected through A in loss and accuracy."""
    lost = {name: barrier["test"] for name, barrier in results.barriers.items()}
    each = {name: f"{barrier['accuracy']:.1%} and {barrier['loss']:.3f}" for name, barrier in lost.items()}
    return Verdict(
        works(results, lost["through A"]) and clearly_less(lost["through A"], lost["naive"]),
        f"The test accuracy and loss barriers between B and C are {each['through A']} if both are matched to A, "
        f"{each['direct']} if C is matched to B, and {each['naive']} without matching.",
    )


EXPERIMENT = Experiment(
    name="transitivity",
    title="B and C through A",
    claim="Two networks that are both matched to a third are linearly connected.",
    alt="Loss and accuracy on the line from B to C: naive, both matched to A, and C matched to B.",
    networks="ABC",
    matchings=lambda config: (B_TO_A, C_TO_A, C_TO_B),
    config=LineConfig,
    combinations=lambda config: 3 * config.points,
    results=SweepResults,
    measure=measure,
    draw=figures.draw_sweep,
    judge=judge,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
