"""Rules of products, convolutions and linear algebra."""

from collections.abc import Hashable

from jax.extend import core

from mcomb.symmetry.arrays import Array, ArrayAxes, shape_of
from mcomb.symmetry.axes import Axis, find, split_product, unite
from mcomb.symmetry.constraints import Constraints, Labels
from mcomb.symmetry.rules.common import freeze_everything


def dot_general(constraints: Constraints, eqn: core.JaxprEqn, left: ArrayAxes, right: ArrayAxes) -> list[ArrayAxes]:
    """Unite the batch axes of both sides, and the contracted axes, because sums may be in any order."""
    contracted, batch = eqn.params["dimension_numbers"]
    labels = []
    for side, operand in enumerate((left, right)):
        shared: dict[int, tuple[str | int, int]] = {axis: ("contracted", i) for i, axis in enumerate(contracted[side])}
        shared |= {axis: ("batch", i) for i, axis in enumerate(batch[side])}
        labels.append([shared.get(axis, (side, axis)) for axis in range(len(operand))])
    kept = [label for side in (0, 1) for label in labels[side] if label[0] == side]
    batches = [("batch", i) for i in range(len(batch[0]))]
    return constraints.relate([(left, labels[0]), (right, labels[1])], [[*batches, *kept]])


def convolution(constraints: Constraints, eqn: core.JaxprEqn, image: ArrayAxes, kernel: ArrayAxes) -> list[ArrayAxes]:
    """Contract the channels of each group, and freeze spatial positions.

    In the derivative of a grouped convolution, the images are grouped, with one group for each group of filters.
    """
    groups, of_images = eqn.params["feature_group_count"], eqn.params["batch_group_count"]
    dims, (image_shape, kernel_shape) = eqn.params["dimension_numbers"], map(shape_of, eqn.invars)
    constraints.freeze(image[axis] for axis in dims.lhs_spec[2:])
    constraints.freeze(kernel[axis] for axis in dims.rhs_spec[2:])
    batch, channels = (image[axis] for axis in dims.lhs_spec[:2])
    filters, depth = (kernel[axis] for axis in dims.rhs_spec[:2])
    images, outputs, inputs = image_shape[dims.lhs_spec[0]], *(kernel_shape[axis] for axis in dims.rhs_spec[:2])
    inner = (groups * of_images, outputs // (groups * of_images))
    batches = constraints.split(batch, (of_images, images // of_images), split_product)
    (result,) = constraints.relate(
        [
            (
                (*batches, *constraints.split(channels, (groups, inputs), split_product)),
                ("group", "batch", "group", "in"),
            ),
            ((*constraints.split(filters, inner, split_product), depth), ("group", "out", "in")),
        ],
        [("batch", "group", "out")],
    )
    shape = shape_of(eqn.outvars[0])
    axes = dict(zip(dims.out_spec, (result[0], constraints.join(result[1:], inner)), strict=False))
    return [tuple(axes.get(axis, Axis(size, constraints.reason)) for axis, size in enumerate(shape))]


def ragged_dot(
    constraints: Constraints, eqn: core.JaxprEqn, rows: ArrayAxes, matrices: ArrayAxes, sizes: ArrayAxes
) -> list[ArrayAxes]:
    """Multiply each group of rows with its own matrix, and freeze rows and groups."""
    constraints.explain(eqn.primitive.name, "groups take the rows in turn")
    axes = _ragged_axes(eqn)
    if axes is None:
        return freeze_everything(constraints, eqn, rows, matrices, sizes)
    ragged, group = axes
    constraints.freeze([rows[ragged], matrices[group], *sizes])
    return _ragged_product(constraints, eqn, rows, matrices, Axis(shape_of(eqn.invars[0])[ragged], constraints.reason))


def ragged_dot_of_groups(
    constraints: Constraints, eqn: core.JaxprEqn, rows: Array, matrices: Array, sizes: Array
) -> list[Array] | None:
    """Leave the groups free if the rows were sorted by the same groups that are counted (MaxText).

    Each row then meets the matrix of its group in any order of the groups.
    """
    axes = _ragged_axes(eqn)
    if axes is None or sizes.counts is None or (row_axis := rows.axes[axes[0]]) is None:
        return None
    sorts = [
        sort for sort in constraints.groupings if find(sort.rows) is find(row_axis) and sort.source is sizes.counts
    ]
    if not sorts:
        return None
    for axis in (matrices.axes[axes[1]], *sizes.axes):
        if axis is not None:
            unite(sorts[0].groups, axis, constraints.reason)
    constraints.record([((sorts[0].groups,), ["groups"])])
    return [
        *map(Array, _ragged_product(constraints, eqn, constraints.plain(rows), constraints.plain(matrices), row_axis))
    ]


def _ragged_axes(eqn: core.JaxprEqn) -> tuple[int, int] | None:
    """Return the axis of rows on the left and that of groups on the right, or None for other products."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, batch), (ragged,) = numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions
    groups = list(numbers.rhs_group_dimensions)
    return None if len(groups) != 1 or ragged in contracted[0] or any(batch) else (ragged, groups[0])


def _ragged_product(
    constraints: Constraints, eqn: core.JaxprEqn, rows: ArrayAxes, matrices: ArrayAxes, result_rows: Axis
) -> list[ArrayAxes]:
    """Return the product of rows and matrices, with `result_rows` as its rows and without the groups."""
    ragged, group = _ragged_axes(eqn) or (0, 0)
    contracted = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers[0]
    shared = [{axis: ("contracted", i) for i, axis in enumerate(side)} for side in contracted]
    left = [shared[0].get(axis, ("left", axis)) for axis in range(len(rows))]
    right = [shared[1].get(axis, ("right", axis)) for axis in range(len(matrices))]
    kept = [label for label in left if label[0] == "left"]
    kept += [label for axis, label in enumerate(right) if label[0] == "right" and axis != group]
    return constraints.relate([(rows, left), (matrices, right)], [kept], {("left", ragged): result_rows})


def factorisation(constraints: Constraints, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """Freeze the last two axes, which are rows and columns of matrices; treat batch axes elementwise."""
    batch = len(operands[0]) - 2
    for operand in operands:
        constraints.freeze(operand[batch:])

    def labels(rank: int, *array: Hashable) -> Labels:
        return [*range(batch), *((*array, axis) for axis in range(rank - batch))]

    shapes = [shape_of(var) for var in eqn.outvars]
    return constraints.relate(
        [(operand, labels(len(operand), "operand", i)) for i, operand in enumerate(operands)],
        [labels(len(shape), "result", i) for i, shape in enumerate(shapes)],
        {
            ("result", i, axis): Axis(size, constraints.reason)
            for i, shape in enumerate(shapes)
            for axis, size in enumerate(shape[batch:])
        },
    )
