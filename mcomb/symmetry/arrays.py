"""What the interpreter knows of an array: its axes, and facts that some rules need."""

from dataclasses import dataclass, field

import numpy as np
from jax.extend import core

from mcomb.symmetry.axes import Axis

ArrayAxes = tuple[Axis | None, ...]
"""The axes of an array; None for one along which all entries are equal."""


@dataclass(frozen=True, eq=False)
class Positions:
    """Positions along an axis, as `argmax` and `top_k` return them.

    The axis stays free as long as a program only looks something up with the positions, writes to them, compares them
    with all positions (`one_hot`) or sorts by them. Anything else freezes it.
    """

    along: Axis
    reason: str  # the operation that made them
    shifted: bool = False  # by the length of the axis, as indexing does with negative indices
    once: bool = False  # whether this is a vector with each position just once, as `argsort` returns it
    source: object = field(default_factory=object)  # the same for arrays of the same positions in another shape


@dataclass(frozen=True, eq=False)
class Reshape:
    """A reshape, perhaps transposed since, that is only used in slices: each slice is the reshape of a slice.

        qkv = (x @ w).reshape(n, 3, d)
        q, v = qkv[:, 0], qkv[:, 2]

    Reshaped as a whole, `qkv` would have one order of its d units. But `q` is the reshape of the first d columns of
    `x @ w` and `v` of the last, and each may have an order of its own.
    """

    source: ArrayAxes
    old_shape: tuple[int, ...]
    new_shape: tuple[int, ...]
    order: tuple[int | None, ...]  # of the new axes, after the transposes; None for axes of size one added since


@dataclass(frozen=True, eq=False)
class Array:
    """The axes of an array and the facts that are known of it."""

    axes: ArrayAxes
    distinct: frozenset[int] = frozenset()  # axes along which no two entries are equal: see `rules.distinct`
    value: np.ndarray | None = None  # the entries, if they depend on neither parameters nor inputs
    positions: Positions | None = None  # if the entries are positions along an axis
    counts: object = None  # the source of the positions, if the entries say how often each occurs
    columns: "tuple[Array, ...]" = ()  # if the last axis has an index for each of several axes, as in v[i, j]
    reshape: Reshape | None = None  # if the array is only read in slices


def shape_of(atom: core.Var | core.Literal) -> tuple[int, ...]:
    """Return the shape of a variable or literal of a jaxpr."""
    return atom.aval.shape  # type: ignore[attr-defined]
