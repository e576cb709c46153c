"""Facts that the interpreter tracks about an array: its axes, and further facts that some rules need."""

from dataclasses import dataclass, field

import numpy as np
from jax.extend import core

from mcomb.symmetry.axes import Axis

ArrayAxes = tuple[Axis | None, ...]
"""The axes of an array, with None for an axis along which all entries are equal."""


@dataclass(frozen=True, eq=False)
class Positions:
    """Positions along an axis, as `argmax` and `top_k` return them.

    The axis stays free while a program uses the positions only for lookups, writes, sorting, or comparison with all
    positions (`one_hot`). Any other use freezes it.
    """

    along: Axis
    reason: str  # the operation that produced them
    shifted: bool = False  # whether the length of the axis was added, as for negative indices
    once: bool = False  # whether this is a vector with each position exactly once, as from `argsort`
    source: object = field(default_factory=object)  # shared by arrays of the same positions in another shape


@dataclass(frozen=True, eq=False)
class Reshape:
    """A reshape, perhaps transposed since, that is only read in slices: each slice is the reshape of a slice.

        qkv = (x @ w).reshape(n, 3, d)
        q, v = qkv[:, 0], qkv[:, 2]

    Reshaped as a whole, `qkv` would have one order of its d units. However, `q` is the reshape of the first d columns
    of `x @ w`, and `v` that of the last d columns. Each may therefore have its own order.
    """

    source: ArrayAxes
    old_shape: tuple[int, ...]
    new_shape: tuple[int, ...]
    order: tuple[int | None, ...]  # order of the new axes after transposes; None for axes of size one added since


@dataclass(frozen=True, eq=False)
class Array:
    """The axes of an array and the known facts about it."""

    axes: ArrayAxes
    distinct: frozenset[int] = frozenset()  # axes without equal entries: see `rules.distinct`
    value: np.ndarray | None = None  # the entries, if they depend on neither parameters nor inputs
    positions: Positions | None = None  # if the entries are positions along an axis
    counts: object = None  # the source of the positions, if the entries count their occurrences
    columns: "tuple[Array, ...]" = ()  # if the last axis holds indices into several axes, as in v[i, j]
    reshape: Reshape | None = None  # if the array is only read in slices


def shape_of(atom: core.Var | core.Literal) -> tuple[int, ...]:
    """Return the shape of a variable or literal of a jaxpr."""
    return atom.aval.shape  # type: ignore[attr-defined]
