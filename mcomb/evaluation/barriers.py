"""Compute barriers: the worst combination of networks relative to their mean (the paper's section 3)."""

from typing import Any, NamedTuple

import numpy as np


class Barrier(NamedTuple):
    """The paper's empirical barriers: how much worse the worst combination is than the mean of the networks.

    Attributes:
        loss: The largest loss of a combination minus the mean loss of the networks.
        accuracy: The mean accuracy of the networks minus the lowest accuracy of a combination; None without accuracies.

    Examples:
        >>> networks = a, aligned.params
        >>> mcomb.sweep(apply, networks, x_test, y_test, mcomb.linear).barrier
        Barrier(loss=0.0276, accuracy=0.0176)
    """

    loss: float
    accuracy: float | None = None

    def __repr__(self) -> str:
        return f"Barrier({', '.join(f'{name}={x:.4f}' for name, x in self._asdict().items() if x is not None)})"


def barrier(metric: str, values: Any, *ends: float) -> float:
    """Return the barrier in loss or accuracy of sampled combinations, relative to the mean of their networks."""
    mean = float(np.mean(ends))
    return float(np.max(values)) - mean if metric == "loss" else mean - float(np.min(values))
