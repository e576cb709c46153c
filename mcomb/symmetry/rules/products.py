"""Rules of products, convolutions and linear algebra."""

from collections.abc import Hashable
from typing import Any

from jax.extend import core

from mcomb.symmetry.axes import Axis, find, split_product, unite
from mcomb.symmetry.interpreter import ArrayAxes, Counts, Interpreter, Labels
from mcomb.symmetry.rules.common import freeze_everything, shape_of, split_list
from mcomb.symmetry.rules.control import open_jaxpr, unite_arrays


def dot_general(interp: Interpreter, eqn: core.JaxprEqn, left: ArrayAxes, right: ArrayAxes) -> list[ArrayAxes]:
    """A sum over pairs of entries, in any order: what is contracted is one axis of both sides, and so is a batch."""
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
    """A product over the channels of each group; positions in space are frozen.

    In the derivative of a grouped convolution it is the images that are in groups, one for each group of filters.
    """
    groups, of_images = eqn.params["feature_group_count"], eqn.params["batch_group_count"]
    dims, (image_shape, kernel_shape) = eqn.params["dimension_numbers"], map(shape_of, eqn.invars)
    interp.freeze(image[axis] for axis in dims.lhs_spec[2:])
    interp.freeze(kernel[axis] for axis in dims.rhs_spec[2:])
    batch, channels = (image[axis] for axis in dims.lhs_spec[:2])
    filters, depth = (kernel[axis] for axis in dims.rhs_spec[:2])
    images, outputs, inputs = image_shape[dims.lhs_spec[0]], *(kernel_shape[axis] for axis in dims.rhs_spec[:2])
    inner = (groups * of_images, outputs // (groups * of_images))
    batches = interp.split(batch, (of_images, images // of_images), split_product)
    (result,) = interp.relate(
        [
            ((*batches, *interp.split(channels, (groups, inputs), split_product)), ("group", "batch", "group", "in")),
            ((*interp.split(filters, inner, split_product), depth), ("group", "out", "in")),
        ],
        [("batch", "group", "out")],
    )
    shape = shape_of(eqn.outvars[0])
    axes = dict(zip(dims.out_spec, (result[0], interp.join(result[1:], inner)), strict=False))
    return [tuple(axes.get(axis, Axis(size, interp.reason)) for axis, size in enumerate(shape))]


def ragged_dot(
    interp: Interpreter, eqn: core.JaxprEqn, rows: ArrayAxes, matrices: ArrayAxes, sizes: ArrayAxes
) -> list[ArrayAxes]:
    """A product of each group of rows with a matrix of its own; the order of rows and of groups matters."""
    interp.explain(eqn.primitive.name, "groups take the rows in turn")
    axes = _ragged_axes(eqn)
    if axes is None:
        return freeze_everything(interp, eqn, rows, matrices, sizes)
    ragged, group = axes
    interp.freeze([rows[ragged], matrices[group], *sizes])
    return _ragged_product(interp, eqn, rows, matrices, Axis(shape_of(eqn.invars[0])[ragged], interp.reason))


def ragged_dot_of_groups(
    interp: Interpreter, eqn: core.JaxprEqn, rows: Any, matrices: Any, sizes: Any
) -> list[ArrayAxes] | None:
    """The same of rows that were sorted by the very groups that are counted: the groups may be exchanged.

    For each row then meets the matrix of its group, wherever these are.
    """
    axes = _ragged_axes(eqn)
    rows, matrices = interp.plain(rows), interp.plain(matrices)
    if axes is None or not isinstance(sizes, Counts) or rows[axes[0]] is None:
        return None
    ragged, group = axes
    found = [one for one in interp.groupings if find(one.rows) is find(rows[ragged]) and one.source is sizes.source]
    if not found:
        return None
    groups = found[0].groups
    for axis in (matrices[group], *sizes):
        if axis is not None:
            unite(groups, axis, interp.reason)
    interp.record([((groups,), ["groups"])])
    return _ragged_product(interp, eqn, rows, matrices, rows[ragged])


def _ragged_axes(eqn: core.JaxprEqn) -> tuple[int, int] | None:
    """The axis of rows on the left and that of groups on the right; None for products of another kind."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, batch), (ragged,) = numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions
    groups = list(numbers.rhs_group_dimensions)
    return None if len(groups) != 1 or ragged in contracted[0] or any(batch) else (ragged, groups[0])


def _ragged_product(
    interp: Interpreter, eqn: core.JaxprEqn, rows: ArrayAxes, matrices: ArrayAxes, result_rows: Axis
) -> list[ArrayAxes]:
    """Rows times matrices, with these rows in the result, and without the groups."""
    ragged, group = _ragged_axes(eqn) or (0, 0)
    contracted = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers[0]
    shared = [{axis: ("contracted", i) for i, axis in enumerate(side)} for side in contracted]
    left = [shared[0].get(axis, ("left", axis)) for axis in range(len(rows))]
    right = [shared[1].get(axis, ("right", axis)) for axis in range(len(matrices))]
    kept = [label for label in left if label[0] == "left"]
    kept += [label for axis, label in enumerate(right) if label[0] == "right" and axis != group]
    return interp.relate([(rows, left), (matrices, right)], [kept], {("left", ragged): result_rows})


def factorisation(interp: Interpreter, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """Freezes the rows and columns of matrices, which are the last two axes; elementwise over a batch of them.

    Singular values by themselves do not depend on the order of rows and columns.
    """
    batch = len(operands[0]) - 2
    for operand in operands:
        if eqn.params.get("compute_uv", True):
            interp.freeze(operand[batch:])
        for axis in operand[batch:]:  # one order of the columns for all rows, and the other way round
            interp.record([((*operand[:batch], axis), range(batch + 1))])

    def labels(rank: int, *array: Hashable) -> Labels:
        return [*range(batch), *((*array, axis) for axis in range(rank - batch))]

    shapes = [shape_of(var) for var in eqn.outvars]
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
    names = [{ordered: name, free: "free"} for name in ("ordered", "solved")]
    before, after = ([*batch, order[-2], order[-1]] for order in names)
    solved = Axis(shape_of(eqn.outvars[0])[ordered], interp.reason)
    return interp.relate([(matrix, [*batch, "row", "column"]), (known, before)], [after], {"solved": solved})


def linear_solve(interp: Interpreter, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """The results of the inner function that solves.

    But if that has a factorisation of the very matrix, which then is not interpreted, it is what the linear map of the
    equations takes to their right sides: if the map and these are permuted, so is the one solution.
    """
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    _, consts, _, known = split_list(operands, lengths.matvec + lengths.vecmat, lengths.solve, lengths.transpose_solve)
    if not any(const is None for const in consts):
        return interp.interpret(*open_jaxpr(jaxprs.solve), [*consts, *known])
    solution = [tuple(Axis(n, tied=True) if n > 1 else None for n in shape_of(var)) for var in eqn.outvars]
    sides = interp.interpret(*open_jaxpr(jaxprs.matvec), [*operands[: lengths.matvec], *solution])
    for pair in zip(sides, known, strict=True):
        unite_arrays(interp, pair)
    return list(solution)
