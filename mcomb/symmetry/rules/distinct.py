"""Prove along which axes an array has no equal entries, so that `argmax` and `top_k` do not depend on their order.

`argmax` and `top_k` return the first of several equal entries. Entries along an axis are distinct if the same analytic
formula computes each entry from separate weights. They can then be equal only by chance. For example, the scores
`x @ router` are distinct, because each has its own column of the router. The sums of a matrix and its transpose are
not, because they share weights. A choice along an axis freezes it unless its entries are proven to be distinct.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from mcomb.symmetry.axes import atoms
from mcomb.symmetry.facts import ArrayAxes, ArrayFacts, Compound, Relation

ANALYTIC = {
    *("add", "add_any", "convert_element_type", "copy", "cos", "cosh", "div", "erf", "exp", "exp2", "expm1"),
    *("integer_pow", "logistic", "mul", "neg", "rsqrt", "sin", "sinh", "sqrt", "square"),
    *("stop_gradient", "sub", "tan", "tanh"),
    *("broadcast_in_dim", "dot_general", "reduce_sum", "reshape", "slice", "squeeze", "transpose"),
}
"""Primitives that map different numbers to equal ones only by chance."""


def distinct_axes(
    eqn: core.JaxprEqn, operands: Sequence[ArrayFacts], relation: Relation, results: Sequence[ArrayAxes]
) -> list[frozenset[int]]:
    """Return, for each result, the axes along which its entries are proven to be distinct.

    Every operand that varies along such an axis has distinct entries along it.
    """
    nowhere: list[frozenset[int]] = [frozenset() for _ in results]
    name, arrays = eqn.primitive.name, [axes for axes, _ in relation.operands]
    if name not in ANALYTIC or not any(array.distinct for array in operands):
        return nowhere
    if not all(map(is_float, (*eqn.invars, *eqn.outvars))) or any(map(_has_an_axis_twice, (*arrays, *results))):
        return nowhere
    if name in ("mul", "dot_general") and any(array.value is not None and not array.value.all() for array in operands):
        return nowhere  # products with zeros are equal to each other
    proven: dict[Hashable, bool] = {}
    for array, (axes, labels) in zip(operands, relation.operands, strict=True):
        for i, (axis, label) in enumerate(zip(axes, labels, strict=True)):
            if axis is not None:
                for part in (part for part, _ in label.parts) if isinstance(label, Compound) else (label,):
                    proven[part] = proven.get(part, True) and i in array.distinct
    return [frozenset(i for i, label in enumerate(labels) if proven.get(label)) for labels in relation.results]


def is_float(atom: Any) -> bool:
    """Return whether an array has real floating-point entries of more than eight bits."""
    dtype = atom.aval.dtype
    return bool(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1)


def _has_an_axis_twice(axes: ArrayAxes) -> bool:
    """Return whether two axes of an array move together, as the rows and columns of a symmetric matrix do."""
    found = [atom for axis in axes if axis is not None for atom in {*atoms(axis)}]
    return len(found) != len({*found})
