"""Judge whether results show the paper's findings.

Only results of the paper's networks can agree with the paper. For other networks, a verdict states whether they show
the same effect. Networks that are not trained or not matched get no verdict (`why_no_verdict`).

Barriers are judged relative to the networks' advantage over guessing (`cost`). A drop of 0.1 in accuracy is small for
networks at 0.95. It is the whole advantage for networks at 0.2 if guessing reaches 0.1. Experiments with other claims
define thresholds in their own `judge`.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import scipy  # loads `stats` on first use, because its import is slow

from mcomb.lab.runs.results import METRICS, Curves, Results

LossAndAccuracy = Mapping[str, float]

LIMITS = {"loss": 0.25, "accuracy": 0.15}  # maximum `cost` of a working combination
NEAR_PAPER = 1.5  # maximum ratio to the paper's barrier for agreement
CLEARLY_LESS = 0.5  # maximum ratio to the other barrier
CONFIDENCE = 0.99


WORDS = {True: "agrees with the paper", False: "does not agree with the paper", None: "no verdict"}
OTHER_WORDS = {  # for networks that are not in the paper
    True: "shows the paper's effect",
    False: "does not show the paper's effect",
    None: "no verdict",
}
OPEN_WORDS = {True: "yes", False: "no", None: "no verdict"}  # for open questions of the paper


class Verdict(NamedTuple):
    """Verdict on the paper's claim, and a sentence with the reason.

    Attributes:
        agrees: Whether results agree with the claim, or the answer to an open question; None without a verdict.
        finding: The reason.
    """

    agrees: bool | None
    finding: str


def verdict_words(agrees: bool | None, is_open: bool, is_papers: bool) -> str:
    """Return the text of a verdict; `is_papers` states whether the paper has these networks."""
    return (OPEN_WORDS if is_open else WORDS if is_papers else OTHER_WORDS)[agrees]


def verdict_colour(agrees: bool | None, is_papers: bool) -> str:
    """Return the colour of a verdict; only results that contradict the paper are red."""
    return "green" if agrees else "red" if agrees is False and is_papers else "yellow"


def why_no_verdict(results: Results) -> str | None:
    """Return the reason why the networks allow no verdict, hardly trained or not matched; None if they do."""
    for name, by_split in results.models.items():
        guess, reached = results.guessing["test"], by_split["test"]["accuracy"]
        if not reached >= trained_accuracy(guess):
            count = "1 example" if guess["examples"] == 1 else f"{guess['examples']:,} examples"
            is_few = reached >= trained_accuracy({**guess, "examples": math.inf})
            return (
                f"No verdict: network {name} hardly beats guessing. It has a test accuracy of {reached:.1%} on "
                f"{count}, and guessing the most common label has {guess['accuracy']:.1%}: "
                f"{'measure on more examples' if is_few else 'train longer'}."
            )
    for name, product in results.inner_products.items():
        if not product["aligned"] > product["naive"]:
            return f"No verdict: the matching of {name} does not bring their weights closer."
    return None


def trained_accuracy(guess: Mapping[str, int | float]) -> float:
    """Return the least accuracy that clearly beats guessing.

    It is a tenth of the way from guessing to perfect accuracy, plus five standard errors. Each example counts as one
    observation, because the tokens of one text are not independent.
    """
    chance = guess["accuracy"]
    return chance + 0.1 * (1 - chance) + 5 * math.sqrt(chance * (1 - chance) / guess["examples"])


def cost(results: Results, barrier: LossAndAccuracy, split: str = "test") -> dict[str, float]:
    """Return a barrier as a fraction of the networks' mean advantage over guessing, for each metric."""
    guess = results.guessing[split]
    level = {m: np.mean([by_split[split][m] for by_split in results.models.values()]) for m in METRICS}
    advantage = {
        "loss": max(guess["loss"] - level["loss"], 0.1 * guess["loss"]),  # accurate networks may have a high loss
        "accuracy": level["accuracy"] - guess["accuracy"],
    }
    return {m: float(barrier[m] / advantage[m]) for m in METRICS}


def works(results: Results, barrier: LossAndAccuracy, limits: LossAndAccuracy = LIMITS, split: str = "test") -> bool:
    """Return whether a barrier costs little, in loss and in accuracy; False if it is NaN."""
    part = cost(results, barrier, split)
    return all(part[m] <= limits[m] for m in METRICS)


def clearly_less(barrier: LossAndAccuracy, other: LossAndAccuracy) -> bool:
    """Return whether a barrier is at most half of another, in loss and in accuracy."""
    return all(barrier[m] <= CLEARLY_LESS * other[m] for m in METRICS)


def judge_sweep(results: Curves, limits: LossAndAccuracy = LIMITS, variant: str = "aligned") -> Verdict:
    """Judge whether all aligned combinations work on the test set, clearly better than naive ones.

    If the paper reports barriers for this setup and width, the aligned barriers must be close to these. Otherwise
    their cost must be within `limits`.
    """
    aligned, naive = (results.barriers[name]["test"] for name in (variant, "naive"))
    paper = results.paper
    if paper and paper.width == results.config["width"]:
        good = all(aligned[m] <= NEAR_PAPER * getattr(paper, m) for m in METRICS)
        beside = f" The paper's barriers at this width are {paper.loss:.3f} and {paper.accuracy:.1%}."
    else:
        good, part = works(results, aligned, limits), cost(results, aligned)
        beside = (
            f" The aligned barriers are {part['loss']:.0%} of the networks' advantage over guessing in loss and "
            f"{part['accuracy']:.0%} in accuracy; the limits are {limits['loss']:.0%} and {limits['accuracy']:.0%}."
        )
    a, b = results.ends
    return Verdict(
        good and clearly_less(aligned, naive),
        f"The aligned barriers between {a} and {b} on the test set are {aligned['loss']:.3f} in loss and "
        f"{aligned['accuracy']:.1%} in accuracy, and the naive barriers are {naive['loss']:.3f} and "
        f"{naive['accuracy']:.1%}.{beside}",
    )


def falls(values: Iterable[float]) -> bool:
    """Return whether values clearly fall: the last is at most half of the first, and most pairs are in order."""
    series = list(values)
    return bool(
        series[-1] <= CLEARLY_LESS * series[0] and scipy.stats.kendalltau(range(len(series)), series).statistic < -0.5
    )


def rate_is_above(rate: float, examples: int, least: float) -> bool | None:
    """Return whether a rate observed on some examples is above `least`; None if they are too few to tell.

    An example counts once even if it has several labels, because the tokens of one text are not independent.
    """
    interval = scipy.stats.binomtest(round(rate * examples), examples).proportion_ci(CONFIDENCE)
    return True if interval.low > least else False if interval.high < least else None


def same_distribution(x: Any, y: Any, tolerance: float = 0.05) -> tuple[bool, float]:
    """Return whether two samples are distributed alike, and the Kolmogorov–Smirnov distance between them.

    The distance may be at most `tolerance` plus the deviation expected by chance for samples of these sizes.
    """
    distance = float(scipy.stats.ks_2samp(x, y, method="asymp").statistic)
    by_chance = math.sqrt(-math.log((1 - CONFIDENCE) / 2) / 2 * (1 / len(x) + 1 / len(y)))
    return distance <= tolerance + by_chance, distance
