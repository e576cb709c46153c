"""Calibrate networks: measure each test loss at the network's own best softmax temperature.

A temperature is fitted on one half of the test examples and measured on the other half.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from mcomb.evaluation.barriers import barrier
from mcomb.evaluation.evaluate import Metrics
from mcomb.evaluation.objectives import cross_entropy, tempered_cross_entropy
from mcomb.lab.data.datasets import Split
from mcomb.lab.runs.results import Calibrated

TEMPERATURES = tuple(2.0 ** (i / 4) for i in range(-16, 17))  # from a sixteenth to sixteen
HALVES = ("test, even examples", "test, odd examples")

Halves = Mapping[str, Metrics]
"""The metrics on each of the HALVES."""


def objectives() -> dict[str, Any]:
    """Return the loss, and the losses at all TEMPERATURES as the metric `tempered`."""
    return {"loss": cross_entropy, "metrics": {"tempered": tempered_cross_entropy(TEMPERATURES)}}


def split_in_halves(test: Split) -> dict[str, Split]:
    """Return the test examples in two halves."""
    return {name: test.take(slice(i, None, 2)) for i, name in enumerate(HALVES)}


def calibrate(
    networks: Mapping[str, Halves],
    combinations: Mapping[str, Halves],
    counts: Sequence[int],
    shape: tuple[int, ...],
    between: Any,
) -> Calibrated:
    """Return test losses at the best temperatures: of networks, on curves, and as barriers.

    Args:
        networks: The metrics of the two ends of the curves, by letter.
        combinations: The metrics of the combinations of each curve, by name.
        counts: The number of examples in each half.
        shape: The shape of a curve.
        between: The points of a curve that count for its barrier.
    """

    def best(halves: Halves) -> Float[np.ndarray, "*k"]:
        return cross_fit([at.tempered for at in halves.values()], counts)

    levels = {letter: float(best(halves)) for letter, halves in networks.items()}
    curves = {name: best(halves).reshape(shape) for name, halves in combinations.items()}
    lost = {name: barrier("loss", curve[between], *levels.values()) for name, curve in curves.items()}
    return Calibrated(
        models={letter: {"test": {"loss": loss}} for letter, loss in levels.items()},
        curves={name: {"test": {"loss": curve.tolist()}} for name, curve in curves.items()},
        barriers={name: {"test": {"loss": loss}} for name, loss in lost.items()},
    )


def cross_fit(tempered: Sequence[Float[np.ndarray, "*k t"]], counts: Sequence[int]) -> Float[np.ndarray, "*k"]:
    """Return the mean loss over two halves of the examples, each at the temperature that is best on the other half.

    Args:
        tempered: For each half, the mean loss at each of t temperatures.
        counts: The number of examples in each half.
    """
    losses = [
        np.take_along_axis(own, np.argmin(other, axis=-1)[..., None], axis=-1)[..., 0]
        for own, other in (tempered, tempered[::-1])
    ]
    return np.asarray(np.average(losses, axis=0, weights=counts))
