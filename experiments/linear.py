"""The straight line from A to B, and with a wider range beyond both.

    python -m experiments.linear --setup mlp-digits
    python -m experiments.linear --setup mlp-digits --range -1 2

The paper: no barrier in between when aligned; beyond, train loss and accuracy on [−0.25, 0] and [1, 1.25] are like
those of A and B, and aligned networks degrade far more slowly than naive ones.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from mcomb.combination import linear
from mcomb.errors import UserError
from mcomb.lab.cli import Flag
from mcomb.lab.runs.barriers import barrier
from mcomb.lab.runs.experiment import main, sweep
from mcomb.lab.runs.flags import LineConfig
from mcomb.lab.runs.results import METRICS, Results
from mcomb.lab.runs.verdicts import Verdict, clearly_less, judge_sweep, works


@dataclass(frozen=True)
class LinearConfig(LineConfig):
    """The flags of a line, which may go beyond A at 0 and B at 1."""

    range: Annotated[tuple[float, float], Flag("first and last λ")] = (0.0, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        first, last = self.range
        if not (first <= 0 and last >= 1):  # nor if one is not a number
            raise UserError(
                f"--range {first:g} {last:g} leaves out a part of [0, 1]: begin at 0 or before, end at 1 or after"
            )


def judge(results: Results) -> Verdict:
    """On [0, 1], whether aligned combinations work; beyond, how far, and how much further than naive ones."""
    at = np.array(results["parameter"]["values"])
    beyond = (at < 0) | (at > 1)
    if not beyond.any():
        return judge_sweep(results)
    near = beyond & (at >= -0.25) & (at <= 1.25)
    if not near.any():
        return Verdict(
            None, "No verdict: no point of the line is just beyond its ends, within 0.25. Give more --points."
        )
    level = {m: np.mean([results["models"][end]["train"][m] for end in results["ends"]]) for m in METRICS}

    def lost(variant: str, points: np.ndarray, worst: bool) -> dict[str, float]:
        """How much worse than A and B the points are on the train set, at worst or on average."""
        curve = {m: np.array(results["curves"][variant]["train"][m])[points] for m in METRICS}
        return {m: barrier(m, curve[m] if worst else curve[m].mean(), level[m], level[m]) for m in METRICS}

    aligned, naive = (lost(variant, near, worst=True) for variant in ("aligned", "naive"))
    everywhere, naive_everywhere = (lost(variant, beyond, worst=False) for variant in ("aligned", "naive"))
    # Virtually identical, the paper says: a fifth of what works elsewhere.
    flat = works(results, aligned, {"loss": 0.05, "accuracy": 0.03}, "train")
    return Verdict(
        flat and clearly_less(everywhere, naive_everywhere),
        f"Up to 0.25 beyond the ends, aligned combinations lose at most {aligned['accuracy']:.1%} of train accuracy "
        f"and {aligned['loss']:.3f} of loss, naive ones {naive['accuracy']:.1%} and {naive['loss']:.3f}; on average "
        f"over all points beyond, {everywhere['accuracy']:.1%} and {everywhere['loss']:.3f}, naive "
        f"{naive_everywhere['accuracy']:.1%} and {naive_everywhere['loss']:.3f}.",
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
    combine=linear,
    judge=judge,
    config=LinearConfig,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
