"""Rules of products, convolutions and linear algebra."""

from collections.abc import Hashable

from jax.extend import core

from mcomb.symmetry.axes import Axis, split_product
from mcomb.symmetry.interpreter import ArrayAxes, Interpreter, Labels
from mcomb.symmetry.rules.common import freeze_everything, shape_of, split_list
from mcomb.symmetry.rules.control import open_jaxpr


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
    """A product over the channels of each group; positions in space are frozen."""
    if eqn.params["batch_group_count"] != 1:
        return freeze_everything(interp, eqn, image, kernel)
    groups = eqn.params["feature_group_count"]
    dims = eqn.params["dimension_numbers"]
    outputs, inputs = (shape_of(eqn.invars[1])[axis] for axis in dims.rhs_spec[:2])
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
    shape = shape_of(eqn.outvars[0])
    axes = dict(zip(dims.out_spec, (result[0], interp.join(result[1:], inner)), strict=False))
    return [tuple(axes.get(axis, Axis(size, interp.reason)) for axis, size in enumerate(shape))]


def ragged_dot(
    interp: Interpreter, eqn: core.JaxprEqn, rows: ArrayAxes, matrices: ArrayAxes, sizes: ArrayAxes
) -> list[ArrayAxes]:
    """A product of each group of rows with a matrix of its own; the order of rows and of groups matters.

    Rows that are sorted by their group before and put back afterwards leave groups exchangeable. But that is a property
    of the three together: the sorted rows by themselves depend on the order of the groups.
    """
    interp.explain(eqn.primitive.name, "groups take the rows in turn")
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
    new = {("left", ragged): Axis(shape_of(eqn.invars[0])[ragged], interp.reason)}
    return interp.relate([(rows, left), (matrices, right)], [kept], new)


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
    """The results of the inner function that solves."""
    lengths = eqn.params["const_lengths"]
    _, consts, _, known = split_list(operands, lengths.matvec + lengths.vecmat, lengths.solve, lengths.transpose_solve)
    return interp.interpret(*open_jaxpr(eqn.params["jaxprs"].solve), [*consts, *known])
