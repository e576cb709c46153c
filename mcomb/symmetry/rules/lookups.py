"""Rules of indexed reads and writes, and of choices: `argmax`, `top_k` and `sort`.

A program chooses an expert or a code word by its position, and then looks up entries at that position. Experts and code
words may therefore change places. Some rules follow such positions (`ArrayFacts.positions`). For any other use of
positions they return None, which freezes the axis.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, SupportsIndex

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from mcomb.symmetry.axes import Axis
from mcomb.symmetry.constants import counts_up
from mcomb.symmetry.facts import ArrayAxes, ArrayFacts, Grouping, Positions, Relation, shape_of
from mcomb.symmetry.rules.distinct import is_float
from mcomb.symmetry.rules.elementwise import Rule, elementwise, other_axes, positional, resized_axes
from mcomb.symmetry.rules.reductions import reduction


def arg_reduction(eqn: core.JaxprEqn, operand: ArrayFacts) -> Relation:
    """Return positions along the reduced axis: the nearest code word (VQ-VAE), or the best expert (Switch)."""
    return _choose(eqn, operand, eqn.params["axes"][0], reduction(eqn, operand))


def top_k(eqn: core.JaxprEqn, operand: ArrayFacts) -> Relation:
    """Return the largest entries and their positions: the best experts of a token (Mixtral)."""
    axis = eqn.params.get("axis", -1) % len(operand.axes)
    return _choose(eqn, operand, axis, positional(eqn, [operand], [axis], order_blind=True))


def _choose(eqn: core.JaxprEqn, operand: ArrayFacts, axis: int, relation: Relation) -> Relation:
    """Return positions as the last result, and freeze the axis of the choice unless its entries are distinct."""
    along = operand.axes[axis]
    if along is None:
        return relation
    if axis in operand.distinct and is_float(eqn.invars[0]) and _holds_positions(eqn.outvars[-1]):
        values = [ArrayFacts()] * (len(eqn.outvars) - 1)
        return replace(relation, facts=[*values, ArrayFacts(positions=Positions(along))])
    label = relation.operands[0][1][axis]
    return replace(relation, frozen={*relation.frozen, label}, why="of equal entries it takes the first")


def _holds_positions(atom: Any) -> bool:
    """Return whether the dtype of an array represents all positions along any axis."""
    dtype = atom.aval.dtype
    return bool(jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize >= 4)


def sort(eqn: core.JaxprEqn, *operands: ArrayFacts) -> Relation:
    """Freeze the axis of the result, and that of the operands only if there are operands other than keys.

    The sorted keys do not depend on the order of the keys, as in a median. Zeros of both signs count as equal.
    """
    keys_alone = eqn.params["num_keys"] == len(operands)
    return positional(eqn, operands, [eqn.params["dimension"]], order_blind=keys_alone)


def sort_positions(eqn: core.JaxprEqn, *operands: ArrayFacts) -> Relation | None:
    """Return the order that sorts a vector of positions, as `argsort` does.

    Dropless mixtures of experts sort rows by expert, and restore them with the `argsort` of that order (MaxText).
    """
    keys, numbers = operands if len(operands) == 2 and eqn.params["num_keys"] == 1 else (None, None)
    if keys is None or numbers is None or keys.positions is None or keys.positions.shifted or len(keys.axes) != 1:
        return None
    (axis,), found = keys.axes, keys.positions
    if axis is None or not counts_up(numbers, 0) or not (found.once or eqn.params["is_stable"]):
        return None
    arrays = [((axis,), ["keys"]), ((found.along,), ["groups"])]
    order = ArrayFacts(positions=Positions(axis, once=True))
    if found.once:  # the inverse permutation
        return Relation(arrays, [["rank"], ["groups"]], ["rank"], facts=[ArrayFacts(), order], positions=[0])
    rows = Axis(axis.size)
    return Relation(
        arrays,
        [["rows"], ["rows"]],
        ["keys"],
        "rows of one group stay in their order",
        new={"rows": rows},
        facts=[ArrayFacts(positions=found), order],
        positions=[0],
        sort=Grouping(rows, found.along, found.source),
    )


def gather(eqn: core.JaxprEqn, operand: ArrayFacts, indices: ArrayFacts) -> Relation:
    """Freeze the axes that are looked up, and treat axes that every slice covers elementwise.

    If the indices are positions along the looked-up axis, the two axes are united instead: the weights of an expert, or
    a code word.
    """
    dims, sizes, shape = eqn.params["dimension_numbers"], eqn.params["slice_sizes"], shape_of(eqn.invars[0])
    collapsed, batched = dims.collapsed_slice_dims, dims.operand_batching_dims
    indexed = [a for a, size in enumerate(shape) if a not in batched and (a in collapsed or sizes[a] != size)]
    in_order = _in_order(eqn, dims.start_indices_batching_dims)
    found = _found_by(indices, dims.start_index_map, shape, {axis: sizes[axis] for axis in indexed}, in_order)
    labels: dict[int, Hashable] = {axis: ("operand", axis) for axis in indexed}
    labels |= {a: ("index", i) for a, i in zip(batched, dims.start_indices_batching_dims, strict=True)}
    kept = other_axes(len(shape), [*collapsed, *batched])
    windows = {i: ("result", a) if a in indexed else a for i, a in zip(dims.offset_dims, kept, strict=True)}
    return Relation(
        [
            (operand.axes, [labels.get(axis, axis) for axis in range(len(shape))]),
            *_indices(indices, {labels[axis]: column for axis, column in found.items()}),
        ],
        [_with_windows(windows, len(shape_of(eqn.outvars[0])))],
        {
            ("index", len(indices.axes) - 1),
            *(("result", axis) for axis in indexed),
            *(("operand", axis) for axis in indexed if axis not in found),
        },
        positions=[1] if found else [],
    )


def _with_windows(windows: Mapping[int, Hashable], rank: int) -> list[Hashable]:
    """Return a label for each axis of the slices: that of its window or of an index axis."""
    of_index = iter(range(rank))
    return [windows[i] if i in windows else ("index", next(of_index)) for i in range(rank)]


def _indices(indices: ArrayFacts, found: Mapping[Any, ArrayFacts]) -> list[tuple[ArrayAxes, Sequence[Hashable]]]:
    """Return the indices as labelled arrays, each with its own axes and the axis that its positions index."""
    labels = [("index", i) for i in range(len(indices.axes))]
    columns = [(label, column, column.positions) for label, column in found.items()]
    arrays = [((*column.axes, own.along), [*labels, label]) for label, column, own in columns if own]
    return [(indices.axes, labels), *arrays]


def _in_order(eqn: core.JaxprEqn, batched: Sequence[SupportsIndex]) -> bool:
    """Return whether the equation promises sorted indices, with several indices for each batch entry."""
    shape = shape_of(eqn.invars[1])[:-1]
    return eqn.params["indices_are_sorted"] and math.prod(shape[axis] for axis in other_axes(len(shape), batched)) > 1


def _found_by(
    indices: ArrayFacts, by: Sequence[SupportsIndex], shape: Sequence[int], indexed: Mapping[int, int], in_order: bool
) -> dict[int, ArrayFacts]:
    """Return the positions that index each axis, or nothing if they do not select exactly one entry each.

    The indices have a column for each axis in `by`, and take `indexed[axis]` entries at once. A permutation would break
    the promise that they are `in_order`.
    """
    columns = indices.columns or (indices,)
    if in_order or len(columns) != len(by):
        return {}
    found: dict[int, ArrayFacts] = {}
    for axis, column in zip(map(int, by), columns, strict=True):
        if column.positions is not None:
            if indexed.get(axis) != 1 or column.positions.shifted or shape[axis] != column.positions.along.size:
                return {}
            found[axis] = column
        elif axis not in indexed:
            return {}
    return found


def join_columns(eqn: core.JaxprEqn, *operands: ArrayFacts) -> Relation | None:
    """Return indices into several axes: MaxText writes gates to pairs of token and expert."""
    last = len(shape_of(eqn.outvars[0])) - 1
    if eqn.params["dimension"] != last or any(shape_of(atom)[last] != 1 for atom in eqn.invars):
        return None
    if all(operand.positions is None for operand in operands):
        return None
    labels, every = [*range(last), "column"], range(len(operands))
    relation = Relation([(operand.axes, labels) for operand in operands], [labels], ["column"])
    return replace(relation, facts=[ArrayFacts(columns=operands)], positions=every)


def scatter(eqn: core.JaxprEqn, operand: ArrayFacts, indices: ArrayFacts, updates: ArrayFacts) -> Relation:
    """Freeze the axes that updates do not cover; treat all others elementwise.

    If the indices are positions along an axis, entries move together with the units that chose them. The last of
    several updates of one entry wins. The order of updates is therefore frozen unless they are added up, such as the
    messages to a node of a graph network. Adding ones to zeros counts positions, as `bincount` does.
    """
    dims, shape, update_shape = eqn.params["dimension_numbers"], shape_of(eqn.invars[0]), shape_of(eqn.invars[2])
    inserted, together = dims.inserted_window_dims, dims.scatter_indices_batching_dims
    in_order = _in_order(eqn, together)
    found = _found_by(indices, dims.scatter_dims_to_operand_dims, shape, dict.fromkeys(inserted, 1), in_order)
    kept = other_axes(len(shape), [*inserted, *dims.operand_batching_dims])
    windows = dict(zip(dims.update_window_dims, kept, strict=True))
    covered = {axis for i, axis in windows.items() if update_shape[i] == shape[axis]}
    by_number = [axis for axis in (*inserted, *kept) if axis not in found and axis not in covered]
    of_batch = {axis: ("index", i) for axis, i in zip(dims.operand_batching_dims, together, strict=True)}

    def labels(array: str) -> Sequence[Hashable]:
        return [(array, axis) if axis in by_number else of_batch.get(axis, axis) for axis in range(len(shape))]

    once = indices.positions is not None and indices.positions.once and 0 in found
    last_wins = in_order or (eqn.primitive.name == "scatter" and not once)
    rows = [i for i in range(len(indices.axes) - 1) if in_order or i not in together] if last_wins else []
    update_labels = {i: axis if axis in covered else ("update", i) for i, axis in windows.items()}
    return Relation(
        [
            (operand.axes, labels("operand")),
            (updates.axes, _with_windows(update_labels, len(update_shape))),
            *_indices(indices, found),
        ],
        [labels("result")],
        {
            *((array, axis) for array in ("operand", "result") for axis in by_number),
            *(("update", i) for i in windows),
            *(("index", i) for i in (*rows, len(indices.axes) - 1)),
        },
        facts=[ArrayFacts(counts=_counted(eqn, operand, indices, updates))] if found else (),
        positions=[1] if found else [],
    )


def _counted(eqn: core.JaxprEqn, operand: ArrayFacts, indices: ArrayFacts, updates: ArrayFacts) -> object:
    """Return the source of the positions that a scatter counts exactly, or None if it does not count."""
    zeros, ones = operand.value, updates.value
    if eqn.primitive.name != "scatter-add" or zeros is None or ones is None or indices.positions is None:
        return None
    is_count = not zeros.any() and (ones == 1).all() and zeros.ndim == 1 and _holds_positions(eqn.outvars[0])
    return indices.positions.source if is_count else None


def dynamic_slice(eqn: core.JaxprEqn, operand: ArrayFacts, *starts: ArrayFacts) -> Relation:
    """Freeze the axes that are only partly read."""
    return positional(eqn, [operand], resized_axes(eqn.invars[0], eqn.outvars[0]))


def dynamic_update_slice(eqn: core.JaxprEqn, operand: ArrayFacts, update: ArrayFacts, *starts: ArrayFacts) -> Relation:
    """Freeze the axes that are only partly replaced."""
    return positional(eqn, [operand, update], resized_axes(*eqn.invars[:2]))


def move_positions(rule: Rule) -> Rule:
    """Return a rule that reshapes, converts, selects or copies positions."""

    def move(eqn: core.JaxprEqn, operand: ArrayFacts, *rest: ArrayFacts) -> Relation | None:
        found, relation = operand.positions, rule(eqn, operand, *rest)
        if found is None or relation is None or not _holds_positions(eqn.outvars[0]):
            return None
        if math.prod(shape_of(eqn.invars[0])) != math.prod(shape_of(eqn.outvars[0])):
            found = Positions(found.along, found.reason, found.shifted)
        once = found.once and len(shape_of(eqn.outvars[0])) == 1
        return replace(relation, facts=[ArrayFacts(positions=replace(found, once=once))], positions=[0])

    return move


def shift_positions(eqn: core.JaxprEqn, operand: ArrayFacts, by: ArrayFacts) -> Relation | None:
    """Return positions counted from the end, as indexing computes them for negative indices."""
    if operand.positions is None or by.value is None:
        return None
    shifted = Positions(operand.positions.along, operand.positions.reason, shifted=True)
    return replace(elementwise(eqn, operand, by), facts=[ArrayFacts(positions=shifted)], positions=[0])


def is_negative(eqn: core.JaxprEqn, operand: ArrayFacts, bound: ArrayFacts) -> Relation | None:
    """Return False for all entries if the operand holds positions, which are never negative."""
    if operand.positions is None or operand.positions.shifted or bound.value is None or bound.value.any():
        return None
    shape = shape_of(eqn.outvars[0])
    return Relation([], [range(len(shape))], facts=[ArrayFacts(value=np.broadcast_to(False, shape))], positions=[0])


def choose_positions(eqn: core.JaxprEqn, which: ArrayFacts, *cases: ArrayFacts) -> Relation | None:
    """Return the chosen case, if the choice is known."""
    numbers = set() if which.value is None else set(which.value.ravel().tolist())
    chosen = [case for i, case in enumerate(cases) if i in numbers]
    return _same(chosen[0], len(cases) + 1) if len(numbers) == len(chosen) == 1 else None


def _same(array: ArrayFacts, operands: int) -> Relation:
    """Return the relation whose result is an array, with all facts about it."""
    labels = range(len(array.axes))
    return Relation([(array.axes, labels)], [labels], facts=[array], positions=range(operands))


def clip_positions(eqn: core.JaxprEqn, left: ArrayFacts, right: ArrayFacts) -> Relation | None:
    """Return the positions unchanged if a maximum with zero cannot change them, as in `bincount`."""
    (found, bound), atom = ((left, right), eqn.invars[0]) if left.positions else ((right, left), eqn.invars[1])
    if found.positions is None or found.positions.shifted or bound.value is None or not (bound.value <= 0).all():
        return None
    return _same(found, 2) if shape_of(atom) == shape_of(eqn.outvars[0]) else None


def compare_positions(eqn: core.JaxprEqn, left: ArrayFacts, right: ArrayFacts) -> Relation | None:
    """Return one-hot vectors, made by comparing positions with all positions of their axis along a new axis."""
    found, known = (left, right) if left.positions else (right, left)
    varying = [axis for axis, one in enumerate(known.axes) if one is not None]
    if found.positions is None or found.positions.shifted or len(varying) != 1 or not counts_up(known, varying[0]):
        return None
    ((axis,), along), shape = (varying, found.positions.along), shape_of(eqn.outvars[0])
    if shape[axis] != along.size or (found.axes and found.axes[axis] is not None):
        return None
    arrays = [((*found.axes, along), [*range(len(found.axes)), axis])]
    return Relation(arrays, [range(len(shape))], positions=[0, 1])
