"""Rules of products, convolutions and linear algebra."""

from collections.abc import Hashable
from dataclasses import replace

from jax.extend import core

from mcomb.symmetry.facts import ArrayFacts, Relation, blocks, shape_of


def dot_general(eqn: core.JaxprEqn, left: ArrayFacts, right: ArrayFacts) -> Relation:
    """Unite the batch axes of both sides, and the contracted axes, because sums may be in any order."""
    return _product(left, right, *eqn.params["dimension_numbers"])


def _product(
    left: ArrayFacts, right: ArrayFacts, contracted: tuple, batch: tuple, dropped: tuple[Hashable, ...] = ()
) -> Relation:
    """Return the relation of a product, whose result has the batch axes and then those of each side."""
    labels: list[list[Hashable]] = []
    for side, operand in enumerate((left, right)):
        own = {axis: ("contracted", i) for i, axis in enumerate(contracted[side])}
        own |= {axis: ("batch", i) for i, axis in enumerate(batch[side])}
        labels.append([own.get(axis, (side, axis)) for axis in range(len(operand.axes))])
    batches = [("batch", i) for i in range(len(batch[0]))]
    shared = {*batches, *(("contracted", i) for i in range(len(contracted[0]))), *dropped}
    kept = [label for side in labels for label in side if label not in shared]
    return Relation([(left.axes, labels[0]), (right.axes, labels[1])], [[*batches, *kept]])


def convolution(eqn: core.JaxprEqn, image: ArrayFacts, kernel: ArrayFacts) -> Relation:
    """Contract the channels of each group, and freeze spatial positions.

    In the derivative of a grouped convolution, the images are grouped, with one group for each group of filters.
    """
    p = eqn.params
    of_channels, of_images, dims = p["feature_group_count"], p["batch_group_count"], p["dimension_numbers"]
    images, (outputs, inputs) = (
        shape_of(eqn.invars[0])[dims.lhs_spec[0]],
        (shape_of(eqn.invars[1])[axis] for axis in dims.rhs_spec[:2]),
    )
    groups = ("group", of_channels * of_images)
    filters = blocks(groups, ("out", outputs // groups[1]))
    arrays = {
        "image": (
            dims.lhs_spec,
            [
                blocks(("group", of_images), ("batch", images // of_images)),
                blocks(("group", of_channels), ("in", inputs)),
            ],
        ),
        "kernel": (dims.rhs_spec, [filters, "in"]),
        "result": (dims.out_spec, ["batch", filters]),
    }
    frozen = {(array, axis) for array, (spec, _) in arrays.items() for axis in spec[2:]}
    labels = {
        array: [dict(zip(spec, own, strict=False)).get(axis, (array, axis)) for axis in range(len(spec))]
        for array, (spec, own) in arrays.items()
    }
    return Relation([(image.axes, labels["image"]), (kernel.axes, labels["kernel"])], [labels["result"]], frozen)


def ragged_dot(eqn: core.JaxprEqn, rows: ArrayFacts, matrices: ArrayFacts, sizes: ArrayFacts) -> Relation | None:
    """Multiply each group of rows with its own matrix, and freeze rows and groups."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, batch), (ragged,) = numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions
    if len(numbers.rhs_group_dimensions) != 1 or ragged in contracted[0] or any(batch):
        return None
    group = (1, numbers.rhs_group_dimensions[0])
    product = _product(rows, matrices, contracted, batch, dropped=(group,))
    operands = [*product.operands, (sizes.axes, [group])]
    return Relation(operands, product.results, {(0, ragged), group}, "groups take the rows in turn")


def ragged_dot_of_groups(
    eqn: core.JaxprEqn, rows: ArrayFacts, matrices: ArrayFacts, sizes: ArrayFacts
) -> Relation | None:
    """Leave the groups free if the rows were sorted by the same groups that are counted (MaxText).

    Each row then meets the matrix of its group in any order of the groups.
    """
    relation = ragged_dot(eqn, rows, matrices, sizes)
    row = rows.axes[eqn.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions[0]]
    if relation is None or row is None or sizes.counts is None or sizes.axes[0] is None:
        return None
    return replace(relation, frozen=(), grouped=(row, sizes.counts, sizes.axes[0]))
