"""Rules of operations that only move entries: reshapes, slices and concatenations."""

import itertools
from collections.abc import Hashable, Sequence

import numpy as np
from jax.extend import core

from mcomb.symmetry.facts import ArrayFacts, Relation, blocks, segments, shape_of
from mcomb.symmetry.rules.elementwise import elementwise, other_axes


def bitcast(eqn: core.JaxprEqn, operand: ArrayFacts) -> Relation | None:
    """Treat the operand elementwise unless the operation regroups the bytes of several entries (dropout)."""
    return elementwise(eqn, operand) if shape_of(eqn.invars[0]) == shape_of(eqn.outvars[0]) else None


def broadcast(eqn: core.JaxprEqn, operand: ArrayFacts, *sizes: ArrayFacts) -> Relation:
    """Add axes along which all entries are equal."""
    return Relation([(operand.axes, eqn.params["broadcast_dimensions"])], [range(len(shape_of(eqn.outvars[0])))])


def transpose(eqn: core.JaxprEqn, operand: ArrayFacts) -> Relation:
    """Return the same axes in another order."""
    return Relation([(operand.axes, range(len(operand.axes)))], [eqn.params["permutation"]])


def squeeze(eqn: core.JaxprEqn, operand: ArrayFacts) -> Relation:
    """Remove axes of size one."""
    rank = len(operand.axes)
    return Relation([(operand.axes, range(rank))], [other_axes(rank, eqn.params["dimensions"])])


def reshape(eqn: core.JaxprEqn, operand: ArrayFacts, *sizes: ArrayFacts) -> Relation | None:
    """Split and join axes.

    An axis is labelled by its factors. Each factor is the stretch between two multiples, counted from the first axis:

        (6, 4) to (2, 12): 2, 3 and 4, which end at 2, 6 and 24

    Axes freeze if they have no common factors, such as those of (2, 3) and (3, 2).
    """
    axes, old, new = operand.axes, shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if eqn.params["dimensions"] is not None or 0 in old:
        return None
    ends = [list(itertools.accumulate(shape, int.__mul__, initial=1)) for shape in (old, new)]
    cuts, common = sorted({*ends[0], *ends[1]}), sorted({*ends[0]} & {*ends[1]})
    group = dict(zip(cuts, np.searchsorted(common, cuts), strict=True))  # between the same common ends
    odd = {group[stop] for start, stop in itertools.pairwise(cuts) if stop % start}
    varying = {group[stop] for stop, axis in zip(ends[0][1:], axes, strict=True) if axis is not None}

    def labels(side: int) -> list[Hashable]:
        found: list[Hashable] = []
        for i, (start, stop) in enumerate(itertools.pairwise(ends[side])):
            inside = [cut for cut in cuts if start <= cut <= stop]
            factors = [(high, high // low) for low, high in itertools.pairwise(inside)]
            found.append((side, i) if group[stop] in odd and start < stop else blocks(*factors))
        return found

    before, after = labels(0), labels(1)
    unclear = [(side, i) for side in (0, 1) for i, stop in enumerate(ends[side][1:]) if group[stop] in odd & varying]
    return Relation([(axes, before)], [after], unclear, UNSPLIT if unclear else "")


UNSPLIT = "its parts end where those of a product or a concatenation do not"


def iota(eqn: core.JaxprEqn, *sizes: ArrayFacts) -> Relation:
    """Freeze the counting axis, because its entries are all different."""
    return Relation([], [range(len(shape_of(eqn.outvars[0])))], [eqn.params["dimension"]])


def concatenate(eqn: core.JaxprEqn, *operands: ArrayFacts) -> Relation:
    """Make each operand's axis a segment whose entries may move inside it; treat all others elementwise."""
    dimension, rank = eqn.params["dimension"], len(operands[0].axes)
    whole = segments(*((("part", i), shape_of(atom)[dimension]) for i, atom in enumerate(eqn.invars)))

    def labels(label: Hashable) -> Sequence[Hashable]:
        return [label if axis == dimension else axis for axis in range(rank)]

    return Relation([(operand.axes, labels(("part", i))) for i, operand in enumerate(operands)], [labels(whole)])


def stack(eqn: core.JaxprEqn, *operands: ArrayFacts) -> Relation:
    """Add a frozen axis whose entries are the operands."""
    new, labels = eqn.params["axis"], list(range(len(operands[0].axes)))
    return Relation([(operand.axes, labels) for operand in operands], [[*labels[:new], "new", *labels[new:]]], ["new"])


def unstack(eqn: core.JaxprEqn, operand: ArrayFacts) -> Relation:
    """Freeze an axis, and return its entries without it."""
    axis, rank = eqn.params["axis"], len(operand.axes)
    return Relation([(operand.axes, range(rank))], [other_axes(rank, [axis])] * len(eqn.outvars), [axis])


def tile(eqn: core.JaxprEqn, operand: ArrayFacts) -> Relation:
    """Make each axis the product of its equal copies and itself."""
    sizes = enumerate(zip(eqn.params["reps"], shape_of(eqn.invars[0]), strict=True))
    result = [blocks((("copy", axis), count), (axis, size)) for axis, (count, size) in sizes]
    return Relation([(operand.axes, range(len(result)))], [result])


def split(eqn: core.JaxprEqn, operand: ArrayFacts) -> Relation:
    """Split an axis into segments, so that no permutation moves an entry between segments."""
    split, sizes = eqn.params["axis"], eqn.params["sizes"]

    def labels(label: Hashable) -> Sequence[Hashable]:
        return [label if axis == split else axis for axis in range(len(operand.axes))]

    parts = [(("part", i), int(size)) for i, size in enumerate(sizes)]
    return Relation([(operand.axes, labels(segments(*parts)))], [labels(part) for part, _ in parts])


def slice_(eqn: core.JaxprEqn, operand: ArrayFacts) -> Relation:
    """Cut contiguous slices out of their axes as segments.

    A slice of every third entry takes one entry from each block of three. The blocks may be permuted, but the entries
    inside them may not. All other strided slices freeze their axes.
    """
    p, shape = eqn.params, shape_of(eqn.invars[0])
    before: list[Hashable] = list(range(len(shape)))
    after, frozen = list(before), list[Hashable]()
    bounds = zip(shape, p["start_indices"], p["limit_indices"], p["strides"] or (1,) * len(shape), strict=True)
    for axis, (size, start, stop, stride) in enumerate(bounds):
        count = len(range(start, stop, stride))
        if count == size:
            continue
        part = after[axis] = ("part", axis)
        if stride == 1:
            before[axis] = segments((("before", axis), start), (part, count), (("after", axis), size - stop))
        elif size % stride == 0 and start < stride and count == size // stride:
            before[axis] = blocks((part, count), (("inside", axis), stride))
            frozen.append(("inside", axis))
        else:
            frozen += [axis, part]
    return Relation([(operand.axes, before)], [after], frozen)


def pad(eqn: core.JaxprEqn, operand: ArrayFacts, filler: ArrayFacts) -> Relation:
    """Add the padding before and after an axis as separate segments."""
    before: list[Hashable] = list(range(len(operand.axes)))
    after, frozen = list(before), list[Hashable]()
    for axis, (low, high, between) in enumerate(eqn.params["padding_config"]):
        if between or low < 0 or high < 0:
            after[axis] = ("padded", axis)
            frozen += [axis, after[axis]]
        else:
            size = shape_of(eqn.invars[0])[axis]
            after[axis] = segments((("before", axis), int(low)), (axis, size), (("after", axis), int(high)))
    return Relation([(operand.axes, before)], [after], frozen)
