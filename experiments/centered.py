"""Sample shares from a box centred at A, so that half of them extrapolate.

    python -m experiments.centered --setup mlp-digits

Each weight of A moves at random by up to s times its distance from the weight of B. The shift is small if the matching
found a similar weight. In the paper, combinations of aligned networks work well for s up to 0.25.
"""

import numpy as np

from mcomb.combination import centered
from mcomb.evaluation.barriers import barrier
from mcomb.lab.runs.command import main
from mcomb.lab.runs.experiment import sweep_experiment
from mcomb.lab.runs.results import SweepResults
from mcomb.lab.runs.verdicts import Verdict, works

S_MAX = 0.25


def judge(results: SweepResults) -> Verdict:
    """Compare aligned combinations up to s = 0.25 with A."""
    near = np.array(results.parameter.values) <= S_MAX
    level = results.models["A"]["test"]
    lost = {
        variant: {
            metric: barrier(metric, np.array(curve["test"][metric])[near], level[metric], level[metric])
            for metric in level
        }
        for variant, curve in results.curves.items()
    }
    aligned, naive = lost["aligned"], lost["naive"]
    return Verdict(
        works(results, aligned),
        f"Up to s = {S_MAX}, the worst aligned combination is {aligned['accuracy']:.1%} less accurate on the test set "
        f"than A and its loss is {aligned['loss']:.3f} higher. For the worst naive combination, the differences are "
        f"{naive['accuracy']:.1%} and {naive['loss']:.3f}.",
    )


EXPERIMENT = sweep_experiment(
    name="centered",
    title="coefficients in a box around A",
    claim="A still works after its weights move at random towards or away from the aligned B, by up to a quarter of "
    "the distance.",
    alt="Loss and accuracy against the size of the box around A, naive and aligned.",
    parameter="s",
    label="s: the share of B is uniform on [−s, s]",
    values=(0.0, 0.5),
    combine=centered,
    judge=judge,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
