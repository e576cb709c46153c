"""Rules of looking up and writing in some place, and of the positions that `argmax`, `top_k` and `argsort` give.

The latter are arrays of `Positions`, for which some primitives have a rule of their own.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, SupportsIndex

import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.lax import GatherScatterMode

from mcomb.symmetry.axes import Axis, concatenation, tie, unite
from mcomb.symmetry.interpreter import (
    ArrayAxes,
    Counts,
    Discrete,
    Grouping,
    Interpreter,
    Known,
    Labels,
    Places,
    Positions,
    Reversed,
    counts,
    known_value,
    places,
    positions,
    same_positions,
)
from mcomb.symmetry.rules.common import elementwise, other_axes, positional, resized_axes, shape_of
from mcomb.symmetry.rules.reductions import reduction
from mcomb.symmetry.rules.shapes import cut_segments, replace_axis, take_part


def arg_reduction(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """Positions along the reduced axis."""
    (axes,), (reduced,) = reduction(interp, eqn, operand), eqn.params["axes"]
    return [_positions_along(interp, eqn, axes, operand[reduced])]


def _positions_along(interp: Interpreter, eqn: core.JaxprEqn, axes: ArrayAxes, along: Axis | None) -> ArrayAxes:
    """Positions, chosen by the size of entries along an axis, which is frozen unless these are floats.

    Of entries that are exactly equal the first is taken, whichever that is. Of floats we count on there being none but
    those that are equal by construction: see `equals`, and `Interpreter.freeze_ties`. Among integers and truth values
    there are.
    """
    if along is None:
        return axes
    reason = interp.reason
    interp.explain(eqn.primitive.name, "of equal entries it takes the first")
    interp.choices.append((along, interp.reason))
    if is_float(eqn.invars[0]) and holds_positions(eqn.outvars[-1], along):
        return positions(axes, along, reason)
    if is_float(eqn.invars[0]):
        interp.reason = reason
    interp.freeze([along])
    return axes


def choose_from_few(interp: Interpreter, eqn: core.JaxprEqn, *operands: ArrayAxes) -> None:
    """Freezes what is chosen from if its entries are whole numbers, be they floats: as above, some will be equal."""
    p = eqn.params
    if eqn.primitive.name == "sort" and p["num_keys"] == len(operands):
        return
    rank = len(operands[0])
    along = p["dimension"] if "dimension" in p else p["axes"][0] if "axes" in p else p.get("axis", -1) % rank
    if not isinstance(operands[0], Discrete) or along in operands[0].along:
        interp.explain(eqn.primitive.name, "of equal entries it takes the first")
        interp.freeze(operand[along] for operand in operands)


def holds_positions(atom: Any, along: Axis) -> bool:
    """Whether an array is of a type that has all positions along an axis."""
    return holds_count(atom, along.size - 1)


def is_float(atom: Any) -> bool:
    """Whether an array has real, floating-point entries, and not of a type that has but a few."""
    return bool(jnp.issubdtype(atom.aval.dtype, jnp.floating) and atom.aval.dtype.itemsize > 1)


def sort(interp: Interpreter, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """Freezes the axis of the result, but that of operands only if more is sorted than the keys.

    The sorted keys are the same in whatever order they come (zeros of both signs count as the same, as they do here).
    Where their positions are sorted with them, the result is positions along their axis.
    """
    axis, keys = eqn.params["dimension"], eqn.params["num_keys"]
    *others, last = operands
    along = others[0][axis] if len(others) == keys == 1 and is_float(eqn.invars[0]) else None
    if along is not None and isinstance(last, Known) and counts_up(last.value, axis):
        values, ranked = positional(interp, eqn, others, [axis], order_blind=True)  # as `argsort` does
        found = _positions_along(interp, eqn, ranked, along)
        return [values, same_positions(found, found, once=axis) if isinstance(found, Positions) else found]
    return positional(interp, eqn, operands, [axis], order_blind=keys == len(operands))


def sort_reversed(interp: Interpreter, eqn: core.JaxprEqn, *operands: Any) -> list[ArrayAxes] | None:
    """The same as that of the array before it was turned round, with which the numbers of its entries were, too.

    For no two entries are equal, so that it does not matter in which order they come.
    """
    axis = eqn.params["dimension"]
    keys, numbers = operands if len(operands) == 2 else (None, None)
    if not isinstance(keys, Reversed) or keys.turned != (axis,) or not isinstance(numbers, Known):
        return None
    if not counts_up(np.flip(numbers.value, axis), axis) or eqn.params["num_keys"] != 1 or not is_float(eqn.invars[0]):
        return None
    before = interp.constant(np.flip(numbers.value, axis))
    return sort(interp, eqn, tuple(keys), before)


def sort_positions(interp: Interpreter, eqn: core.JaxprEqn, *operands: Any) -> list[ArrayAxes] | None:
    """The order that sorts positions, as `argsort` gives it."""
    axis, (keys, *others) = eqn.params["dimension"], operands
    numbers = others[0] if len(others) == eqn.params["num_keys"] == 1 else None
    choice = isinstance(keys, Positions) and isinstance(numbers, Known) and counts_up(numbers.value, axis)
    if choice and not keys.shifted and keys[axis] is not None:
        if keys.once == axis:
            return _invert(interp, keys, axis)
        if len(keys) == 1 and eqn.params["is_stable"] and not interp.shards:
            return _sort_rows(interp, keys)
    choose_from_few(interp, eqn, *operands)
    return None


def _invert(interp: Interpreter, keys: Positions, axis: int) -> list[ArrayAxes]:
    """The order that undoes another: where each position is, of which none are equal.

    For the `argsort` of floats it is their ranks, and for rows that were sorted where each has come to.
    """
    before = keys[axis]
    assert before is not None

    def labels(label: str) -> list[Hashable]:
        return [label if i == axis else i for i in range(len(keys))]

    values, where = interp.relate(
        [_with_their_axis(keys, labels("before"), "along")],
        [labels("rank"), labels("along")],
        {"rank": Axis(keys.along.size, interp.reason)},
    )
    return [values, positions(where, before, interp.reason, once=axis)]


def _sort_rows(interp: Interpreter, keys: Positions) -> list[ArrayAxes]:
    """The order that sorts rows by a position of each.

    Rows that share a position stay in their order, which is frozen.
    """
    assert keys[0] is not None
    interp.record([((keys.along,), ["groups"]), (tuple(keys), ["rows"])])
    interp.explain("sort", "rows of one group stay in their order")
    interp.freeze([keys[0]])
    rows = Axis(keys[0].size)
    interp.groupings.append(Grouping(rows, keys.along, keys.source, interp.reason))
    order = positions((rows,), keys[0], interp.reason, once=0)
    return [positions((rows,), keys.along, keys.reason, source=keys.source), order]


def top_k(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """The largest entries, and positions along their axis."""
    axis = eqn.params.get("axis", -1) % len(operand)
    values, ranked = positional(interp, eqn, [operand], [axis], order_blind=True)
    return [values, _positions_along(interp, eqn, ranked, operand[axis])]


def gather(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes, indices: ArrayAxes) -> list[ArrayAxes] | None:
    """Elementwise over the axes that every slice covers; the others, whose positions are looked up, are frozen.

    But an axis along which the indices are positions is that axis, and the axes of a diagonal are one. Where two
    indices are the same, the entries are copies of one. Positions that are themselves looked up, as those are by which
    rows were sorted, are positions still, unless an index may be out of bounds; no position is.
    """
    clipped = eqn.params["mode"] in (GatherScatterMode.CLIP, GatherScatterMode.PROMISE_IN_BOUNDS)
    if not isinstance(operand, Positions) or operand.shifted or not (clipped or isinstance(indices, Positions)):
        operand = interp.plain(operand)
    dims, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape, rank = shape_of(eqn.invars[0]), len(shape_of(eqn.outvars[0]))
    looked_up = dims.collapsed_slice_dims
    if isinstance(indices, Known) and len(indices) == 2 and tuple(dims.start_index_map) == tuple(looked_up):
        numbers = np.arange(len(indices.value)).reshape(-1, 1)
        square = {shape[axis] for axis in looked_up} == {len(numbers)} and not dims.operand_batching_dims
        square &= all(sizes[axis] == shape[axis] for axis in other_axes(len(shape), looked_up))
        if square and np.array_equal(indices.value, np.broadcast_to(numbers, indices.value.shape)):
            others = iter(other_axes(len(shape), looked_up))
            return interp.relate(
                [(interp.plain(operand), ["diagonal" if axis in looked_up else axis for axis in range(len(shape))])],
                [[next(others) if axis in dims.offset_dims else "diagonal" for axis in range(rank)]],
            )
    collapsed, batched = dims.collapsed_slice_dims, [*dims.operand_batching_dims]
    indexed = [a for a, n in enumerate(shape) if a not in batched and (a in collapsed or sizes[a] != n)]
    in_order = _in_order(eqn, dims.start_indices_batching_dims)
    found = _found_by(indices, dims.start_index_map, shape, {axis: sizes[axis] for axis in indexed}, in_order)
    if found is None:
        return None
    for axis in indexed:
        if axis in found and (along := operand[axis]) is not None:
            unite(along, found[axis].along, interp.reason)
        elif axis not in found:
            interp.freeze([operand[axis]])
    interp.freeze(indices[-1:])
    labels: dict[int, Hashable] = {axis: ("operand", axis) for axis in indexed}
    labels |= {a: ("index", i) for a, i in zip(batched, dims.start_indices_batching_dims, strict=True)}
    kept = [axis for axis in range(len(shape)) if axis not in collapsed and axis not in batched]
    offsets = dict(zip(dims.offset_dims, kept, strict=True))
    offset_labels = {i: ("result", axis) if axis in indexed else axis for i, axis in offsets.items()}
    index_axes = iter(range(len(indices)))
    of_indices: list[Hashable] = [("index", i) for i in range(len(indices))]
    of_operand = [labels.get(axis, axis) for axis in range(len(shape))]
    of_result = [offset_labels[i] if i in offset_labels else ("index", next(index_axes)) for i in range(rank)]
    value = (operand.along,) if isinstance(operand, Positions) else ()
    of_value = ["value"] * len(value)
    (axes,) = interp.relate(
        [
            ((*operand, *value), [*of_operand, *of_value]),
            *(_with_their_axis(column, of_indices, labels[axis]) for axis, column in found.items()),
            *([] if isinstance(indices, Positions) else [(tuple(indices), of_indices)]),
        ],
        [[*of_result, *of_value]],
        {("result", axis): Axis(sizes[axis], interp.reason) for axis in indexed},
    )
    return [positions(axes[:-1], operand.along, operand.reason) if isinstance(operand, Positions) else axes]


def _with_their_axis(indices: Positions, labels: Labels, along: Hashable) -> tuple[ArrayAxes, Labels]:
    """Positions as an array of all that they tell apart: their own axes, and the axis that they are positions along."""
    return (*indices, indices.along), [*labels, along]


def _in_order(eqn: core.JaxprEqn, batched: Sequence[SupportsIndex]) -> bool:
    """Whether indices are promised to be sorted, and there are several of them for each index of a batch."""
    shape = shape_of(eqn.invars[1])[:-1]
    return eqn.params["indices_are_sorted"] and math.prod(shape[axis] for axis in other_axes(len(shape), batched)) > 1


def _found_by(
    indices: Any,
    by: Sequence[SupportsIndex],
    shape: Sequence[int],
    indexed: Mapping[int, int],
    in_order: bool = False,
) -> dict[int, Positions] | None:
    """For each axis that is looked up by positions, these; None if they mean anything but one entry each.

    The indices have a column for each axis in `by`. Of those that are `indexed` it is how many entries are taken at
    once; all others are taken whole, from zero on. Nor may they be promised to be `in_order`, which a permutation would
    break.
    """
    if not isinstance(indices, Positions | Places):
        return {}
    if in_order:
        return None
    columns = indices.columns if isinstance(indices, Places) else (indices,)
    found = {}
    for axis, column in zip(map(int, by), columns, strict=False):
        if isinstance(column, Positions):
            if indexed.get(axis) != 1 or column.shifted or shape[axis] != column.along.size:
                return None
            found[axis] = column
        elif axis not in indexed and not (isinstance(column, Known) and not column.value.any()):
            return None
    return found if len(columns) == len(by) else None


def join_columns(interp: Interpreter, eqn: core.JaxprEqn, *operands: Any) -> list[ArrayAxes] | None:
    """Indices into several axes, if each operand is one column of them."""
    last = len(shape_of(eqn.outvars[0])) - 1
    if eqn.params["dimension"] != last or any(shape_of(atom)[last] != 1 for atom in eqn.invars):
        return None
    operands = tuple(one if isinstance(one, Positions | Known) else interp.plain(one) for one in operands)
    labels = [*range(last), "column"]
    new = {"column": Axis(len(operands), interp.reason)}
    (axes,) = interp.relate([(tuple(operand), labels) for operand in operands], [labels], new)
    return [places(axes, operands)]


def scatter_at(
    interp: Interpreter, eqn: core.JaxprEqn, operand: Any, indices: Any, updates: Any
) -> list[ArrayAxes] | None:
    """Writes to positions along an axis, which is that axis: the entries move with what they are chosen by.

    Of several updates of one entry the last is what stays there: their order is frozen, unless they are added up or
    such. Ones that are added to zeros count.
    """
    dims, shape = eqn.params["dimension_numbers"], shape_of(eqn.invars[0])
    inserted, batched = [*dims.inserted_window_dims], [*dims.operand_batching_dims]
    kept = [axis for axis in range(len(shape)) if axis not in inserted and axis not in batched]
    update_shape = [shape_of(eqn.invars[2])[axis] for axis in dims.update_window_dims]
    in_order = _in_order(eqn, dims.scatter_indices_batching_dims)
    found = _found_by(indices, dims.scatter_dims_to_operand_dims, shape, dict.fromkeys(inserted, 1), in_order)
    if not found or update_shape != [shape[axis] for axis in kept]:
        return None
    operand, updates = interp.plain(operand), interp.plain(updates)
    together = dims.scatter_indices_batching_dims
    of_index = iter(range(len(indices) - 1))
    of_window = dict(zip(dims.update_window_dims, kept, strict=True))
    of_update = [of_window[i] if i in of_window else ("index", next(of_index)) for i in range(len(updates))]
    once = indices.once if isinstance(indices, Positions) else None
    several = [i for i, n in enumerate(shape_of(eqn.invars[1])[:-1]) if n > 1 and i != once and i not in together]
    apart = [axis for i, axis in enumerate(indices) if i not in together]
    labels_apart = {("index", i) for i in range(len(indices)) if i not in together}
    varying = [axis for axis, label in zip(updates, of_update, strict=True) if label in labels_apart and axis]
    if eqn.primitive.name == "scatter" and several and varying:
        interp.freeze([*apart, *varying])
    by_number = [axis for axis in inserted if axis not in found]
    interp.freeze(operand[axis] for axis in by_number)
    of_batch: dict[int, Hashable] = {axis: ("index", i) for axis, i in zip(batched, together, strict=True)}

    def labels(array: str) -> Labels:
        return [(array, axis) if axis in by_number else of_batch.get(axis, axis) for axis in range(len(shape))]

    of_indices = [("index", i) for i in range(len(indices))]
    is_count = _counts(eqn, operand, indices, updates)
    (axes,) = interp.relate(
        [
            (operand, labels("operand")),
            (updates, of_update),
            *(_with_their_axis(column, of_indices, axis) for axis, column in found.items()),
            *([] if isinstance(indices, Positions) else [(tuple(indices), of_indices)]),
        ],
        [labels("result")],
        {
            **{axis: column.along for axis, column in found.items()},
            **{("result", axis): Axis(shape[axis], interp.reason) for axis in by_number},
        },
    )
    return [counts(axes, indices.source, 0, updates.value.size) if is_count else axes]


def _counts(eqn: core.JaxprEqn, operand: Any, indices: Any, updates: Any) -> bool:
    """Whether a scatter counts positions, in a type that holds their number."""
    if eqn.primitive.name != "scatter-add" or not all(isinstance(array, Known) for array in (operand, updates)):
        return False
    is_count = not operand.value.any() and (updates.value == 1).all() and operand.value.ndim == 1
    return bool(is_count and isinstance(indices, Positions) and holds_count(eqn.outvars[0], updates.value.size))


def holds_count(atom: Any, count: int) -> bool:
    """Whether an array is of a type that has all whole numbers up to this one."""
    dtype = atom.aval.dtype
    if is_float(atom):
        return bool(count <= 2 ** jnp.finfo(dtype).nmant)
    return bool(jnp.issubdtype(dtype, jnp.integer) and count <= jnp.iinfo(dtype).max)


def convert_counts(interp: Interpreter, eqn: core.JaxprEqn, operand: Counts) -> list[ArrayAxes] | None:
    """The same counts in another type that has them all."""
    return [operand] if holds_count(eqn.outvars[0], operand.most) else None


def sum_counts(interp: Interpreter, eqn: core.JaxprEqn, operand: Counts) -> list[ArrayAxes] | None:
    """The same counts, unless those of different positions are added up."""
    summed = eqn.params["axes"]
    if operand.along in summed or not holds_count(eqn.outvars[0], operand.most):
        return None
    (axes,) = reduction(interp, eqn, tuple(operand))
    return [counts(axes, operand.source, operand.along - sum(axis < operand.along for axis in summed), operand.most)]


def scatter(
    interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes, indices: ArrayAxes, updates: ArrayAxes
) -> list[ArrayAxes]:
    """Elementwise over the axes that every update covers; all others are frozen.

    But updates that are added up, or such, may come in any order. A single window in a known place is a segment of each
    axis that it does not cover.
    """
    dims = eqn.params["dimension_numbers"]
    shape, update_shape = shape_of(eqn.invars[0]), shape_of(eqn.invars[2])
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
    apart = iter(range(len(indices) - 1))
    of_update: list[Hashable] = [
        covered.get(i, ("update", i)) if i in dims.update_window_dims else ("index", next(apart))
        for i in range(len(updates))
    ]
    in_any_order = [
        ("index", i)
        for i in range(len(indices) - 1)
        if eqn.primitive.name != "scatter" and i not in dims.scatter_indices_batching_dims
        if not _in_order(eqn, dims.scatter_indices_batching_dims)
    ]
    of_index = [("index", i) for i in range(len(indices))]
    for array, own in ((indices, of_index), (updates, of_update)):
        interp.freeze(axis for axis, label in zip(array, own, strict=True) if label not in [*in_any_order, *windowed])
    interp.freeze(axis for i, axis in enumerate(operand) if i not in covered.values())

    def labels(array: str) -> Labels:
        return [axis if axis in covered.values() else (array, axis) for axis in range(len(shape))]

    return interp.relate(
        [
            (operand, labels("operand")),
            (updates, of_update),
            (indices, of_index),
        ],
        [labels("result")],
        {("result", axis): Axis(size, interp.reason) for axis, size in enumerate(shape)},
    )


def dynamic_slice(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes, *starts: ArrayAxes) -> list[ArrayAxes]:
    """A segment of its axis if it is known where it starts; else it is frozen."""
    resized = resized_axes(eqn.invars[0], eqn.outvars[0])
    if not all(isinstance(starts[axis], Known) for axis in resized):
        return positional(interp, eqn, [operand], resized)
    for axis in resized:
        size, length = shape_of(eqn.invars[0])[axis], shape_of(eqn.outvars[0])[axis]
        start = min(max(0, int(known_value(starts[axis]))), size - length)
        part = cut_segments(interp, operand[axis], [start, length, size - start - length])[1]
        operand = take_part(interp, operand, axis, part)
    return [operand]


def dynamic_slice_at(interp: Interpreter, eqn: core.JaxprEqn, operand: Any, *starts: Any) -> list[ArrayAxes] | None:
    """The entry at positions along some axes, which are the axes of the positions; None for anything else."""
    shape, sizes = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    resized = resized_axes(eqn.invars[0], eqn.outvars[0])
    if not all(isinstance(starts[axis], Positions) for axis in resized):
        return None
    indexed = {axis: sizes[axis] for axis in resized}
    found = _found_by(places((), [starts[axis] for axis in resized]), resized, shape, indexed)
    if not found:
        return None
    operand, _ = interp.plain(operand), [interp.plain(start) for i, start in enumerate(starts) if i not in found]
    for axis, start in found.items():
        if (along := operand[axis]) is not None:
            unite(along, start.along, interp.reason)
        interp.record([((start.along,), [0])])  # whatever it was one of several positions of
        (operand,) = replace_axis(interp, operand, axis, [None])
    return [operand]


def dynamic_update_slice(
    interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes, update: ArrayAxes, *starts: ArrayAxes
) -> list[ArrayAxes]:
    """Replaces a segment of an axis if it is known where it starts; else the axis is frozen."""
    shape, update_shape = (shape_of(atom) for atom in eqn.invars[:2])
    resized = resized_axes(*eqn.invars[:2])
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
        cut = zip(cut_segments(interp, operand[axis], sizes), sizes, strict=True)
        parts = [part or Axis(n, tied=True) for part, n in cut]
        if (new := update[axis]) is not None:
            unite(parts[1], new, interp.reason)
        else:
            tie(parts[1])
        updated["result", axis] = concatenation([part for part in parts if part.size])

    def labels(array: str) -> Labels:
        return [(array, axis) if axis in segments else axis for axis in range(len(shape))]

    return interp.relate([(operand, labels("operand")), (update, labels("update"))], [labels("result")], updated)


def reshape_positions(
    interp: Interpreter, eqn: core.JaxprEqn, operand: Positions, *rest: ArrayAxes
) -> list[ArrayAxes] | None:
    """The same positions in another shape or type, or some of them, or copies."""
    if not holds_positions(eqn.outvars[0], operand.along):
        return None
    (axes,) = map(interp.plain, interp.rules[eqn.primitive.name](interp, eqn, tuple(operand), *rest) or ())
    before, after = (shape_of(atom) for atom in (eqn.invars[0], eqn.outvars[0]))
    if (count := math.prod(before)) != math.prod(after):
        return [positions(axes, operand.along, operand.reason, operand.shifted)]
    once = operand.once if eqn.primitive.name in SAME_ORDER else None
    if operand.once is not None and before[operand.once] == count:
        once = next((axis for axis, size in enumerate(after) if size == count), None)
    return [same_positions(axes, operand, once)]


SAME_ORDER = {"convert_element_type", "copy", "rev", "stop_gradient"}  # of axes, that is


def is_negative(interp: Interpreter, eqn: core.JaxprEqn, operand: Any, bound: Any) -> list[ArrayAxes] | None:
    """No position is, unless something was added to it."""
    if not isinstance(bound, Known) or bound.value.any() or operand.shifted:
        return None
    axes = Known([None] * len(shape_of(eqn.outvars[0])))
    axes.value = np.broadcast_to(False, shape_of(eqn.outvars[0]))
    return [axes]


def at_least(interp: Interpreter, eqn: core.JaxprEqn, left: Any, right: Any) -> list[ArrayAxes] | None:
    """The same positions, if they are only made zero where they are less, as `bincount` does."""
    found, bound = (left, right) if isinstance(left, Positions) else (right, left)
    if not isinstance(bound, Known) or not (bound.value <= 0).all() or found.shifted:
        return None
    return [found] if shape_of(eqn.invars[0 if found is left else 1]) == shape_of(eqn.outvars[0]) else None


def shift(interp: Interpreter, eqn: core.JaxprEqn, operand: Any, by: Any) -> list[ArrayAxes] | None:
    """Positions counted from the end: no use of them is known."""
    if not isinstance(by, Known) or not isinstance(operand, Positions):
        return None
    (axes,) = elementwise(interp, eqn, tuple(operand), tuple(by))
    return [positions(axes, operand.along, operand.reason, shifted=True)]


def choose_positions(interp: Interpreter, eqn: core.JaxprEqn, which: Any, *cases: Any) -> list[ArrayAxes] | None:
    """One of the cases, if it is known which, and that there is such a case."""
    numbers = set(which.value.ravel().tolist()) if isinstance(which, Known) else set()
    chosen = [case for i, case in enumerate(cases) if i in numbers]
    if len(numbers) != 1 or not chosen:
        return None
    return [chosen[0] if isinstance(chosen[0], Positions) else interp.plain(chosen[0])]


def compare_positions(interp: Interpreter, eqn: core.JaxprEqn, left: Any, right: Any) -> list[ArrayAxes] | None:
    """If they are compared with all positions of their axis, along an axis of its own, that is the axis.

    Those of equal positions are copies of one row of an identity matrix.
    """
    found, known = (left, right) if isinstance(left, Positions) else (right, left)
    varying = [axis for axis, one in enumerate(known) if one is not None]
    if not isinstance(known, Known) or isinstance(found, Known) or found.shifted or len(varying) != 1:
        return None
    (axis,) = varying
    if (
        (found and found[axis] is not None)
        or not counts_up(known.value, axis)
        or known.value.shape[axis] != found.along.size
    ):
        return None
    (axes,) = interp.relate([_with_their_axis(found, range(len(found)), axis)], [range(len(known))])
    shape, count = shape_of(eqn.outvars[0]), math.prod(shape_of(eqn.invars[0 if found is left else 1]))
    is_one_hot = eqn.primitive.name == "eq" and math.prod(shape) == count * shape[axis]
    return [counts(axes, found.source, axis, count) if is_one_hot else axes]


def counts_up(values: np.ndarray, axis: int) -> bool:
    """Whether an array has the numbers 0, 1, 2, … along an axis."""
    return bool(np.all(np.moveaxis(values, axis, -1) == np.arange(values.shape[axis])))
