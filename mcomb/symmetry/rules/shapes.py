"""Rules of operations that only move entries: reshapes, slices and concatenations."""

import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import SupportsIndex

from jax.extend import core

from mcomb.symmetry.arrays import Array, ArrayAxes, Reshape, shape_of
from mcomb.symmetry.axes import Axis, atoms, concatenation, split_product, split_segments
from mcomb.symmetry.constraints import Constraints, Labels
from mcomb.symmetry.reshapes import describe_reshape, reshape_groups, sliced_axis
from mcomb.symmetry.rules.common import elementwise, freeze_everything, other_axes


def bitcast(constraints: Constraints, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """Treat the operand elementwise unless the operation regroups the bytes of several entries."""
    rule = elementwise if shape_of(eqn.invars[0]) == shape_of(eqn.outvars[0]) else freeze_everything
    return rule(constraints, eqn, operand)


def broadcast(constraints: Constraints, eqn: core.JaxprEqn, operand: ArrayAxes, *sizes: ArrayAxes) -> list[ArrayAxes]:
    """Add axes along which all entries are equal."""
    return constraints.relate([(operand, eqn.params["broadcast_dimensions"])], [range(len(shape_of(eqn.outvars[0])))])


def transpose(constraints: Constraints, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """Return the same axes in another order."""
    return [tuple(operand[axis] for axis in eqn.params["permutation"])]


def squeeze(constraints: Constraints, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """Remove axes of size one."""
    return [tuple(operand[axis] for axis in other_axes(len(operand), eqn.params["dimensions"]))]


def reshape(constraints: Constraints, eqn: core.JaxprEqn, operand: ArrayAxes, *sizes: ArrayAxes) -> list[ArrayAxes]:
    """Join the axes of each group and split the product into new axes, after an optional transpose."""
    if 0 in shape_of(eqn.invars[0]):
        return freeze_everything(constraints, eqn, operand)
    return [_reshape(constraints, describe_reshape(eqn, operand))]


def _reshape(
    constraints: Constraints, reshape: Reshape, axis: int = 0, start: int = 0, size: int | None = None
) -> ArrayAxes:
    """Return the reshaped array or, if a size is given, its slice [start : start + size] along `axis`."""
    new_axes: list[Axis | None] = []
    groups: list[tuple[Axis | None, slice]] = []
    for old, new in reshape_groups(reshape.old_shape, reshape.new_shape):
        joined, sizes = constraints.join(reshape.source[old], reshape.old_shape[old]), list(reshape.new_shape[new])
        if size is not None and reshape.order[axis] == new.start:
            inner = math.prod(sizes[1:])
            lengths = [start * inner, size * inner, (sizes[0] - start - size) * inner]
            joined = cut_segments(constraints, joined, lengths)[1]
            sizes[0] = size
        new_axes += constraints.split(joined, sizes, split_product)
        groups.append((joined, new))
    result = tuple(None if i is None else new_axes[i] for i in reshape.order)
    old_labels = [("old", i) for i in range(len(reshape.source))]
    constraints.record([(reshape.source, old_labels), (result, range(len(result)))])
    for joined, new in groups:
        before = {*atoms(joined)} if joined is not None else set()
        inside = [i for i, place in enumerate(reshape.order) if place is not None and new.start <= place < new.stop]
        after = {atom for i in inside if (one := result[i]) is not None for atom in atoms(one) if atom.size > 1}
        if not before.issuperset(after):
            # The axis could not be split. Its new axes are frozen and unrelated, so nothing is batched over them.
            others = tuple(None if i in inside else one for i, one in enumerate(result))
            constraints.record([(others, range(len(others)))])
    return result


def slice_reshape(constraints: Constraints, eqn: core.JaxprEqn, operand: Array) -> list[Array] | None:
    """Return the reshaped slices of an array, such as query, key and value in one product (ViT, BLOOM)."""
    axis = sliced_axis(eqn)
    if operand.reshape is None or axis is None:
        return None
    if eqn.primitive.name == "slice":
        starts, sizes = [int(eqn.params["start_indices"][axis])], [shape_of(eqn.outvars[0])[axis]]
    else:
        sizes = [int(size) for size in eqn.params.get("sizes", [1] * len(eqn.outvars))]
        starts = [end - size for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)]
    slices = [_reshape(constraints, operand.reshape, axis, *bounds) for bounds in zip(starts, sizes, strict=True)]
    drop = eqn.primitive.name == "unstack"
    return [Array(axes[:axis] + axes[axis + drop :]) for axes in slices]


def iota(constraints: Constraints, eqn: core.JaxprEqn, *sizes: ArrayAxes) -> list[ArrayAxes]:
    """Freeze the counting axis, because its entries are all different."""
    shape, axis = shape_of(eqn.outvars[0]), eqn.params["dimension"]
    return [tuple(Axis(size, constraints.reason) if i == axis else None for i, size in enumerate(shape))]


def concatenate(constraints: Constraints, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """Make each operand's axis a segment whose entries may move inside it; treat all others elementwise."""
    dimension, rank = eqn.params["dimension"], len(operands[0])

    def labels(label: Hashable) -> Labels:
        return [label if axis == dimension else axis for axis in range(rank)]

    sizes = [shape_of(atom)[dimension] for atom in eqn.invars]
    pairs = zip(operands, sizes, strict=True)
    parts = [operand[dimension] or Axis(size) for operand, size in pairs if size]
    return constraints.relate(
        [(operand, labels(("part", i))) for i, operand in enumerate(operands)],
        [labels("all")],
        {"all": concatenation(parts) if parts else None},
    )


def split(constraints: Constraints, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """Split an axis into segments, so that no permutation moves an entry between segments."""
    axis, sizes = eqn.params["axis"], eqn.params["sizes"]
    return [take_part(constraints, operand, axis, part) for part in cut_segments(constraints, operand[axis], sizes)]


def stack(constraints: Constraints, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """Add a frozen axis whose entries are the operands."""
    new, rank = eqn.params["axis"], len(operands[0])
    labels: list[Hashable] = list(range(rank))
    axis = Axis(len(operands), constraints.reason)
    return constraints.relate(
        [(operand, labels) for operand in operands], [[*labels[:new], "new", *labels[new:]]], {"new": axis}
    )


def unstack(constraints: Constraints, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """Freeze an axis, and return its entries without it."""
    axis = eqn.params["axis"]
    constraints.freeze([operand[axis]])
    entries = replace_axis(constraints, operand, axis, [None] * len(eqn.outvars))
    return [entry[:axis] + entry[axis + 1 :] for entry in entries]


def tile(constraints: Constraints, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """Make each axis the product of its equal copies and itself."""
    pairs = zip(operand, shape_of(eqn.invars[0]), eqn.params["reps"], strict=True)
    result = tuple(constraints.join([None, axis], (count, size)) if count != 1 else axis for axis, size, count in pairs)
    constraints.record([(operand, [("old", i) for i in range(len(operand))]), (result, range(len(result)))])
    return [result]


def slice_(constraints: Constraints, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """Cut contiguous slices out of their axes as segments.

    A slice of every third entry takes one entry from each block of three. The blocks may be permuted, but the entries
    inside them may not. All other strided slices freeze their axes.
    """
    p, shape = eqn.params, shape_of(eqn.invars[0])
    strides = p["strides"] or (1,) * len(shape)
    for axis, (size, start, stop, stride) in enumerate(
        zip(shape, p["start_indices"], p["limit_indices"], strides, strict=True)
    ):
        if stop - start == size and stride == 1:
            continue
        if stride == 1:
            part = cut_segments(constraints, operand[axis], [start, stop - start, size - stop])[1]
            operand = take_part(constraints, operand, axis, part)
            continue
        if size % stride == 0 and start < stride and len(range(start, stop, stride)) == size // stride:
            part, inside = constraints.split(operand[axis], (size // stride, stride), split_product)
            constraints.freeze([inside])
        else:
            constraints.freeze([operand[axis]])
            part = None if operand[axis] is None else Axis(len(range(start, stop, stride)), constraints.reason)
        (operand,) = replace_axis(constraints, operand, axis, [part])
    return [operand]


def pad(constraints: Constraints, eqn: core.JaxprEqn, operand: ArrayAxes, filler: ArrayAxes) -> list[ArrayAxes]:
    """Add the padding before and after an axis as separate segments."""
    for axis, (low, high, between) in enumerate(eqn.params["padding_config"]):
        size = shape_of(eqn.invars[0])[axis]
        if between or low < 0 or high < 0:
            constraints.freeze([operand[axis]])
            padded = Axis(shape_of(eqn.outvars[0])[axis], constraints.reason)
        elif low or high:
            segments = [Axis(int(low)), operand[axis] or Axis(size), Axis(int(high))]
            padded = concatenation([segment for segment in segments if segment.size])
        else:
            continue
        (operand,) = replace_axis(constraints, operand, axis, [padded])
    return [operand]


def cut_segments(constraints: Constraints, axis: Axis | None, sizes: Iterable[SupportsIndex]) -> ArrayAxes:
    """Return the segments of an axis, some of which may be empty."""
    lengths = [int(size) for size in sizes]
    parts = iter(constraints.split(axis, [length for length in lengths if length], split_segments))
    return tuple(next(parts) if length else None for length in lengths)


def take_part(constraints: Constraints, operand: ArrayAxes, axis: int, part: Axis | None) -> ArrayAxes:
    """Return the array with one axis cut down to a part, without recording the unused rest."""
    taken = (*operand[:axis], part, *operand[axis + 1 :])
    constraints.record([(taken, range(len(taken)))])
    return taken


def replace_axis(
    constraints: Constraints, operand: ArrayAxes, replaced: int, new_axes: Sequence[Axis | None]
) -> list[ArrayAxes]:
    """Return a copy of the array for each new axis, with one axis replaced by it."""

    def labels(label: Hashable) -> Labels:
        return [label if axis == replaced else axis for axis in range(len(operand))]

    new = {("new", i): axis for i, axis in enumerate(new_axes)}
    return constraints.relate([(operand, labels("old"))], [labels(label) for label in new], new)
