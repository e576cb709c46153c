"""Interpolate on the straight line from A to B, or extrapolate beyond both.

    python -m experiments.linear --setup mlp-digits
    python -m experiments.linear --setup mlp-digits --range -1 2

In the paper, there is no barrier between aligned networks. Train loss and accuracy on [−0.25, 0] and [1, 1.25] are
similar to those of A and B. Further out, aligned networks degrade far more slowly than naive ones.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from mcomb.combination import linear
from mcomb.errors import UserError
from mcomb.evaluation.barriers import barrier
from mcomb.lab.cli import Flag
from mcomb.lab.flags import LineConfig
from mcomb.lab.runs.command import main
from mcomb.lab.runs.experiment import sweep_experiment
from mcomb.lab.runs.results import METRICS, SweepResults
from mcomb.lab.runs.verdicts import Verdict, clearly_less, judge_sweep, works


@dataclass(frozen=True)
class LinearConfig(LineConfig):
    """Flags of a line, which may extend beyond A at 0 and B at 1."""

    range: Annotated[tuple[float, float], Flag("first and last λ")] = (0.0, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        first, last = self.range
        if not (first <= 0 and last >= 1):  # also true for NaN
            raise UserError(f"--range {first:g} {last:g} must contain [0, 1]: start at most at 0, end at least at 1.")


def judge(results: SweepResults) -> Verdict:
    """Judge the line on [0, 1] like any sweep, and beyond it against A, B and naive combinations."""
    at = np.array(results.parameter.values)
    beyond = (at < 0) | (at > 1)
    if not beyond.any():
        return judge_sweep(results)
    near = beyond & (at >= -0.25) & (at <= 1.25)
    if not near.any():
        return Verdict(None, "No verdict: no point lies within 0.25 beyond A or B. Increase --points.")
    level = {m: np.mean([results.models[end]["train"][m] for end in results.ends]) for m in METRICS}

    def lost(variant: str, points: np.ndarray, worst: bool) -> dict[str, float]:
        """Return the worst or mean train barrier of some points relative to A and B."""
        curve = {m: np.array(results.curves[variant]["train"][m])[points] for m in METRICS}
        return {m: barrier(m, curve[m] if worst else curve[m].mean(), level[m], level[m]) for m in METRICS}

    aligned, naive = (lost(variant, near, worst=True) for variant in ("aligned", "naive"))
    everywhere, naive_everywhere = (lost(variant, beyond, worst=False) for variant in ("aligned", "naive"))
    # A fifth of the usual limits, because the paper calls these networks virtually identical.
    flat = works(results, aligned, {"loss": 0.05, "accuracy": 0.03}, "train")
    return Verdict(
        flat and clearly_less(everywhere, naive_everywhere),
        f"Up to 0.25 beyond the ends, the largest barriers on the train set are {aligned['accuracy']:.1%} in accuracy "
        f"and {aligned['loss']:.3f} in loss (naive: {naive['accuracy']:.1%} and {naive['loss']:.3f}). The mean "
        f"barriers of all points beyond the ends are {everywhere['accuracy']:.1%} and {everywhere['loss']:.3f} (naive: "
        f"{naive_everywhere['accuracy']:.1%} and {naive_everywhere['loss']:.3f}).",
    )


EXPERIMENT = sweep_experiment(
    name="linear",
    title="the line through A and B",
    claim="Aligned networks are linearly connected. Loss and accuracy stay good for some distance beyond both ends, "
    "and degrade much faster there for naive networks.",
    alt="Loss and accuracy along the line through A at 0 and B at 1, naive and aligned.",
    parameter="λ",
    label="λ: A at 0, B at 1",
    values=(0.0, 1.0),
    combine=linear,
    judge=judge,
    config=LinearConfig,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
