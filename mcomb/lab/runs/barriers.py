"""Compute barriers: the worst combination of two networks relative to their mean (the paper's section 3)."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mcomb.lab.runs.results import METRICS, SPLITS, Scores


def barrier(metric: str, values: Any, a: float, b: float) -> float:
    """Return the empirical barrier of a sample (the paper's section 3): its worst network minus the mean of A and B."""
    return float(np.max(values)) - (a + b) / 2 if metric == "loss" else (a + b) / 2 - float(np.min(values))


def barriers(ends: Iterable[Scores], curves: Mapping[str, Scores], between: Any = ...) -> dict[str, Scores]:
    """Return the barriers of every curve between two networks' scores, for each split and metric.

    Args:
        ends: The scores of the two networks that the curves connect.
        curves: The measurements on each curve, by variant.
        between: Index of the points of a curve to include.
    """
    first, last = ends

    def of_curve(curve: Scores, split: str, metric: str) -> float:
        return barrier(metric, np.array(curve[split][metric])[between], first[split][metric], last[split][metric])

    return {
        variant: {split: {metric: of_curve(curve, split, metric) for metric in METRICS} for split in SPLITS}
        for variant, curve in curves.items()
    }
