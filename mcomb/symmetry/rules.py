"""For each primitive, a rule that gives the axes of its results.

Most primitives are elementwise, products or reductions. Their rules write them like an einsum, with a label for each
axis of each operand and result, and `Interpreter.relate` unites the axes with the same label.
"""

import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, SupportsIndex, TypeVar

import numpy as np
from jax.extend import core

from mcomb.symmetry.axes import Axis, concatenation, split_product, split_segments, unite
from mcomb.symmetry.interpreter import (
    ArrayAxes,
    DeferredReshape,
    Interpreter,
    Known,
    Labels,
    Positions,
    Rule,
    defer_reshape,
    known_value,
    positions,
    reshape_groups,
    sliced_axis,
)

T = TypeVar("T")


def freeze_everything(interp: Interpreter, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """The rule of an unknown primitive, which may depend on the order of everything."""
    if why := FROZEN_ON_PURPOSE.get(eqn.primitive.name):
        interp.reason = interp.reason.replace(eqn.primitive.name, f"{eqn.primitive.name} ({why})", 1)
    for operand in operands:
        interp.freeze(operand)
    interp.record((operand, [(i, axis) for axis in range(len(operand))]) for i, operand in enumerate(operands))
    return [interp.new_axes(_shape(var), interp.reason) for var in eqn.outvars]


def elementwise(interp: Interpreter, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """One label for each axis; scalars have none."""
    rank = len(_shape(eqn.outvars[0]))
    return interp.relate([(axes, range(len(axes))) for axes in operands], [range(rank)] * len(eqn.outvars))


def bitcast(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """Elementwise, unless it regroups the bytes of several entries."""
    rule = elementwise if _shape(eqn.invars[0]) == _shape(eqn.outvars[0]) else freeze_everything
    return rule(interp, eqn, operand)


def pass_through(interp: Interpreter, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """The operands themselves."""
    return list(operands)


def reduction(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """Drops the reduced axes, which stay free: the order of the entries does not matter."""
    return interp.relate([(operand, range(len(operand)))], [_other_axes(len(operand), eqn.params["axes"])])


def arg_reduction(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """Positions along the reduced axis.

    Of entries that are exactly equal the first is taken, whichever that is: we count on there being none.
    """
    (axes,), (reduced,) = reduction(interp, eqn, operand), eqn.params["axes"]
    along = operand[reduced]
    return [axes if along is None else positions(axes, along, interp.reason)]


def positional(
    interp: Interpreter,
    eqn: core.JaxprEqn,
    operands: Sequence[ArrayAxes],
    ordered: Iterable[int],
    order_blind: bool = False,
) -> list[ArrayAxes]:
    """Freezes the ordered axes, along which the order of entries matters; elementwise over all others.

    An operation that is blind to the order of its operands only freezes these axes of its results.
    """
    shape, ordered = _shape(eqn.outvars[0]), set(ordered)
    for operand in [] if order_blind else operands:
        interp.freeze(operand[axis] for axis in ordered)

    # An ordered axis has other labels in operand and result: so no permutation is batched over it.
    def labels(*array: Hashable) -> Labels:
        return [(*array, axis) if axis in ordered else axis for axis in range(len(shape))]

    return interp.relate(
        [(operand, labels("operand", 0 if order_blind else i)) for i, operand in enumerate(operands)],
        [labels("result")] * len(eqn.outvars),
        {("result", axis): Axis(shape[axis], interp.reason) for axis in ordered},
    )


def cumulative(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    return positional(interp, eqn, [operand], [eqn.params["axis"]])


def sort(interp: Interpreter, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """Freezes the axis of the result, but that of operands only if more is sorted than the keys.

    The sorted keys are the same in whatever order they come (zeros of both signs count as the same, as they do here).
    Where their positions are sorted with them, the result is positions along their axis.
    """
    axis, keys = eqn.params["dimension"], eqn.params["num_keys"]
    *others, last = operands
    along = others[0][axis] if len(others) == keys == 1 else None
    if along is not None and isinstance(last, Known) and _counts(last.value, axis):
        values, ranked = positional(interp, eqn, others, [axis], order_blind=True)  # as `argsort` does
        return [values, positions(ranked, along, interp.reason)]
    return positional(interp, eqn, operands, [axis], order_blind=keys == len(operands))


def reverse(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    return positional(interp, eqn, [operand], eqn.params["dimensions"])


def top_k(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """The largest entries, and positions along their axis."""
    axis = eqn.params.get("axis", -1) % len(operand)
    values, ranked = positional(interp, eqn, [operand], [axis], order_blind=True)
    along = operand[axis]
    return [values, ranked if along is None else positions(ranked, along, interp.reason)]


def fft(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """Freezes the transformed axes, the last ones; elementwise over the others."""
    rank = len(operand)
    return positional(interp, eqn, [operand], range(rank - len(eqn.params["fft_lengths"]), rank))


def general_reduction(interp: Interpreter, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """Freezes the reduced axes, for the function that reduces them may depend on the order."""
    reduced, rank = eqn.params["dimensions"], len(operands[0])
    for operand in operands:
        interp.freeze(operand[axis] for axis in reduced if operand)
    labelled = [(operand, [("reduced", i, j) if j in reduced else j for j in range(rank)])
                for i, operand in enumerate(operands) if operand]  # fmt: skip
    return interp.relate(labelled, [_other_axes(rank, reduced)] * len(eqn.outvars))


def factorisation(interp: Interpreter, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """Freezes the rows and columns of matrices, which are the last two axes; elementwise over a batch of them."""
    batch = len(operands[0]) - 2
    for operand in operands:
        interp.freeze(operand[batch:])

    def labels(rank: int, *array: Hashable) -> Labels:
        return [*range(batch), *((*array, axis) for axis in range(rank - batch))]

    shapes = [_shape(var) for var in eqn.outvars]
    return interp.relate(
        [(operand, labels(len(operand), "operand", i)) for i, operand in enumerate(operands)],
        [labels(len(shape), "result", i) for i, shape in enumerate(shapes)],
        {
            ("result", i, axis): Axis(size, interp.reason)
            for i, shape in enumerate(shapes)
            for axis, size in enumerate(shape[batch:])
        },
    )


def triangular_solve(interp: Interpreter, eqn: core.JaxprEqn, matrix: ArrayAxes, known: ArrayAxes) -> list[ArrayAxes]:
    """Elementwise over the columns of the known side, or over its rows if it is on the left: each is solved alone."""
    batch = range(len(matrix) - 2)
    interp.freeze(matrix[-2:])
    ordered, free = (-2, -1) if eqn.params["left_side"] else (-1, -2)
    interp.freeze([known[ordered]])
    order = {ordered: "ordered", free: "free"}
    labels = [*batch, order[-2], order[-1]]
    return interp.relate([(matrix, [*batch, "row", "column"]), (known, labels)], [labels])


def linear_solve(interp: Interpreter, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """The results of the inner function that solves."""
    lengths = eqn.params["const_lengths"]
    _, consts, _, known = split_list(operands, lengths.matvec + lengths.vecmat, lengths.solve, lengths.transpose_solve)
    return interp.interpret(*_open(eqn.params["jaxprs"].solve), [*consts, *known])


def shard_map(interp: Interpreter, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """The results of the inner jaxpr, in which the axes that devices share out are frozen."""
    reason, jaxpr = interp.reason, eqn.params["jaxpr"]

    def convert(axes: ArrayAxes, spec: Iterable[Any], shape: Sequence[int]) -> ArrayAxes:
        """Replaces the axes that are shared out by frozen ones of the size that they have on the other side."""
        shared = [axis for axis, names in enumerate(spec) if names is not None and names != ()]
        interp.freeze(axes[axis] for axis in shared)
        return tuple(Axis(shape[i], reason) if i in shared else axis for i, axis in enumerate(axes))

    inner = zip(operands, eqn.params["in_specs"], jaxpr.invars, strict=True)
    results = interp.interpret(jaxpr, (), [convert(axes, spec, _shape(var)) for axes, spec, var in inner])
    outer = zip(results, eqn.params["out_specs"], eqn.outvars, strict=True)
    return [convert(axes, spec, _shape(var)) for axes, spec, var in outer]


def collective(interp: Interpreter, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """Elementwise: combines or exchanges what devices have at the same position."""
    if any(isinstance(axis, int) for axis in eqn.params.get("axes", ())):
        return freeze_everything(interp, eqn, *operands)
    return [tuple(operand) for operand in operands]  # what was known of them is not known any more


def ragged_dot(
    interp: Interpreter, eqn: core.JaxprEqn, rows: ArrayAxes, matrices: ArrayAxes, sizes: ArrayAxes
) -> list[ArrayAxes]:
    """A product of each group of rows with a matrix of its own; the order of rows and of groups matters."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, batch), (ragged,) = numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions
    groups = list(numbers.rhs_group_dimensions)
    if len(groups) != 1 or ragged in contracted[0] or any(batch):
        return freeze_everything(interp, eqn, rows, matrices, sizes)
    interp.freeze([rows[ragged], matrices[groups[0]], *sizes])
    shared = [{axis: ("contracted", i) for i, axis in enumerate(side)} for side in contracted]
    left = [shared[0].get(axis, ("left", axis)) for axis in range(len(rows))]
    right = [shared[1].get(axis, ("right", axis)) for axis in range(len(matrices))]
    kept = [label for label in left if label[0] == "left"]
    kept += [label for axis, label in enumerate(right) if label[0] == "right" and axis not in groups]
    return interp.relate([(rows, left), (matrices, right)], [kept])


def reduce_window(interp: Interpreter, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """Pooling: elementwise over the axes along which the window has one entry, without padding or stride.

    Where windows tile an axis, it is a product of windows, in any order, with what is inside them, also in any order.
    """
    p = eqn.params
    sizes = zip(p["window_dimensions"], p["window_strides"], p["base_dilation"], p["window_dilation"], strict=True)
    pooled = {axis: n for axis, (n, pad) in enumerate(zip(sizes, p["padding"], strict=True)) if {*n} != {1} or any(pad)}
    shape, arrays = _shape(eqn.invars[0]), [operand for operand in operands if operand]
    for axis, (window, stride, *dilation) in pooled.items():
        tiles = window == stride and dilation == [1, 1] and not any(p["padding"][axis]) and shape[axis] % window == 0
        if not tiles or eqn.primitive.name == "reduce_window" or len(arrays) > 1:
            return positional(interp, eqn, arrays, pooled)
    (operand,) = arrays
    for axis, (window, *_) in pooled.items():
        windows, _ = interp.split(operand[axis], (shape[axis] // window, window), split_product)
        (operand,) = _replace_axis(interp, operand, axis, [windows])
    return [operand]


def dynamic_slice(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes, *starts: ArrayAxes) -> list[ArrayAxes]:
    """A segment of its axis if it is known where it starts; else it is frozen."""
    resized = _resized_axes(eqn.invars[0], eqn.outvars[0])
    if not all(isinstance(starts[axis], Known) for axis in resized):
        return positional(interp, eqn, [operand], resized)
    for axis in resized:
        size, length = _shape(eqn.invars[0])[axis], _shape(eqn.outvars[0])[axis]
        start = min(max(0, int(known_value(starts[axis]))), size - length)
        part = _split_segments(interp, operand[axis], [start, length, size - start - length])[1]
        (operand,) = _replace_axis(interp, operand, axis, [part])
    return [operand]


def dynamic_update_slice(
    interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes, update: ArrayAxes, *starts: ArrayAxes
) -> list[ArrayAxes]:
    """Replaces a segment of an axis if it is known where it starts; else the axis is frozen."""
    shape, update_shape = (_shape(atom) for atom in eqn.invars[:2])
    resized = _resized_axes(*eqn.invars[:2])
    if not all(isinstance(starts[axis], Known) for axis in resized):
        return positional(interp, eqn, [operand, update], resized)
    bounds = {axis: shape[axis] - update_shape[axis] for axis in resized}
    first = {axis: min(max(0, int(known_value(starts[axis]))), last) for axis, last in bounds.items()}
    return _update_segments(
        interp, shape, operand, update, {axis: (n, update_shape[axis]) for axis, n in first.items()}
    )


def _update_segments(
    interp: Interpreter,
    shape: Sequence[int],
    operand: ArrayAxes,
    update: ArrayAxes,
    segments: dict[int, tuple[int, int]],
) -> list[ArrayAxes]:
    """An array, of which a segment of each of some axes (its start and size) is replaced or changed by an update."""
    updated: dict[Hashable, Axis | None] = {}
    for axis, (start, size) in segments.items():
        sizes = [start, size, shape[axis] - start - size]
        parts = [part or Axis(n) for part, n in zip(_split_segments(interp, operand[axis], sizes), sizes, strict=True)]
        if (new := update[axis]) is not None:
            unite(parts[1], new, interp.reason)
        updated["result", axis] = concatenation([part for part in parts if part.size])

    def labels(array: str) -> Labels:
        return [(array, axis) if axis in segments else axis for axis in range(len(shape))]

    return interp.relate([(operand, labels("operand")), (update, labels("update"))], [labels("result")], updated)


def broadcast(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes, *sizes: ArrayAxes) -> list[ArrayAxes]:
    """All entries along a new axis are equal."""
    return interp.relate([(operand, eqn.params["broadcast_dimensions"])], [range(len(_shape(eqn.outvars[0])))])


def transpose(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    return [tuple(operand[axis] for axis in eqn.params["permutation"])]


def squeeze(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    return [tuple(operand[axis] for axis in _other_axes(len(operand), eqn.params["dimensions"]))]


def reshape(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes, *sizes: ArrayAxes) -> list[ArrayAxes]:
    """Joins the axes of each group and splits the product into new axes, perhaps after a transpose."""
    if 0 in _shape(eqn.invars[0]):
        return freeze_everything(interp, eqn, operand)
    return [_reshape(interp, defer_reshape(eqn, operand))]


def _reshape(
    interp: Interpreter, reshape: DeferredReshape, axis: int = 0, start: int = 0, size: int | None = None
) -> ArrayAxes:
    """The reshaped array or, if a size is given, its slice [start : start + size] along `axis`."""
    new_axes: list[Axis | None] = []
    for old, new in reshape_groups(reshape.old_shape, reshape.new_shape):
        joined, sizes = interp.join(reshape.source[old], reshape.old_shape[old]), list(reshape.new_shape[new])
        if size is not None and reshape.order[axis] == new.start:
            inner = math.prod(sizes[1:])
            lengths = [start * inner, size * inner, (sizes[0] - start - size) * inner]
            joined = _split_segments(interp, joined, lengths)[1]
            sizes[0] = size
        new_axes += interp.split(joined, sizes, split_product)
    result = tuple(new_axes[i] for i in reshape.order)
    old_labels = [("old", i) for i in range(len(reshape.source))]
    interp.record([(reshape.source, old_labels), (result, range(len(result)))])
    return result


def iota(interp: Interpreter, eqn: core.JaxprEqn, *sizes: ArrayAxes) -> list[ArrayAxes]:
    shape, axis = _shape(eqn.outvars[0]), eqn.params["dimension"]
    return [tuple(Axis(size, interp.reason) if i == axis else None for i, size in enumerate(shape))]


def dot_general(interp: Interpreter, eqn: core.JaxprEqn, left: ArrayAxes, right: ArrayAxes) -> list[ArrayAxes]:
    contracted, batch = eqn.params["dimension_numbers"]
    labels = []
    for side, operand in enumerate((left, right)):
        shared: dict[int, tuple[str | int, int]] = {axis: ("contracted", i) for i, axis in enumerate(contracted[side])}
        shared |= {axis: ("batch", i) for i, axis in enumerate(batch[side])}
        labels.append([shared.get(axis, (side, axis)) for axis in range(len(operand))])
    kept = [label for side in (0, 1) for label in labels[side] if label[0] == side]
    batches = [("batch", i) for i in range(len(batch[0]))]
    return interp.relate([(left, labels[0]), (right, labels[1])], [[*batches, *kept]])


def convolution(interp: Interpreter, eqn: core.JaxprEqn, image: ArrayAxes, kernel: ArrayAxes) -> list[ArrayAxes]:
    """A product over the channels of each group; positions in space are frozen."""
    if eqn.params["batch_group_count"] != 1:
        return freeze_everything(interp, eqn, image, kernel)
    groups = eqn.params["feature_group_count"]
    dims = eqn.params["dimension_numbers"]
    outputs, inputs = (_shape(eqn.invars[1])[axis] for axis in dims.rhs_spec[:2])
    interp.freeze(image[axis] for axis in dims.lhs_spec[2:])
    interp.freeze(kernel[axis] for axis in dims.rhs_spec[2:])
    batch, channels = (image[axis] for axis in dims.lhs_spec[:2])
    filters, depth = (kernel[axis] for axis in dims.rhs_spec[:2])
    inner = (groups, outputs // groups)
    (result,) = interp.relate(
        [
            ((batch, *interp.split(channels, (groups, inputs), split_product)), ("batch", "group", "in")),
            ((*interp.split(filters, inner, split_product), depth), ("group", "out", "in")),
        ],
        [("batch", "group", "out")],
    )
    shape = _shape(eqn.outvars[0])
    axes = dict(zip(dims.out_spec, (result[0], interp.join(result[1:], inner)), strict=False))
    return [tuple(axes.get(axis, Axis(size, interp.reason)) for axis, size in enumerate(shape))]


def concatenate(interp: Interpreter, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    dimension, rank = eqn.params["dimension"], len(operands[0])

    def labels(label: Hashable) -> Labels:
        return [label if axis == dimension else axis for axis in range(rank)]

    sizes = [_shape(atom)[dimension] for atom in eqn.invars]
    parts = [operand[dimension] or Axis(size) for operand, size in zip(operands, sizes, strict=True) if size]
    return interp.relate(
        [(operand, labels(("part", i))) for i, operand in enumerate(operands)],
        [labels("all")],
        {"all": concatenation(parts)},
    )


def split(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes | DeferredReshape) -> list[ArrayAxes]:
    axis, sizes = eqn.params["axis"], eqn.params["sizes"]
    if isinstance(operand, DeferredReshape):
        ends = itertools.accumulate(sizes)
        return [_reshape(interp, operand, axis, int(end - n), int(n)) for n, end in zip(sizes, ends, strict=True)]
    return _replace_axis(interp, operand, axis, _split_segments(interp, operand[axis], sizes))


def stack(interp: Interpreter, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """A new axis in which the operands are segments of one entry each: none of them can move."""
    new, rank = eqn.params["axis"], len(operands[0])
    labels: list[Hashable] = list(range(rank))
    axis = concatenation([Axis(1, interp.reason) for _ in operands])
    return interp.relate(
        [(operand, labels) for operand in operands], [[*labels[:new], "new", *labels[new:]]], {"new": axis}
    )


def unstack(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes | DeferredReshape) -> list[ArrayAxes]:
    """Segments of one entry each, without their axis."""
    axis, count = eqn.params["axis"], len(eqn.outvars)
    if isinstance(operand, DeferredReshape):
        entries = [_reshape(interp, operand, axis, i, 1) for i in range(count)]
    else:
        interp.freeze([operand[axis]])
        entries = _replace_axis(interp, operand, axis, [None] * count)
    return [entry[:axis] + entry[axis + 1 :] for entry in entries]


def tile(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """Each axis becomes the product of its copies, which are all equal, with itself."""
    for axis, (size, count) in enumerate(zip(_shape(eqn.invars[0]), eqn.params["reps"], strict=True)):
        if count != 1 and operand[axis] is not None:
            (operand,) = _replace_axis(interp, operand, axis, [interp.join([None, operand[axis]], (count, size))])
    return [operand]


def slice_(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes | DeferredReshape) -> list[ArrayAxes]:
    """A slice without gaps is a segment of its axis.

    Every third entry of an axis is an entry of each block of three: the blocks may be in any order, what is inside
    them may not. Other slices with gaps are frozen.
    """
    p, shape = eqn.params, _shape(eqn.invars[0])
    if isinstance(operand, DeferredReshape):
        sliced = sliced_axis(eqn)
        assert sliced is not None
        return [_reshape(interp, operand, sliced, int(p["start_indices"][sliced]), _shape(eqn.outvars[0])[sliced])]
    strides = p["strides"] or (1,) * len(shape)
    for axis, (size, start, stop, stride) in enumerate(
        zip(shape, p["start_indices"], p["limit_indices"], strides, strict=True)
    ):
        if stop - start == size and stride == 1:
            continue
        if stride == 1:
            part = _split_segments(interp, operand[axis], [start, stop - start, size - stop])[1]
        elif size % stride == 0 and start < stride and len(range(start, stop, stride)) == size // stride:
            part, inside = interp.split(operand[axis], (size // stride, stride), split_product)
            interp.freeze([inside])
        else:
            interp.freeze([operand[axis]])
            part = None if operand[axis] is None else Axis(len(range(start, stop, stride)), interp.reason)
        (operand,) = _replace_axis(interp, operand, axis, [part])
    return [operand]


def pad(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes, filler: ArrayAxes) -> list[ArrayAxes]:
    """The padding before and after an axis are segments of their own."""
    for axis, (low, high, between) in enumerate(eqn.params["padding_config"]):
        size = _shape(eqn.invars[0])[axis]
        if between or low < 0 or high < 0:
            interp.freeze([operand[axis]])
            padded = Axis(_shape(eqn.outvars[0])[axis], interp.reason)
        elif low or high:
            segments = [Axis(int(low)), operand[axis] or Axis(size), Axis(int(high))]
            padded = concatenation([segment for segment in segments if segment.size])
        else:
            continue
        (operand,) = _replace_axis(interp, operand, axis, [padded])
    return [operand]


def _split_segments(interp: Interpreter, axis: Axis | None, sizes: Iterable[SupportsIndex]) -> ArrayAxes:
    """The segments of an axis, of which some may be empty."""
    lengths = [int(size) for size in sizes]
    parts = iter(interp.split(axis, [length for length in lengths if length], split_segments))
    return tuple(next(parts) if length else None for length in lengths)


def _replace_axis(
    interp: Interpreter, operand: ArrayAxes, replaced: int, new_axes: Sequence[Axis | None]
) -> list[ArrayAxes]:
    """For each of the new axes, the array with one axis replaced by it."""

    def labels(label: Hashable) -> Labels:
        return [label if axis == replaced else axis for axis in range(len(operand))]

    new = {("new", i): axis for i, axis in enumerate(new_axes)}
    return interp.relate([(operand, labels("old"))], [labels(label) for label in new], new)


def gather(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes, indices: ArrayAxes) -> list[ArrayAxes] | None:
    """Elementwise over the axes that every slice covers; the others, whose positions are looked up, are frozen.

    But an axis along which the indices are positions is that axis, and the axes of a diagonal are one.
    """
    dims, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape, rank = _shape(eqn.invars[0]), len(_shape(eqn.outvars[0]))
    looked_up = dims.collapsed_slice_dims
    if isinstance(indices, Known) and len(indices) == 2 and tuple(dims.start_index_map) == tuple(looked_up):
        positions = np.arange(len(indices.value)).reshape(-1, 1)
        square = {shape[axis] for axis in looked_up} == {len(positions)} and not dims.operand_batching_dims
        if square and np.array_equal(indices.value, np.broadcast_to(positions, indices.value.shape)):
            others = iter(_other_axes(len(shape), looked_up))
            return interp.relate(
                [(operand, ["diagonal" if axis in looked_up else axis for axis in range(len(shape))])],
                [[next(others) if axis in dims.offset_dims else "diagonal" for axis in range(rank)]],
            )
    collapsed, batched = dims.collapsed_slice_dims, [*dims.operand_batching_dims]
    indexed = [a for a, n in enumerate(shape) if a not in batched and (a in collapsed or sizes[a] != n)]
    if isinstance(indices, Positions):
        if indices.shifted or indexed != [*dims.start_index_map] or shape[indexed[0]] != indices.along.size:
            return None
        if (along := operand[indexed[0]]) is not None:
            unite(along, indices.along, interp.reason)
    else:
        interp.freeze(operand[axis] for axis in indexed)
    interp.freeze(indices[-1:])
    labels: dict[int, Hashable] = {axis: ("operand", axis) for axis in indexed}
    labels |= {a: ("index", i) for a, i in zip(batched, dims.start_indices_batching_dims, strict=True)}
    kept = [axis for axis in range(len(shape)) if axis not in collapsed and axis not in batched]
    offsets = dict(zip(dims.offset_dims, kept, strict=True))
    offset_labels = {i: ("result", axis) if axis in indexed else axis for i, axis in offsets.items()}
    index_axes = iter(range(len(indices)))
    return interp.relate(
        [
            (operand, [labels.get(axis, axis) for axis in range(len(shape))]),
            (indices, [("index", i) for i in range(len(indices))]),
        ],
        [[offset_labels[i] if i in offset_labels else ("index", next(index_axes)) for i in range(rank)]],
        {("result", axis): Axis(sizes[axis], interp.reason) for axis in indexed},
    )


def scatter(
    interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes, indices: ArrayAxes, updates: ArrayAxes
) -> list[ArrayAxes]:
    """Elementwise over the axes that every update covers; all others are frozen.

    A single window in a known place is a segment of each axis that it does not cover.
    """
    dims = eqn.params["dimension_numbers"]
    shape, update_shape = _shape(eqn.invars[0]), _shape(eqn.invars[2])
    if isinstance(indices, Known) and len(indices) == 1 and len(updates) == len(dims.update_window_dims):
        window = [axis for axis in range(len(shape)) if axis not in dims.inserted_window_dims]
        update = dict(zip(window, updates, strict=True))
        sizes = dict.fromkeys(range(len(shape)), 1) | dict(zip(window, update_shape, strict=True))
        starts = dict(zip(dims.scatter_dims_to_operand_dims, known_value(indices).tolist(), strict=True))
        segments = {axis: (starts.get(axis, 0), sizes[axis]) for axis in sizes if sizes[axis] != shape[axis]}
        if all(0 <= start <= shape[axis] - size for axis, (start, size) in segments.items()):
            aligned = tuple(update.get(axis) for axis in range(len(shape)))
            return _update_segments(interp, shape, operand, aligned, segments)
    no_window = {*dims.inserted_window_dims, *dims.operand_batching_dims}
    windowed = [axis for axis in range(len(shape)) if axis not in no_window]
    windows = zip(windowed, dims.update_window_dims, strict=True)
    covered = {i: axis for axis, i in windows if update_shape[i] == shape[axis]}  # {axis of updates: axis of operand}
    interp.freeze(indices)
    interp.freeze(axis for i, axis in enumerate(updates) if i not in covered)
    interp.freeze(axis for i, axis in enumerate(operand) if i not in covered.values())

    def labels(array: str) -> Labels:
        return [axis if axis in covered.values() else (array, axis) for axis in range(len(shape))]

    return interp.relate(
        [
            (operand, labels("operand")),
            (updates, [covered.get(i, ("update", i)) for i in range(len(updates))]),
            (indices, [("index", i) for i in range(len(indices))]),
        ],
        [labels("result")],
        {("result", axis): Axis(size, interp.reason) for axis, size in enumerate(shape)},
    )


def call(interp: Interpreter, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """The results of the inner jaxpr of jit, remat or custom derivatives."""
    return interp.interpret_call(*inner_jaxpr(eqn), operands)


def inner_jaxpr(eqn: core.JaxprEqn) -> tuple[core.Jaxpr, Sequence[Any]]:
    """The one jaxpr inside an equation, and its constants."""
    return _open(next(eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params))


def _open(jaxpr: Any) -> tuple[core.Jaxpr, Sequence[Any]]:
    """A jaxpr, closed or not, and its constants."""
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, core.ClosedJaxpr) else (jaxpr, ())


def same_positions(
    interp: Interpreter, eqn: core.JaxprEqn, operand: Positions, *rest: ArrayAxes
) -> list[ArrayAxes] | None:
    """The same positions in another shape or integer type."""
    if not np.issubdtype(eqn.outvars[0].aval.dtype, np.integer):  # type: ignore[attr-defined]
        return None
    (axes,) = RULES[eqn.primitive.name](interp, eqn, tuple(operand), *rest) or ()
    return [positions(axes, operand.along, operand.reason, operand.shifted)]


def is_negative(interp: Interpreter, eqn: core.JaxprEqn, operand: Any, bound: Any) -> list[ArrayAxes] | None:
    """No position is."""
    if not isinstance(bound, Known) or bound.value.any():
        return None
    axes = Known([None] * len(_shape(eqn.outvars[0])))
    axes.value = np.broadcast_to(False, _shape(eqn.outvars[0]))
    return [axes]


def shift(interp: Interpreter, eqn: core.JaxprEqn, operand: Any, by: Any) -> list[ArrayAxes] | None:
    """Positions counted from the end: no use of them is known."""
    if not isinstance(by, Known) or not isinstance(operand, Positions):
        return None
    (axes,) = elementwise(interp, eqn, tuple(operand), tuple(by))
    return [positions(axes, operand.along, operand.reason, shifted=True)]


def choose_positions(interp: Interpreter, eqn: core.JaxprEqn, which: Any, *cases: Any) -> list[ArrayAxes] | None:
    """One of the cases, if it is known which."""
    if not isinstance(which, Known) or (which.value != which.value.ravel()[:1]).any():
        return None
    return [cases[int(which.value.ravel()[0])]]


def compare_positions(interp: Interpreter, eqn: core.JaxprEqn, left: Any, right: Any) -> list[ArrayAxes] | None:
    """If they are compared with all positions of their axis, along an axis of its own, that is the axis."""
    found, known = (left, right) if isinstance(left, Positions) else (right, left)
    varying = [axis for axis, one in enumerate(known) if one is not None]
    if not isinstance(known, Known) or isinstance(found, Known) or found.shifted or len(varying) != 1:
        return None
    (axis,) = varying
    if found[axis] is not None or not _counts(known.value, axis) or known.value.shape[axis] != found.along.size:
        return None
    all_positions = tuple(found.along if i == axis else None for i in range(len(known)))
    return elementwise(interp, eqn, tuple(found), all_positions)


def _counts(values: np.ndarray, axis: int) -> bool:
    """Whether an array has the numbers 0, 1, 2, … along an axis."""
    return bool(np.all(np.moveaxis(values, axis, -1) == np.arange(values.shape[axis])))


def slice_of_stack(interp: Interpreter, eqn: core.JaxprEqn, operand: Any) -> list[ArrayAxes] | None:
    """An entry, if it is one."""
    axis = sliced_axis(eqn)
    if axis is None or _shape(eqn.outvars[0])[axis] != 1:
        return None
    return interp.read_entry(operand, axis, int(eqn.params["start_indices"][axis]))


def dynamic_slice_of_stack(
    interp: Interpreter, eqn: core.JaxprEqn, operand: Any, *starts: Any
) -> list[ArrayAxes] | None:
    """An entry, if it is one: by its number if that is known, or else by the expression that it is computed by."""
    resized = _resized_axes(eqn.invars[0], eqn.outvars[0])
    if len(resized) != 1 or _shape(eqn.outvars[0])[resized[0]] != 1:
        return None
    (axis,) = resized
    start, last = starts[axis], _shape(eqn.invars[0])[axis] - 1
    if isinstance(start, Known):
        return interp.read_entry(operand, axis, min(max(0, int(start.value)), last))
    return interp.read_entry(operand, axis, interp.expressions[eqn.invars[1 + axis]])


def cond(interp: Interpreter, eqn: core.JaxprEqn, which: ArrayAxes, *operands: ArrayAxes) -> list[ArrayAxes]:
    """The results of all branches, united."""
    interp.plain(which)
    branches = [interp.interpret(*_open(branch), operands) for branch in eqn.params["branches"]]
    return [_unite_arrays(interp, results) for results in zip(*branches, strict=True)]


def while_(interp: Interpreter, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    p = eqn.params
    cond_consts, body_consts, carry = split_list(operands, p["cond_nconsts"], p["body_nconsts"])
    carry = list(map(interp.plain, carry))
    body = _open(p["body_jaxpr"])
    carry = _loop_carry(interp, carry, lambda carry: interp.interpret(*body, [*body_consts, *carry]))
    interp.interpret(*_open(p["cond_jaxpr"]), [*cond_consts, *carry])
    return carry


def scan(interp: Interpreter, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """The results of the body, in which all but the constants and the carry has an axis of steps."""
    p = eqn.params
    consts, carry, xs = split_list(operands, p["num_consts"], p["num_carry"])
    carry, xs = (list(map(interp.plain, arrays)) for arrays in (carry, xs))
    reason = interp.reason
    steps = Axis(p["length"], reason if carry else None)
    for x in xs:
        if x[0] is not None:
            unite(steps, x[0], reason)
    ys: list[ArrayAxes] = []

    def body(carry: list[ArrayAxes]) -> list[ArrayAxes]:
        interp.scan_steps.append((("step", len(interp.scan_steps)), steps))
        results = interp.interpret(*inner_jaxpr(eqn), [*consts, *carry, *(x[1:] for x in xs)])
        interp.scan_steps.pop()
        ys[:] = [(steps, *y) for y in results[len(carry) :]]
        return results[: len(carry)]

    carry = _loop_carry(interp, carry, body)
    for axes in (*consts, *xs):
        if any(axis in interp.first_use for axis in axes):  # outside of the scan, constants have no axis of steps
            interp.record([(axes, range(len(axes)))])
    interp.loop_axes += [axis for y in ys for axis in y if axis is not None]
    return [*carry, *ys]


def _loop_carry(
    interp: Interpreter, carry: list[ArrayAxes], body: Callable[[list[ArrayAxes]], list[ArrayAxes]]
) -> list[ArrayAxes]:
    """The carry of a loop, its axes united with those that the body returns, until that changes nothing."""

    def varying(arrays: list[ArrayAxes]) -> list[list[bool]]:
        return [[axis is not None for axis in axes] for axes in arrays]

    carry = [tuple(axes) for axes in carry]  # what is known of it is known before the first step only
    while True:
        united = [_unite_arrays(interp, pair) for pair in zip(carry, body(carry), strict=True)]
        interp.loop_axes += [axis for axes in united for axis in axes if axis is not None]
        if varying(united) == varying(carry):
            return united
        carry = united


def _unite_arrays(interp: Interpreter, arrays: Sequence[ArrayAxes]) -> ArrayAxes:
    """One array that may be any of these: their axes are united."""
    labels = range(len(arrays[0]))
    return interp.relate([(axes, labels) for axes in arrays], [labels])[0]


def split_list(values: Sequence[T], *counts: int) -> list[list[T]]:
    """Consecutive lists of so many values, and a last one of the rest."""
    ends = [*itertools.accumulate(counts), len(values)]
    return [list(values[start:stop]) for start, stop in zip([0, *ends], ends, strict=False)]


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _other_axes(rank: int, axes: Collection[SupportsIndex]) -> list[int]:
    return [axis for axis in range(rank) if axis not in axes]


def _resized_axes(a: Any, b: Any) -> list[int]:
    """The axes along which two arrays have different sizes."""
    return [axis for axis, (n, m) in enumerate(zip(_shape(a), _shape(b), strict=True)) if n != m]


def _for_all(value: T, names: str) -> dict[str, T]:
    return dict.fromkeys(names.split(), value)


RULES: dict[str, Rule] = {
    **_for_all(
        elementwise,
        """
        abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
        clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf
        erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite
        le le_to lgamma log log1p logistic lt lt_to max min mul mulhi name ne neg nextafter not or polygamma
        population_count pow real reduce_precision regularized_incomplete_beta rem round rsqrt
        select_n sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin
        sinh sqrt square stop_gradient sub tan tanh xor zeta
        """,
    ),
    **_for_all(call, "jit pjit closed_call core_call remat2 checkpoint composite"),
    **_for_all(call, "custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr custom_vmap_call"),
    **_for_all(reduction, "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor"),
    **_for_all(arg_reduction, "argmax argmin"),
    **_for_all(cumulative, "cumsum cumprod cummax cummin cumlogsumexp"),
    **_for_all(reduce_window, "reduce_window reduce_window_sum reduce_window_max reduce_window_min"),
    **_for_all(scatter, "scatter scatter-add scatter-mul scatter-min scatter-max scatter-sub"),
    **_for_all(pass_through, "optimization_barrier device_put reshard layout_constraint"),
    **_for_all(collective, "psum psum_invariant pmax pmin pvary pbroadcast ppermute"),
    **_for_all(factorisation, "cholesky eig eigh hessenberg householder_product lu qr schur svd tridiagonal"),
    "bitcast_convert_type": bitcast,
    "broadcast_in_dim": broadcast,
    "concatenate": concatenate,
    "cond": cond,
    "conv_general_dilated": convolution,
    "dot_general": dot_general,
    "dynamic_slice": dynamic_slice,
    "custom_linear_solve": linear_solve,
    "dynamic_update_slice": dynamic_update_slice,
    "fft": fft,
    "gather": gather,
    "iota": iota,
    "pad": pad,
    "ragged_dot_general": ragged_dot,
    "reduce": general_reduction,
    "reshape": reshape,
    "rev": reverse,
    "scan": scan,
    "shard_map": shard_map,
    "slice": slice_,
    "sort": sort,
    "split": split,
    "squeeze": squeeze,
    "stack": stack,
    "tile": tile,
    "top_k": top_k,
    "transpose": transpose,
    "triangular_solve": triangular_solve,
    "unstack": unstack,
    "while": while_,
}

POSITION_RULES: dict[str, Rule] = {
    **_for_all(call, "jit pjit closed_call core_call remat2 checkpoint composite"),
    **_for_all(call, "custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr"),
    **_for_all(
        same_positions, "broadcast_in_dim convert_element_type copy reshape slice squeeze stop_gradient transpose"
    ),
    "add": shift,
    "eq": compare_positions,
    "gather": gather,
    "lt": is_negative,
    "select_n": choose_positions,
}
"""For primitives with an operand that is positions along an axis; for all others these are plain numbers."""

STACK_RULES: dict[str, Rule] = {
    **_for_all(call, "jit pjit closed_call core_call remat2 checkpoint composite"),
    **_for_all(call, "custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr custom_vmap_call"),
    "cond": cond,
    "dynamic_slice": dynamic_slice_of_stack,
    "scan": scan,
    "slice": slice_of_stack,
    "while": while_,
}
"""For primitives that leave it open whether a parameter is only read entry by entry; all others use all of it."""

FROZEN_ON_PURPOSE: dict[str, str] = {
    **_for_all(
        "random numbers differ from position to position",
        """
        iota_2x32_shape philox2x32 philox4x32 random_bits random_clone random_fold_in random_gamma random_seed
        random_split random_unwrap random_wrap rng_bit_generator rng_uniform threefry2x32 threefry4x32
        """,
    ),
    **_for_all(
        "devices share the array out by position",
        """
        all_gather all_gather_invariant all_gather_reduced all_to_all axis_index precv psend ragged_all_to_all
        reduce_scatter unreduced_reduce_scatter
        """,
    ),
    **_for_all(
        "an array that is written to is not followed",
        "accum_grad_in_ref addupdate empty_ref free_ref freeze get new_ref run_state swap",
    ),
    **_for_all(
        "what is not JAX cannot be looked into",
        "call_exported custom_partitioning ffi_call io_callback pure_callback",
    ),
}
"""Primitives without a rule that shall have none, and why."""
