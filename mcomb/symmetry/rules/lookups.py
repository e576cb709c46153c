"""Rules of indexed reads and writes, and of choices: `argmax`, `top_k` and `sort`.

A program chooses an expert or a code word by its position, and then looks up entries at that position. Experts and code
words may therefore change places. The rules of `Array.positions` track such positions. Any other use of positions
freezes their axis.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, SupportsIndex

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from mcomb.symmetry.arrays import Array, ArrayAxes, Positions, shape_of
from mcomb.symmetry.axes import Axis
from mcomb.symmetry.constraints import Constraints, Labels
from mcomb.symmetry.interpreter import FactRule, Rule
from mcomb.symmetry.known import counts_up
from mcomb.symmetry.rules.common import elementwise, other_axes, positional, resized_axes
from mcomb.symmetry.rules.distinct import is_float
from mcomb.symmetry.rules.reductions import reduction


def arg_reduction(constraints: Constraints, eqn: core.JaxprEqn, operand: Array) -> list[Array]:
    """Return positions along the reduced axis: the nearest code word (VQ-VAE), or the best expert (Switch)."""
    (axes,), (reduced,) = reduction(constraints, eqn, constraints.plain(operand)), eqn.params["axes"]
    return [_chosen(constraints, eqn, operand, axes, reduced)]


def top_k(constraints: Constraints, eqn: core.JaxprEqn, operand: Array) -> list[Array]:
    """Return the largest entries and their positions: the best experts of a token (Mixtral)."""
    axis = eqn.params.get("axis", -1) % len(operand.axes)
    values, ranked = positional(constraints, eqn, [constraints.plain(operand)], [axis], order_blind=True)
    return [Array(values), _chosen(constraints, eqn, operand, ranked, axis)]


def _chosen(constraints: Constraints, eqn: core.JaxprEqn, operand: Array, axes: ArrayAxes, axis: int) -> Array:
    """Return positions chosen by the entries along an axis, and freeze the axis unless the entries are distinct."""
    along = operand.axes[axis]
    if along is None:
        return Array(axes)
    if axis in operand.distinct and is_float(eqn.invars[0]) and _holds(eqn.outvars[-1], along.size - 1):
        return Array(axes, positions=Positions(along, constraints.reason))
    constraints.explain(eqn.primitive.name, "of equal entries it takes the first")
    constraints.freeze([along])
    return Array(axes)


def _holds(atom: Any, number: int) -> bool:
    """Return whether an array's dtype represents all integers up to `number`."""
    dtype = atom.aval.dtype
    if is_float(atom):
        return bool(number <= 2 ** jnp.finfo(dtype).nmant)
    return bool(jnp.issubdtype(dtype, jnp.integer) and number <= jnp.iinfo(dtype).max)


