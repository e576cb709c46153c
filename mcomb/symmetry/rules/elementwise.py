"""Rules of elementwise operations, and helpers of all rules."""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, SupportsIndex

from jax.extend import core

from mcomb.symmetry.facts import ArrayFacts, Relation, shape_of

Rule = Callable[..., Relation | None]
"""A pure function of an equation and the facts about its operands that returns the relation of its arrays, if any."""

BY_POSITION = "devices split the array by position"


def freeze_everything(eqn: core.JaxprEqn, operands: Sequence[ArrayFacts], why: str) -> Relation:
    """Freeze all axes, because an unknown primitive may depend on the order of all entries."""
    before = [[("operand", i, axis) for axis in range(len(operand.axes))] for i, operand in enumerate(operands)]
    after = [[("result", i, axis) for axis in range(len(shape_of(var)))] for i, var in enumerate(eqn.outvars)]
    labelled = [(operand.axes, labels) for operand, labels in zip(operands, before, strict=True)]
    return Relation(labelled, after, {label for labels in (*before, *after) for label in labels}, why)


def elementwise(eqn: core.JaxprEqn, *operands: ArrayFacts) -> Relation:
    """Unite the axes of all operands one by one; scalars have no axes."""
    rank = len(shape_of(eqn.outvars[0]))
    return Relation([(array.axes, range(len(array.axes))) for array in operands], [range(rank)] * len(eqn.outvars))


def one_by_one(eqn: core.JaxprEqn, *operands: ArrayFacts) -> Relation:
    """Return each operand itself, or combine its entries on several devices elementwise.

    `vmap` turns a named axis into a numbered one. Such an axis is dropped, because a sum, maximum or minimum reduces it
    and the order does not matter.
    """
    reduced = [axis for axis in eqn.params.get("axes") or () if isinstance(axis, int)]
    labels = [[(i, axis) for axis in range(len(array.axes))] for i, array in enumerate(operands)]
    kept = [[own[axis] for axis in other_axes(len(own), reduced)] for own in labels]
    return Relation([(array.axes, own) for array, own in zip(operands, labels, strict=True)], kept)


def positional(
    eqn: core.JaxprEqn, operands: Sequence[ArrayFacts], ordered: Iterable[int], order_blind: bool = False
) -> Relation:
    """Freeze the `ordered` axes, along which the order of entries matters; treat all others elementwise.

    An operation that is blind to the order of its operands freezes these axes only in its results.
    """
    rank, ordered = len(shape_of(eqn.outvars[0])), set(ordered)

    # An ordered axis has different labels in operand and result, so that no permutation is batched over it.
    def labels(*array: Hashable) -> list[Hashable]:
        return [(*array, axis) if axis in ordered else axis for axis in range(rank)]

    before = [labels("operand", 0 if order_blind else i) for i in range(len(operands))]
    arrays = [labels("result")] if order_blind else [labels("result"), *before]
    return Relation(
        [(operand.axes, own) for operand, own in zip(operands, before, strict=True)],
        [labels("result")] * len(eqn.outvars),
        {array[axis] for array in arrays for axis in ordered},
    )


def other_axes(rank: int, axes: Collection[SupportsIndex]) -> list[int]:
    """Return the axes of an array that are not among `axes`."""
    return [axis for axis in range(rank) if axis not in axes]


def resized_axes(a: Any, b: Any) -> list[int]:
    """Return the axes along which two arrays have different sizes."""
    return [axis for axis, (n, m) in enumerate(zip(shape_of(a), shape_of(b), strict=True)) if n != m]
