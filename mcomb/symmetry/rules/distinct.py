"""Prove along which axes an array has no equal entries, so that `argmax` and `top_k` do not depend on their order.

`argmax` and `top_k` return the first of several equal entries. Entries along an axis are distinct if the same analytic
formula computes each entry from separate weights. They can then be equal only by chance. For example, the scores
`x @ router` are distinct, because each has its own column of the router. The sums of a matrix and its transpose are
not, because they share weights. A choice along an axis freezes it unless its entries are proven to be distinct.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from mcomb.symmetry.arrays import Array, ArrayAxes, shape_of
from mcomb.symmetry.axes import atoms
from mcomb.symmetry.reshapes import reshape_groups
from mcomb.symmetry.rules.common import other_axes

Where = Callable[[core.JaxprEqn, Sequence[Array]], frozenset[int]]
"""Function that returns the axes along which the entries of an equation's result are distinct."""


def distinct_axes(eqn: core.JaxprEqn, operands: Sequence[Array], results: Sequence[ArrayAxes]) -> frozenset[int]:
    """Return the axes along which the entries of an equation's results are proven to be distinct."""
    name = eqn.primitive.name
    if not any(array.distinct for array in operands) or not all(map(is_float, (*eqn.invars, *eqn.outvars))):
        return frozenset()
    if name in ("mul", "dot_general") and any(array.value is not None and not array.value.all() for array in operands):
        return frozenset()  # products with zeros are equal to each other
    found = AXES.get(name, _elementwise if name in ANALYTIC else _nowhere)(eqn, operands)
    twice = found and any(map(_has_an_axis_twice, (*(array.axes for array in operands), *results)))
    return frozenset() if twice else found


def is_float(atom: Any) -> bool:
    """Return whether an array has real floating-point entries of more than eight bits."""
    dtype = atom.aval.dtype
    return bool(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1)


def _has_an_axis_twice(axes: ArrayAxes) -> bool:
    """Return whether two axes of an array move together, as the rows and columns of a symmetric matrix do."""
    found = [atom for axis in axes if axis is not None for atom in {*atoms(axis)}]
    return len(found) != len({*found})


def _all_varying(labels: Sequence[Iterable[Any]], operands: Sequence[Array]) -> frozenset[Any]:
    """Return the labels along which some operand varies, and every operand that varies has distinct entries."""
    varying: dict[Any, bool] = {}
    for array, own in zip(operands, labels, strict=True):
        for i, label in enumerate(own):
            if array.axes[i] is not None:
                varying[label] = varying.get(label, True) and i in array.distinct
    return frozenset(label for label, distinct in varying.items() if distinct)


def _elementwise(eqn: core.JaxprEqn, operands: Sequence[Array]) -> frozenset[int]:
    return _all_varying([range(len(array.axes)) for array in operands], operands)


def _nowhere(eqn: core.JaxprEqn, operands: Sequence[Array]) -> frozenset[int]:
    return frozenset()


def _dot(eqn: core.JaxprEqn, operands: Sequence[Array]) -> frozenset[int]:
    """Return the columns of each side, and the batch axes, that have distinct entries."""
    contracted, batch = eqn.params["dimension_numbers"]
    labels, kept = [], []
    for side, array in enumerate(operands):
        shared = {axis: ("batch", i) for i, axis in enumerate(batch[side])}
        labels.append([shared.get(axis, (side, axis)) for axis in range(len(array.axes))])
        kept += [(side, axis) for axis in other_axes(len(array.axes), [*contracted[side], *batch[side]])]
    found = _all_varying(labels, operands)
    labelled = [*(("batch", i) for i in range(len(batch[0]))), *kept]
    return frozenset(i for i, label in enumerate(labelled) if label in found)


def _broadcast(eqn: core.JaxprEqn, operands: Sequence[Array]) -> frozenset[int]:
    return frozenset(i for axis, i in enumerate(eqn.params["broadcast_dimensions"]) if axis in operands[0].distinct)


def _transpose(eqn: core.JaxprEqn, operands: Sequence[Array]) -> frozenset[int]:
    return frozenset(i for i, axis in enumerate(eqn.params["permutation"]) if axis in operands[0].distinct)


def _reshape(eqn: core.JaxprEqn, operands: Sequence[Array]) -> frozenset[int]:
    """Return the new axes of each old axis that is kept or split."""
    if eqn.params["dimensions"] is not None:
        return frozenset()
    old_shape, new_shape = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    groups = reshape_groups(old_shape, new_shape)
    proper = [(new, [i for i in range(old.start, old.stop) if old_shape[i] > 1]) for old, new in groups]
    return frozenset(
        i
        for new, old in proper
        if len(old) == 1 and old[0] in operands[0].distinct
        for i in range(new.start, new.stop)
        if new_shape[i] > 1
    )


def _without(key: str) -> Where:
    """Return the rule of primitives that drop the axes named by a parameter."""

    def kept(eqn: core.JaxprEqn, operands: Sequence[Array]) -> frozenset[int]:
        axes = other_axes(len(operands[0].axes), eqn.params[key])
        return frozenset(i for i, axis in enumerate(axes) if axis in operands[0].distinct)

    return kept


ANALYTIC = {
    *("add", "add_any", "convert_element_type", "copy", "cos", "cosh", "div", "erf", "exp", "exp2", "expm1"),
    *("integer_pow", "logistic", "mul", "neg", "rsqrt", "sin", "sinh", "sqrt", "square"),
    *("stop_gradient", "sub", "tan", "tanh"),
}
"""Elementwise primitives that map different numbers to equal ones only by chance."""

AXES: dict[str, Where] = {
    "broadcast_in_dim": _broadcast,
    "dot_general": _dot,
    "reduce_sum": _without("axes"),
    "reshape": _reshape,
    "slice": lambda eqn, operands: operands[0].distinct,
    "squeeze": _without("dimensions"),
    "transpose": _transpose,
}
"""Functions that find the distinct axes of the results of other primitives."""
