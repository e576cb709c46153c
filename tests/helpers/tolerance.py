"""Comparisons of floats whose tolerance follows from their dtype and scale."""

from typing import Any

import numpy as np

HALF_THE_DIGITS = np.finfo(np.float32).eps ** -0.5  # in roundings: what `check_spec` allows


def assert_close(actual: Any, expected: Any, factor: float, *, scale: Any = None, dtype: Any = np.float32) -> None:
    """Asserts that two arrays differ by at most `factor` roundings, where a rounding is eps times the scale.

    The eps is that of the dtype of the computation. The scale is the largest entry of `expected`, unless it is given:
    where terms cancel it is theirs.
    """
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    scale = np.abs(expected).max(initial=0) if scale is None else scale
    rounding = np.maximum(np.finfo(dtype).eps * np.asarray(scale, np.float64), np.finfo(np.float64).tiny)
    assert actual.shape == expected.shape
    error = np.max(np.abs(actual - expected) / rounding, initial=0)
    assert error <= factor, f"they differ by {error:.3g} roundings, more than {factor:g}"
