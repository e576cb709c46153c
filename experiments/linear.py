"""The straight line from A to B, and with a wider range beyond both.

    python -m experiments.linear --setup mlp-digits
    python -m experiments.linear --setup mlp-digits --range -1 2

The paper: no barrier in between when aligned; beyond, the train loss of ResNet-20 is flat on [−0.25, 1.25], and
aligned networks degrade far more slowly than naive ones.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from mcomb.base import UserError
from mcomb.cli import Flag
from mcomb.combine import linear, mix
from mcomb.experiment import Finding, Results, main, sweep, works_aligned
from mcomb.workspace import LineConfig


@dataclass(frozen=True)
class LinearConfig(LineConfig):
    """The flags of a line, which may go beyond A at 0 and B at 1."""

    range: Annotated[tuple[float, float], Flag("first and last λ")] = (0.0, 1.0)

    def __post_init__(self) -> None:
        first, last = self.range
        if first > 0 or last < 1:
            raise UserError(
                f"--range {first:g} {last:g} leaves out a part of [0, 1]: begin at 0 or before, end at 1 or after"
            )


def conclude(results: Results) -> Finding:
    """On [0, 1], whether aligned combinations work; beyond, how far and how much further than naive ones."""
    at = np.array(results["parameter"]["values"])
    if at.min() >= 0 and at.max() <= 1:
        return works_aligned(results)
    inside = (at >= -0.25) & (at <= 1.25)
    mean = np.mean([results["models"][model]["train"]["accuracy"] for model in "AB"])
    lost, mid = {}, {}
    for variant in ("naive", "aligned"):
        accuracy = np.array(results["curves"][variant]["train"]["accuracy"])[:, 0]
        lost[variant], mid[variant] = mean - accuracy[inside].min(), mean - accuracy.mean()
    return bool(lost["aligned"] <= 0.05 and mid["aligned"] < mid["naive"]), (
        f"On [−0.25, 1.25] aligned combinations lose at most {lost['aligned']:.1%} of train accuracy, naive ones "
        f"{lost['naive']:.1%}; over the whole range {mid['aligned']:.1%} and {mid['naive']:.1%} on average."
    )


EXPERIMENT = sweep(
    name="linear",
    title="the line through A and B",
    claim="Aligned networks are linearly connected, and the line stays good for a stretch beyond both ends, "
    "where naive combinations degrade much faster.",
    alt="Loss and accuracy along the line through A at 0 and B at 1, naive and aligned.",
    parameter="λ",
    label="λ: A at 0, B at 1",
    values=(0.0, 1.0),
    combine=mix(linear),
    conclude=conclude,
    config=LinearConfig,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
