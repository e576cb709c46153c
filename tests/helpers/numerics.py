"""Comparisons with tolerances that follow from rounding, never absolute constants."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

EPS = float(np.finfo(np.float32).eps)


def assert_close(actual: Any, expected: Any, *, roundings: float, scale: float | None = None) -> None:
    """Fail unless two trees of arrays are equal up to `roundings` float32 rounding errors of a number of size `scale`.

    The default scale of a leaf is its largest expected number. Pass a larger scale if numbers cancel: the rounding
    errors of 1000.1 − 1000 have the scale of 1000, not of 0.1.
    """

    def compare(x: Any, y: Any) -> None:
        size = np.abs(y).max(initial=0) if scale is None else scale
        np.testing.assert_allclose(x, y, rtol=0, atol=roundings * EPS * size)

    jax.tree.map(compare, actual, expected)


def assert_equal(actual: Any, expected: Any) -> None:
    """Fail unless two trees of arrays are equal bit by bit."""

    def bits(x: Any) -> Any:
        is_key = isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(x) if is_key else x

    jax.tree.map(lambda x, y: np.testing.assert_array_equal(bits(x), bits(y)), actual, expected)


def inner_product(a: Any, b: Any) -> float:
    """Return the inner product of the floats of two trees, in double precision."""
    return sum(float(np.vdot(x, y)) for x, y in zip(_floats(a), _floats(b), strict=True))


def inner_product_scale(a: Any, b: Any) -> float:
    """Return the largest inner product of trees with these norms: the scale of its rounding errors."""
    return float(np.sqrt(inner_product(a, a) * inner_product(b, b)))


def assert_never_falls(values: Sequence[float], slack: float = 0.0) -> None:
    """Fail if a number is smaller than the one before it by more than `slack`."""
    assert all(later >= earlier - slack for earlier, later in itertools.pairwise(values)), values


def _floats(tree: Any) -> list[np.ndarray]:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)]
    return [np.asarray(leaf, np.float64) for leaf in leaves]
