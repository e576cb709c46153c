"""Rules of what only moves entries: reshapes, slices, concatenations."""

import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import SupportsIndex

from jax.extend import core

from mcomb.symmetry.arrays import Array, ArrayAxes, Reshape, shape_of
from mcomb.symmetry.axes import Axis, atoms, concatenation, split_product, split_segments
from mcomb.symmetry.interpreter import Interpreter, Labels
from mcomb.symmetry.reshapes import describe_reshape, reshape_groups, sliced_axis
from mcomb.symmetry.rules.common import elementwise, freeze_everything, other_axes


def bitcast(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """Elementwise, unless it regroups the bytes of several entries."""
    rule = elementwise if shape_of(eqn.invars[0]) == shape_of(eqn.outvars[0]) else freeze_everything
    return rule(interp, eqn, operand)


def broadcast(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes, *sizes: ArrayAxes) -> list[ArrayAxes]:
    """All entries along a new axis are equal."""
    return interp.relate([(operand, eqn.params["broadcast_dimensions"])], [range(len(shape_of(eqn.outvars[0])))])


def transpose(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """The same axes, in another order."""
    return [tuple(operand[axis] for axis in eqn.params["permutation"])]


def squeeze(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """The same axes, without some that have one entry: these have no order."""
    return [tuple(operand[axis] for axis in other_axes(len(operand), eqn.params["dimensions"]))]


def reshape(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes, *sizes: ArrayAxes) -> list[ArrayAxes]:
    """Joins the axes of each group and splits the product into new axes, perhaps after a transpose."""
    if 0 in shape_of(eqn.invars[0]):
        return freeze_everything(interp, eqn, operand)
    return [_reshape(interp, describe_reshape(eqn, operand))]


def _reshape(
    interp: Interpreter, reshape: Reshape, axis: int = 0, start: int = 0, size: int | None = None
) -> ArrayAxes:
    """The reshaped array or, if a size is given, its slice [start : start + size] along `axis`."""
    new_axes: list[Axis | None] = []
    groups: list[tuple[Axis | None, slice]] = []
    for old, new in reshape_groups(reshape.old_shape, reshape.new_shape):
        joined, sizes = interp.join(reshape.source[old], reshape.old_shape[old]), list(reshape.new_shape[new])
        if size is not None and reshape.order[axis] == new.start:
            inner = math.prod(sizes[1:])
            lengths = [start * inner, size * inner, (sizes[0] - start - size) * inner]
            joined = cut_segments(interp, joined, lengths)[1]
            sizes[0] = size
        new_axes += interp.split(joined, sizes, split_product)
        groups.append((joined, new))
    result = tuple(new_axes[i] for i in reshape.order)
    old_labels = [("old", i) for i in range(len(reshape.source))]
    interp.record([(reshape.source, old_labels), (result, range(len(result)))])
    for joined, new in groups:
        before = {*atoms(joined)} if joined is not None else set()
        inside = [i for i, place in enumerate(reshape.order) if new.start <= place < new.stop]
        after = {atom for i in inside if (one := result[i]) is not None for atom in atoms(one) if atom.size > 1}
        if not before.issuperset(after):
            # It could not be split. Its new axes, frozen like the old ones, are others: nothing is batched over them.
            others = tuple(None if i in inside else one for i, one in enumerate(result))
            interp.record([(others, range(len(others)))])
    return result


def slice_reshape(interp: Interpreter, eqn: core.JaxprEqn, operand: Array) -> list[Array] | None:
    """Return the reshaped slices of an array, as query, key and value in one product are (ViT, BLOOM)."""
    axis = sliced_axis(eqn)
    if operand.reshape is None or axis is None:
        return None
    if eqn.primitive.name == "slice":
        starts, sizes = [int(eqn.params["start_indices"][axis])], [shape_of(eqn.outvars[0])[axis]]
    else:
        sizes = [int(size) for size in eqn.params.get("sizes", [1] * len(eqn.outvars))]
        starts = [end - size for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)]
    slices = [_reshape(interp, operand.reshape, axis, *bounds) for bounds in zip(starts, sizes, strict=True)]
    drop = eqn.primitive.name == "unstack"
    return [Array(axes[:axis] + axes[axis + drop :]) for axes in slices]


def iota(interp: Interpreter, eqn: core.JaxprEqn, *sizes: ArrayAxes) -> list[ArrayAxes]:
    """Freezes the axis that it counts along: no two entries are equal."""
    shape, axis = shape_of(eqn.outvars[0]), eqn.params["dimension"]
    return [tuple(Axis(size, interp.reason) if i == axis else None for i, size in enumerate(shape))]


def concatenate(interp: Interpreter, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """Each operand's axis is a segment, inside of which its entries may move; elementwise over all others."""
    dimension, rank = eqn.params["dimension"], len(operands[0])

    def labels(label: Hashable) -> Labels:
        return [label if axis == dimension else axis for axis in range(rank)]

    sizes = [shape_of(atom)[dimension] for atom in eqn.invars]
    pairs = zip(operands, sizes, strict=True)
    parts = [operand[dimension] or Axis(size) for operand, size in pairs if size]
    return interp.relate(
        [(operand, labels(("part", i))) for i, operand in enumerate(operands)],
        [labels("all")],
        {"all": concatenation(parts) if parts else None},
    )


def split(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """The segments of an axis: none of its permutations may move an entry from one to another."""
    axis, sizes = eqn.params["axis"], eqn.params["sizes"]
    return [take_part(interp, operand, axis, part) for part in cut_segments(interp, operand[axis], sizes)]


def stack(interp: Interpreter, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """A new axis along which the operands are entries, none of which can move."""
    new, rank = eqn.params["axis"], len(operands[0])
    labels: list[Hashable] = list(range(rank))
    axis = Axis(len(operands), interp.reason)
    return interp.relate(
        [(operand, labels) for operand in operands], [[*labels[:new], "new", *labels[new:]]], {"new": axis}
    )


def unstack(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """The entries along one axis, which is frozen, each without that axis."""
    axis = eqn.params["axis"]
    interp.freeze([operand[axis]])
    entries = replace_axis(interp, operand, axis, [None] * len(eqn.outvars))
    return [entry[:axis] + entry[axis + 1 :] for entry in entries]


def tile(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """Each axis becomes the product of its copies, which are all equal, with itself."""
    pairs = zip(operand, shape_of(eqn.invars[0]), eqn.params["reps"], strict=True)
    result = tuple(interp.join([None, axis], (count, size)) if count != 1 else axis for axis, size, count in pairs)
    interp.record([(operand, [("old", i) for i in range(len(operand))]), (result, range(len(result)))])
    return [result]


def slice_(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """A slice without gaps is a segment of its axis.

    Every third entry of an axis is an entry of each block of three: the blocks may be in any order, what is inside
    them may not. Other slices with gaps are frozen.
    """
    p, shape = eqn.params, shape_of(eqn.invars[0])
    strides = p["strides"] or (1,) * len(shape)
    for axis, (size, start, stop, stride) in enumerate(
        zip(shape, p["start_indices"], p["limit_indices"], strides, strict=True)
    ):
        if stop - start == size and stride == 1:
            continue
        if stride == 1:
            part = cut_segments(interp, operand[axis], [start, stop - start, size - stop])[1]
            operand = take_part(interp, operand, axis, part)
            continue
        if size % stride == 0 and start < stride and len(range(start, stop, stride)) == size // stride:
            part, inside = interp.split(operand[axis], (size // stride, stride), split_product)
            interp.freeze([inside])
        else:
            interp.freeze([operand[axis]])
            part = None if operand[axis] is None else Axis(len(range(start, stop, stride)), interp.reason)
        (operand,) = replace_axis(interp, operand, axis, [part])
    return [operand]


def pad(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes, filler: ArrayAxes) -> list[ArrayAxes]:
    """The padding before and after an axis are segments of their own."""
    for axis, (low, high, between) in enumerate(eqn.params["padding_config"]):
        size = shape_of(eqn.invars[0])[axis]
        if between or low < 0 or high < 0:
            interp.freeze([operand[axis]])
            padded = Axis(shape_of(eqn.outvars[0])[axis], interp.reason)
        elif low or high:
            segments = [Axis(int(low)), operand[axis] or Axis(size), Axis(int(high))]
            padded = concatenation([segment for segment in segments if segment.size])
        else:
            continue
        (operand,) = replace_axis(interp, operand, axis, [padded])
    return [operand]


def cut_segments(interp: Interpreter, axis: Axis | None, sizes: Iterable[SupportsIndex]) -> ArrayAxes:
    """The segments of an axis, of which some may be empty."""
    lengths = [int(size) for size in sizes]
    parts = iter(interp.split(axis, [length for length in lengths if length], split_segments))
    return tuple(next(parts) if length else None for length in lengths)


def take_part(interp: Interpreter, operand: ArrayAxes, axis: int, part: Axis | None) -> ArrayAxes:
    """The array with one axis cut down to a part of it. What is not taken has no use here, and is not recorded."""
    taken = (*operand[:axis], part, *operand[axis + 1 :])
    interp.record([(taken, range(len(taken)))])
    return taken


def replace_axis(
    interp: Interpreter, operand: ArrayAxes, replaced: int, new_axes: Sequence[Axis | None]
) -> list[ArrayAxes]:
    """For each of the new axes, the array with one axis replaced by it."""

    def labels(label: Hashable) -> Labels:
        return [label if axis == replaced else axis for axis in range(len(operand))]

    new = {("new", i): axis for i, axis in enumerate(new_axes)}
    return interp.relate([(operand, labels("old"))], [labels(label) for label in new], new)
