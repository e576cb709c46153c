"""Describe arrays by facts, and operations by relations between arrays.

A rule is a pure function of an equation and the facts about its operands. It returns a `Relation`, which the
interpreter imposes.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

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
    reason: str = ""  # the operation that produced them, which the interpreter fills in
    shifted: bool = False  # whether the length of the axis was added, as for negative indices
    once: bool = False  # whether this is a vector with each position exactly once, as from `argsort`
    source: object = field(default_factory=object)  # shared by arrays of the same positions in another shape


@dataclass(frozen=True, eq=False)
class ArrayFacts:
    """The axes of an array and the known facts about it."""

    axes: ArrayAxes = ()
    distinct: frozenset[int] = frozenset()  # axes without equal entries: see `rules.distinct`
    value: np.ndarray | None = None  # the entries, if they depend on neither parameters nor inputs
    positions: Positions | None = None  # if the entries are positions along an axis
    counts: object = None  # the source of the positions, if the entries count their occurrences
    columns: "tuple[ArrayFacts, ...]" = ()  # if the last axis holds indices into several axes, as in v[i, j]
    reshape: "Relation | None" = None  # for a reshape that is only read in slices: see `rules.slices`


@dataclass(frozen=True)
class Compound:
    """The label of an axis that consists of others: their row-major product, or their concatenation."""

    kind: Literal["blocks", "segments"]
    parts: tuple[tuple[Hashable, int], ...]  # labels and sizes


def blocks(*parts: tuple[Hashable, int]) -> Hashable:
    """Return the label of the row-major product of axes, given their labels and sizes."""
    kept = tuple(part for part in parts if part[1] != 1)
    return kept[0][0] if len(kept) == 1 else Compound("blocks", kept)


def segments(*parts: tuple[Hashable, int]) -> Hashable:
    """Return the label of a concatenation of axes, given their labels and sizes."""
    kept = tuple(part for part in parts if part[1])
    return kept[0][0] if len(kept) == 1 else Compound("segments", kept)


@dataclass(frozen=True, eq=False)
class Grouping:
    """Rows sorted by group, where each row's group is a position along an axis of groups.

        order = jnp.argsort(expert)       # sort rows, each of which has an expert
        y = experts_in_turn(x[order])     # the rows of the first expert come first
        y[jnp.argsort(order)]             # restore the order

    A permutation of the groups also permutes these rows, in an order that depends on the data. This is safe if the
    order of the rows does not matter, and all arrays with this axis of rows come from this sort. See
    `Constraints.break_up_groupings`.
    """

    rows: Axis
    groups: Axis
    source: object  # source of the positions that the rows were sorted by
    reason: str = ""  # the interpreter fills it in


@dataclass(frozen=True, eq=False)
class Relation:
    """An operation written like an einsum, with a label for each axis of its operands and results.

        Relation([(x, "ij"), (y, "jk")], ["ik"])  # a matrix product: the last axis of x moves with the first of y

    Axes with the same label move together. A compound label splits the axis of an operand, and joins axes to one of a
    result. A label that no operand has denotes an axis of `new`, a frozen axis, or an axis along which all entries are
    equal. Operands used as positions are followed; all others are numbers, so positions in them freeze.
    """

    operands: Sequence[tuple[ArrayAxes, Sequence[Hashable]]]
    results: Sequence[Sequence[Hashable]]
    frozen: Collection[Hashable] = ()  # labels of axes whose order matters
    why: str = ""  # why it matters, if that is not the usual reason of the primitive
    new: Mapping[Hashable, Axis] = field(default_factory=dict)
    facts: Sequence[ArrayFacts] = ()  # further facts about the results, without their axes
    positions: Collection[int] = ()  # the operands used as positions
    sort: Grouping | None = None  # a sort of rows by group
    grouped: tuple[Axis, object, Axis] | None = None  # rows, counted positions and matrices: see `ragged_dot`


def shape_of(atom: core.Var | core.Literal) -> tuple[int, ...]:
    """Return the shape of a variable or literal of a jaxpr."""
    return atom.aval.shape  # type: ignore[attr-defined]
