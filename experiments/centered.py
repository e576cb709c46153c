"""Uniform coefficients from a box centred at A, so that they extrapolate as often as they interpolate.

    python -m experiments.centered --setup mlp-digits

Each weight of A is shifted at random by up to s times its distance from B's: little where the matching found a weight
like it, more where it did not. The paper: combinations of aligned networks work well for s up to 0.25.
"""

import numpy as np

from mcomb.combination import centered
from mcomb.lab.runs.barriers import barrier
from mcomb.lab.runs.experiment import main, sweep
from mcomb.lab.runs.results import Results
from mcomb.lab.runs.verdicts import Verdict, works

S_MAX = 0.25


def judge(results: Results) -> Verdict:
    """Whether aligned combinations work up to s = 0.25, beside A alone."""
    near = np.array(results["parameter"]["values"]) <= S_MAX
    level = results["models"]["A"]["test"]
    lost = {
        variant: {
            metric: barrier(metric, np.array(curve["test"][metric])[near], level[metric], level[metric])
            for metric in level
        }
        for variant, curve in results["curves"].items()
    }
    aligned, naive = lost["aligned"], lost["naive"]
    return Verdict(
        works(results, aligned),
        f"Up to s = {S_MAX} the worst aligned combination loses {aligned['accuracy']:.1%} of A's test accuracy and its "
        f"loss is {aligned['loss']:.3f} higher; the worst naive one, {naive['accuracy']:.1%} and {naive['loss']:.3f}.",
    )


EXPERIMENT = sweep(
    name="centered",
    title="coefficients in a box around A",
    claim="Random shifts of A's weights by up to s times their distances from the aligned B's, inwards and outwards, "
    "leave a network that works for s up to 0.25.",
    alt="Loss and accuracy against the size of the box around A, naive and aligned.",
    parameter="s",
    label="s: the share of B is uniform on [−s, s]",
    values=(0.0, 0.5),
    combine=centered,
    judge=judge,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
