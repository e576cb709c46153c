"""Find axes of constants: arrays that depend on neither parameters nor inputs.

This module finds the entries of constants that may change places, and folds operations on constants. It folds only
integers and booleans, because XLA and NumPy may round floats differently.
"""

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from mcomb.symmetry.axes import Axis, concatenation, product
from mcomb.symmetry.facts import ArrayFacts, shape_of

LARGEST_CONSTANT = 2**20  # maximum number of entries of an array whose values are kept
MOST_PERIODS = 16  # maximum number of periods to try; usually the first is right


def constant(value: Any) -> ArrayFacts:
    """Return a constant, with frozen axes where its entries differ."""
    shape = np.shape(value)
    if jax.dtypes.issubdtype(getattr(value, "dtype", None), jax.dtypes.extended) or not math.prod(shape):
        return ArrayFacts(tuple(Axis(size, "a constant") if size > 1 else None for size in shape))
    array = np.asarray(value)
    differs = [not _look_the_same(array, array.take([0], axis)).all() for axis in range(array.ndim)]
    axes = tuple(_constant_axis(array, axis) if differ else None for axis, differ in enumerate(differs))
    return ArrayFacts(axes, value=array if array.size <= LARGEST_CONSTANT else None)


def _constant_axis(array: np.ndarray, axis: int) -> Axis:
    """Return an axis along which a constant varies, frozen except for entries that look the same.

    Equal entries may be consecutive, or periodic as in the masks of autoregressive flows (MADE). A periodic axis is the
    product of the periods, which may be permuted, and the positions inside each period.
    """
    entries = np.moveaxis(array, axis, 0)
    count = len(entries)
    if array.size > LARGEST_CONSTANT:
        return Axis(count, "a constant")

    def same(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.asarray(_look_the_same(x, y).reshape(len(x), -1).all(1))

    starts = [0, *(1 + np.flatnonzero(~same(entries[1:], entries[:-1]))), count]
    sizes = [int(stop - start) for start, stop in itertools.pairwise(starts)]
    if max(sizes) > 1:
        return concatenation([Axis(size, "a constant" if size == 1 else None) for size in sizes])
    candidates = 1 + np.flatnonzero(same(entries[1 : count // 2 + 1], entries[:1]))
    for period in map(int, candidates[:MOST_PERIODS]):
        if count % period == 0 and same(entries[period:], entries[:-period]).all():
            return product([Axis(count // period), Axis(period, "a constant")])
    return Axis(count, "a constant")


def _look_the_same(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Compare entries by their bits: 0.0 and −0.0 differ, and so do different NaNs."""
    if np.iscomplexobj(x):
        return _look_the_same(x.real, y.real) & _look_the_same(x.imag, y.imag)
    if jax.numpy.issubdtype(x.dtype, np.floating):
        x, y = (array.view(f"u{array.itemsize}") for array in (x, y))
    return x == y


def fold(eqn: core.JaxprEqn, operands: Sequence[ArrayFacts]) -> list[ArrayFacts] | None:
    """Return the result of a simple equation of known integers, or None for any other equation."""
    operation = FOLDED.get(eqn.primitive.name)
    avals: list[Any] = [atom.aval for atom in (*eqn.invars, *eqn.outvars)]
    if operation is None or any(operand.value is None for operand in operands):
        return None
    if math.prod(shape_of(eqn.outvars[0])) > LARGEST_CONSTANT or not all(_is_whole(aval.dtype) for aval in avals):
        return None
    with np.errstate(all="ignore"):
        result = operation(eqn.params, *(operand.value for operand in operands))
    return [constant(np.broadcast_to(result, avals[-1].shape).astype(avals[-1].dtype))]


def _is_whole(dtype: Any) -> bool:
    """Return whether a dtype is one of NumPy's own integer or boolean dtypes."""
    return isinstance(dtype, np.dtype) and dtype.kind in "iub" and dtype.isbuiltin == 1


def _spread(params: Any, value: np.ndarray, axes: Collection[int]) -> np.ndarray:
    return np.expand_dims(value, [axis for axis in range(len(params["shape"])) if axis not in axes])


FOLDED: dict[str, Callable[..., Any]] = {
    "add": lambda _, x, y: x + y,
    "broadcast_in_dim": lambda params, x: _spread(params, x, params["broadcast_dimensions"]),
    "concatenate": lambda params, *values: np.concatenate(values, params["dimension"]),
    "convert_element_type": lambda _, x: x,
    "iota": lambda params: _spread(params, np.arange(params["shape"][i := params["dimension"]]), [i]),
    "lt": lambda _, x, y: x < y,
    "mul": lambda _, x, y: x * y,
    "reshape": lambda params, x: x.transpose(params["dimensions"] or range(x.ndim)).reshape(params["new_sizes"]),
    "squeeze": lambda params, x: x.squeeze(params["dimensions"]),
    "sub": lambda _, x, y: x - y,
    "transpose": lambda params, x: x.transpose(params["permutation"]),
}
"""NumPy equivalents of simple primitives, before broadcasting and conversion to the result's dtype."""


def counts_up(array: ArrayFacts, axis: int) -> bool:
    """Return whether a known array holds 0, 1, 2, … along an axis."""
    value = array.value
    return value is not None and bool(np.all(np.moveaxis(value, axis, -1) == np.arange(value.shape[axis])))