def sort(constraints: Constraints, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """Freeze the axis of the result, and that of the operands only if there are operands other than keys.

    The sorted keys do not depend on the order of the keys, as in a median. Zeros of both signs count as equal.
    """
    keys_alone = eqn.params["num_keys"] == len(operands)
    return positional(constraints, eqn, operands, [eqn.params["dimension"]], order_blind=keys_alone)


def sort_positions(constraints: Constraints, eqn: core.JaxprEqn, *operands: Array) -> list[Array] | None:
    """Return the order that sorts a vector of positions, as `argsort` does.

    Dropless mixtures of experts sort rows by expert, and restore them with the `argsort` of that order (MaxText).
    """
    keys, numbers = operands if len(operands) == 2 and eqn.params["num_keys"] == 1 else (None, None)
    if keys is None or numbers is None or keys.positions is None or keys.positions.shifted or len(keys.axes) != 1:
        return None
    (axis,), found = keys.axes, keys.positions
    if axis is None or not counts_up(numbers, 0) or not (found.once or eqn.params["is_stable"]):
        return None
    if found.once:  # the inverse permutation
        (values, where) = constraints.relate(
            [((axis, found.along), ["before", "along"])],
            [["rank"], ["along"]],
            {"rank": Axis(found.along.size, constraints.reason)},
        )
        return [Array(values), Array(where, positions=Positions(axis, constraints.reason, once=True))]
    rows = constraints.group(axis, found.along, found.source)
    order = Positions(axis, constraints.reason, once=True)
    return [Array((rows,), positions=found), Array((rows,), positions=order)]


def gather(constraints: Constraints, eqn: core.JaxprEqn, operand: Array, indices: Array) -> list[Array]:
    """Freeze the axes that are looked up, and treat axes that every slice covers elementwise.

    If the indices are positions along the looked-up axis, the two axes are united instead: the weights of an expert, or
    a code word.
    """
    dims, sizes, shape = eqn.params["dimension_numbers"], eqn.params["slice_sizes"], shape_of(eqn.invars[0])
    collapsed, batched = dims.collapsed_slice_dims, dims.operand_batching_dims
    indexed = [a for a, size in enumerate(shape) if a not in batched and (a in collapsed or sizes[a] != size)]
    in_order = _in_order(eqn, dims.start_indices_batching_dims)
    found = _found_by(indices, dims.start_index_map, shape, {axis: sizes[axis] for axis in indexed}, in_order)
    axes = constraints.plain(operand)
    if not found:
        constraints.plain(indices)
    constraints.freeze([*(axes[axis] for axis in indexed if axis not in found), *indices.axes[-1:]])
    labels: dict[int, Hashable] = {axis: ("operand", axis) for axis in indexed}
    labels |= {a: ("index", i) for a, i in zip(batched, dims.start_indices_batching_dims, strict=True)}
    kept = other_axes(len(shape), [*collapsed, *batched])
    windows = {i: ("result", a) if a in indexed else a for i, a in zip(dims.offset_dims, kept, strict=True)}
    of_index = iter([("index", i) for i in range(len(indices.axes))])
    (result,) = constraints.relate(
        [
            (axes, [labels.get(axis, axis) for axis in range(len(shape))]),
            *_indices(indices, {labels[axis]: column for axis, column in found.items()}),
        ],
        [[windows[i] if i in windows else next(of_index) for i in range(len(shape_of(eqn.outvars[0])))]],
        {("result", axis): Axis(sizes[axis], constraints.reason) for axis in indexed},
    )
    return [Array(result)]


def _indices(indices: Array, found: Mapping[Any, Array]) -> list[tuple[ArrayAxes, Labels]]:
    """Return the indices as labelled arrays, each with its own axes and the axis that its positions index."""
    labels = [("index", i) for i in range(len(indices.axes))]
    arrays: list[tuple[ArrayAxes, Labels]] = [(indices.axes, labels)]
    for label, column in found.items():
        assert column.positions is not None
        arrays.append(((*column.axes, column.positions.along), [*labels, label]))
    return arrays


def _in_order(eqn: core.JaxprEqn, batched: Sequence[SupportsIndex]) -> bool:
    """Return whether the equation promises sorted indices, with several indices for each batch entry."""
    shape = shape_of(eqn.invars[1])[:-1]
    return eqn.params["indices_are_sorted"] and math.prod(shape[axis] for axis in other_axes(len(shape), batched)) > 1


def _found_by(
    indices: Array, by: Sequence[SupportsIndex], shape: Sequence[int], indexed: Mapping[int, int], in_order: bool
) -> dict[int, Array]:
    """Return the positions that index each axis, or nothing if they do not select exactly one entry each.

    The indices have a column for each axis in `by`, and take `indexed[axis]` entries at once. A permutation would break
    the promise that they are `in_order`.
    """
    columns = indices.columns or (indices,)
    if in_order or len(columns) != len(by):
        return {}
    found: dict[int, Array] = {}
    for axis, column in zip(map(int, by), columns, strict=True):
        if column.positions is not None:
            if indexed.get(axis) != 1 or column.positions.shifted or shape[axis] != column.positions.along.size:
                return {}
            found[axis] = column
        elif axis not in indexed:
            return {}
    return found


def join_columns(constraints: Constraints, eqn: core.JaxprEqn, *operands: Array) -> list[Array] | None:
    """Return indices into several axes: MaxText writes gates to pairs of token and expert."""
    last = len(shape_of(eqn.outvars[0])) - 1
    if eqn.params["dimension"] != last or any(shape_of(atom)[last] != 1 for atom in eqn.invars):
        return None
    if all(operand.positions is None for operand in operands):
        return None
    labels = [*range(last), "column"]
    new = {"column": Axis(len(operands), constraints.reason)}
    (axes,) = constraints.relate([(operand.axes, labels) for operand in operands], [labels], new)
    return [Array(axes, columns=operands)]


def scatter_at(
    constraints: Constraints, eqn: core.JaxprEqn, operand: Array, indices: Array, updates: Array
) -> list[Array] | None:
    """Write to positions along an axis, so that entries move together with the units that chose them.

    The last of several updates of one entry wins. The order of updates is therefore frozen unless they are added up.
    Adding ones to zeros counts positions, as `bincount` does.
    """
    dims, shape = eqn.params["dimension_numbers"], shape_of(eqn.invars[0])
    inserted, together = dims.inserted_window_dims, dims.scatter_indices_batching_dims
    kept = other_axes(len(shape), [*inserted, *dims.operand_batching_dims])
    windows = [shape_of(eqn.invars[2])[axis] for axis in dims.update_window_dims]
    in_order = _in_order(eqn, together)
    found = _found_by(indices, dims.scatter_dims_to_operand_dims, shape, dict.fromkeys(inserted, 1), in_order)
    if not found or windows != [shape[axis] for axis in kept]:
        return None
    axes, update_axes = constraints.plain(operand), constraints.plain(updates)
    labels = _update_labels(eqn, dict(zip(dims.update_window_dims, kept, strict=True)))
    once = indices.positions is not None and indices.positions.once
    apart = [i for i, n in enumerate(shape_of(eqn.invars[1])[:-1]) if n > 1 and i not in together]
    if eqn.primitive.name == "scatter" and apart and not once:
        constraints.freeze(indices.axes[i] for i in apart)
        constraints.freeze(
            a for a, label in zip(update_axes, labels, strict=True) if label in [("index", i) for i in apart]
        )
    by_number = [axis for axis in inserted if axis not in found]
    constraints.freeze(axes[axis] for axis in by_number)
    of_batch = {axis: ("index", i) for axis, i in zip(dims.operand_batching_dims, together, strict=True)}

    def of(array: str) -> Labels:
        return [(array, axis) if axis in by_number else of_batch.get(axis, axis) for axis in range(len(shape))]

    (result,) = constraints.relate(
        [(axes, of("operand")), (update_axes, labels), *_indices(indices, found)],
        [of("result")],
        {
            **{axis: column.positions.along for axis, column in found.items() if column.positions},
            **{("result", axis): Axis(shape[axis], constraints.reason) for axis in by_number},
        },
    )
    return [Array(result, counts=_counted(eqn, operand, indices, updates))]


def _counted(eqn: core.JaxprEqn, operand: Array, indices: Array, updates: Array) -> object:
    """Return the source of the positions that a scatter counts exactly, or None if it does not count."""
    zeros, ones = operand.value, updates.value
    if eqn.primitive.name != "scatter-add" or zeros is None or ones is None or indices.positions is None:
        return None
    is_count = not zeros.any() and (ones == 1).all() and zeros.ndim == 1 and _holds(eqn.outvars[0], ones.size)
    return indices.positions.source if is_count else None


def _update_labels(eqn: core.JaxprEqn, windows: Mapping[int, Hashable]) -> list[Hashable]:
    """Return a label for each axis of a scatter's updates: that of its window or of an index axis."""
    of_index = iter([("index", i) for i in range(len(shape_of(eqn.invars[1])))])
    rank = len(shape_of(eqn.invars[2]))
    return [windows[i] if i in windows else next(of_index) for i in range(rank)]


def scatter(
    constraints: Constraints, eqn: core.JaxprEqn, operand: ArrayAxes, indices: ArrayAxes, updates: ArrayAxes
) -> list[ArrayAxes]:
    """Freeze the axes that updates do not cover; treat all others elementwise.

    Updates that are added up may be in any order, as the messages to a node of a graph network.
    """
    dims = eqn.params["dimension_numbers"]
    shape, update_shape = shape_of(eqn.invars[0]), shape_of(eqn.invars[2])
    windowed = other_axes(len(shape), [*dims.inserted_window_dims, *dims.operand_batching_dims])
    windows = dict(zip(dims.update_window_dims, windowed, strict=True))
    covered = {i: axis for i, axis in windows.items() if update_shape[i] == shape[axis]}
    labels = _update_labels(eqn, {i: covered.get(i, ("update", i)) for i in windows})
    of_index = [("index", i) for i in range(len(indices))]
    batched = dims.scatter_indices_batching_dims
    added = eqn.primitive.name != "scatter" and not _in_order(eqn, batched)
    free = {*covered.values(), *(label for i, label in enumerate(of_index[:-1]) if added and i not in batched)}
    for array, own in ((indices, of_index), (updates, labels)):
        constraints.freeze(axis for axis, label in zip(array, own, strict=True) if label not in free)
    constraints.freeze(axis for i, axis in enumerate(operand) if i not in covered.values())

    def of(array: str) -> Labels:
        return [axis if axis in covered.values() else (array, axis) for axis in range(len(shape))]

    return constraints.relate(
        [(operand, of("operand")), (updates, labels), (indices, of_index)],
        [of("result")],
        {("result", axis): Axis(size, constraints.reason) for axis, size in enumerate(shape)},
    )


def dynamic_slice(
    constraints: Constraints, eqn: core.JaxprEqn, operand: ArrayAxes, *starts: ArrayAxes
) -> list[ArrayAxes]:
    """Freeze the axes that are only partly read."""
    return positional(constraints, eqn, [operand], resized_axes(eqn.invars[0], eqn.outvars[0]))


def dynamic_update_slice(
    constraints: Constraints, eqn: core.JaxprEqn, operand: ArrayAxes, update: ArrayAxes, *starts: ArrayAxes
) -> list[ArrayAxes]:
    """Freeze the axes that are only partly replaced."""
    return positional(constraints, eqn, [operand, update], resized_axes(*eqn.invars[:2]))


def move_positions(rule: Rule) -> FactRule:
    """Return a rule that reshapes, converts, selects or copies positions."""

    def move(constraints: Constraints, eqn: core.JaxprEqn, operand: Array, *rest: Array) -> list[Array] | None:
        found = operand.positions
        if found is None or not _holds(eqn.outvars[0], found.along.size - 1):
            return None
        (axes,) = rule(constraints, eqn, operand.axes, *map(constraints.plain, rest))
        sizes = [math.prod(shape_of(atom)) for atom in (eqn.invars[0], eqn.outvars[0])]
        if sizes[0] != sizes[1]:
            return [Array(axes, positions=Positions(found.along, found.reason, found.shifted))]
        return [Array(axes, positions=replace(found, once=found.once and len(axes) == 1))]

    return move


def shift_positions(constraints: Constraints, eqn: core.JaxprEqn, operand: Array, by: Array) -> list[Array] | None:
    """Return positions counted from the end, as indexing computes them for negative indices."""
    if operand.positions is None or by.value is None:
        return None
    (axes,) = elementwise(constraints, eqn, operand.axes, by.axes)
    return [Array(axes, positions=Positions(operand.positions.along, operand.positions.reason, shifted=True))]


def is_negative(constraints: Constraints, eqn: core.JaxprEqn, operand: Array, bound: Array) -> list[Array] | None:
    """Return False for all entries if the operand holds positions, which are never negative."""
    if operand.positions is None or operand.positions.shifted or bound.value is None or bound.value.any():
        return None
    shape = shape_of(eqn.outvars[0])
    return [Array((None,) * len(shape), value=np.broadcast_to(False, shape))]


def choose_positions(constraints: Constraints, eqn: core.JaxprEqn, which: Array, *cases: Array) -> list[Array] | None:
    """Return the chosen case, if the choice is known."""
    numbers = set() if which.value is None else set(which.value.ravel().tolist())
    chosen = [case for i, case in enumerate(cases) if i in numbers]
    return chosen if len(numbers) == len(chosen) == 1 else None


def clip_positions(constraints: Constraints, eqn: core.JaxprEqn, left: Array, right: Array) -> list[Array] | None:
    """Return the positions unchanged if a maximum with zero cannot change them, as in `bincount`."""
    (found, bound), atom = ((left, right), eqn.invars[0]) if left.positions else ((right, left), eqn.invars[1])
    if found.positions is None or found.positions.shifted or bound.value is None or not (bound.value <= 0).all():
        return None
    return [found] if shape_of(atom) == shape_of(eqn.outvars[0]) else None


def compare_positions(constraints: Constraints, eqn: core.JaxprEqn, left: Array, right: Array) -> list[Array] | None:
    """Return one-hot vectors, made by comparing positions with all positions of their axis along a new axis."""
    found, known = (left, right) if left.positions else (right, left)
    varying = [axis for axis, one in enumerate(known.axes) if one is not None]
    if found.positions is None or found.positions.shifted or len(varying) != 1 or not counts_up(known, varying[0]):
        return None
    ((axis,), along), shape = (varying, found.positions.along), shape_of(eqn.outvars[0])
    if shape[axis] != along.size or (found.axes and found.axes[axis] is not None):
        return None
    positions = ((*found.axes, along), [*range(len(found.axes)), axis])
    return [*map(Array, constraints.relate([positions], [range(len(shape))]))]
