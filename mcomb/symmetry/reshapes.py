"""Reshapes: the mapping between old and new axes, and reshapes that are only read in slices."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.extend import core

from mcomb.symmetry.arrays import Array, ArrayAxes, Reshape, shape_of


def reshape_groups(old_shape: Sequence[int], new_shape: Sequence[int]) -> list[tuple[slice, slice]]:
    """Return the smallest groups of consecutive axes that a reshape maps to each other.

    (6, 5) to (2, 3, 5) has two: axis 0 becomes axes 0 and 1, and axis 1 becomes axis 2. Empty arrays have no groups.
    """
    if 0 in old_shape:
        return []
    groups, i, j = [], 0, 0
    while i < len(old_shape) or j < len(new_shape):
        start, old, new = (i, j), 1, 1
        while True:
            if old <= new and i < len(old_shape):
                old, i = old * old_shape[i], i + 1
            else:
                new, j = new * new_shape[j], j + 1
            if old == new:
                break
        # Axes of size one belong to the preceding group, so that each group starts with a larger axis.
        i += next((n for n, size in enumerate(old_shape[i:]) if size != 1), len(old_shape) - i)
        j += next((n for n, size in enumerate(new_shape[j:]) if size != 1), len(new_shape) - j)
        groups.append((slice(start[0], i), slice(start[1], j)))
    return groups


def describe_reshape(eqn: core.JaxprEqn, axes: ArrayAxes) -> Reshape:
    """Return the reshape of an equation, after its transpose if it has one."""
    old_shape, new_shape = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if eqn.params["dimensions"] is not None:  # a transpose comes first
        old_shape, axes = (tuple(array[i] for i in eqn.params["dimensions"]) for array in (old_shape, axes))
    return Reshape(axes, old_shape, new_shape, tuple(range(len(new_shape))))


def defer_reshape(eqn: core.JaxprEqn, operand: Array, axes: ArrayAxes) -> Array:
    """Return the result of a reshape that is only read in slices, or of a transpose of one."""
    if operand.reshape is None:
        reshape = describe_reshape(eqn, axes)
    else:
        order, moved = operand.reshape.order, moved_axes(eqn) or []
        reshape = replace(operand.reshape, order=tuple(None if axis is None else order[axis] for axis in moved))
    return Array((None,) * len(reshape.order), reshape=reshape)


def moved_axes(eqn: core.JaxprEqn) -> list[int | None] | None:
    """Return the operand's axis for each axis of the result, or None for a new axis of size one.

    Return None instead of a list unless the equation only transposes axes, or adds or removes axes of size one.
    PyTorch's `MultiheadAttention` does so between its product and its slices.
    """
    if eqn.primitive.name == "transpose":
        return list(eqn.params["permutation"])
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if eqn.primitive.name == "squeeze":
        return [axis for axis in range(len(old)) if axis not in eqn.params["dimensions"]]
    if eqn.primitive.name != "broadcast_in_dim":
        return None
    came_from = {axis: i for i, axis in enumerate(eqn.params["broadcast_dimensions"])}
    wanted = tuple(old[came_from[axis]] if axis in came_from else 1 for axis in range(len(new)))
    return [came_from.get(axis) for axis in range(len(new))] if wanted == new else None


def deferrable_reshapes(eqns: Sequence[core.JaxprEqn], outvars: Sequence[Any]) -> set[Any]:
    """Return the results of reshapes, and of their transposes, that are only read in slices.

    The slices must be along the first of several new axes that a group of old axes becomes.
    """
    uses: dict[Any, list[core.JaxprEqn]] = {}
    for eqn in eqns:
        for atom in eqn.invars:
            if not isinstance(atom, core.Literal):
                uses.setdefault(atom, []).append(eqn)

    def sliced_only(var: Any, axes: list[int]) -> list[Any] | None:
        """Return the variable and its transposes if all their uses are slices along these axes."""
        variables = [var]
        for eqn in uses.get(var, ()):
            if (moved := moved_axes(eqn)) is not None:
                inner = sliced_only(eqn.outvars[0], [moved.index(axis) for axis in axes])
                if inner is None:
                    return None
                variables += inner
            elif sliced_axis(eqn) not in axes:
                return None
        return variables if var not in outvars else None

    deferred: set[Any] = set()
    for eqn in eqns:
        if eqn.primitive.name == "reshape" and eqn.params["dimensions"] is None:
            groups = [new for _, new in reshape_groups(shape_of(eqn.invars[0]), shape_of(eqn.outvars[0]))]
            first_axes = [new.start for new in groups if new.stop - new.start > 1]
            deferred |= set(sliced_only(eqn.outvars[0], first_axes) or ())
    return deferred


def sliced_axis(eqn: core.JaxprEqn) -> int | None:
    """Return the one axis that an equation slices contiguously, or None for any other equation."""
    if eqn.primitive.name in ("split", "unstack"):
        return eqn.params["axis"]
    if eqn.primitive.name != "slice" or any(stride != 1 for stride in eqn.params["strides"] or ()):
        return None
    bounds = zip(shape_of(eqn.invars[0]), eqn.params["start_indices"], eqn.params["limit_indices"], strict=True)
    sliced = [axis for axis, (size, start, stop) in enumerate(bounds) if stop - start != size]
    return sliced[0] if len(sliced) == 1 else None
