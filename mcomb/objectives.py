"""What networks are measured by, defined once for training, matching and evaluation.

An *objective*, a loss or a metric, is a function of the output and the label of one example that returns a sum and a
count. Both are added up over all examples, and the result is their quotient: so padding that is not counted changes
nothing, and a long example weighs more than a short one. Outputs and labels may be arrays or trees of arrays.

    def absolute_error(output, target):
        return jnp.abs(output - target).sum(), output.size
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Bool, Float, Int

from mcomb.base import Array, Labels, UserError, brief, list_some, output_shapes

Objective = Callable[[Any, Any], tuple[Any, Any]]
"""A function (output, label) of one example that returns a sum and a count."""


def cross_entropy(logits: Array, label: Array) -> tuple[Array, int]:
    """The cross-entropy of the logits of classes with the index of one: the loss of a classifier."""
    if len(_shape(logits)) != 1:
        raise UserError(
            f"the function returns {_shape(logits)} for an example, and the loss takes the logits of classes: let it "
            "return those, or give another loss, such as mcomb.token_cross_entropy for the logits of tokens"
        )
    _require_an_index_each(logits, label)
    return optax.softmax_cross_entropy_with_integer_labels(at_least_float32(logits), label), 1


def token_cross_entropy(logits: Array, tokens: Array) -> tuple[Array, Array]:
    """The cross-entropy of the logits at each position with the token there; those below zero are left out.

    The perplexity is the exponential of the mean. Padding is left out by `np.where(tokens == PADDING, -1, tokens)`.
    """
    _require_an_index_each(logits, tokens)
    is_real = tokens >= 0
    losses = optax.softmax_cross_entropy_with_integer_labels(at_least_float32(logits), jnp.where(is_real, tokens, 0))
    return jnp.sum(losses, where=is_real), jnp.sum(is_real)


def accuracy(logits: Array, labels: Array) -> tuple[Array, Array]:
    """How many labels, one or one at each position, have the largest logit; those below zero are left out."""
    _require_an_index_each(logits, labels)
    return jnp.sum((predict(logits) == labels) & (labels >= 0)), jnp.sum(labels >= 0)


def squared_error(output: Array, target: Array) -> tuple[Array, int]:
    """The squared differences of all entries from those of the target."""
    if _shape(output) != _shape(target):
        raise UserError(
            f"the function returns {_shape(output)} for an example, whose label is {_shape(target)}: "
            "give both one shape"
        )
    return jnp.sum(jnp.square(at_least_float32(output - target))), jnp.size(output)


def predict(logits: Float[Array, "... classes"]) -> Int[Array, "..."]:
    """The label of the largest logit, and -1 where that is infinite or not a number: no label is predicted there."""
    return jnp.where(jnp.isfinite(logits.max(-1)), logits.argmax(-1), -1)


class Outcome(NamedTuple):
    """The loss of each example, its predicted label (-1: none), and whether that label is correct."""

    loss: Float[Array, "n"]
    predicted: Int[Array, "n"]
    correct: Bool[Array, "n"]


def classify(logits: Float[Array, "n classes"], labels: Int[Array, "n"]) -> Outcome:
    """The cross-entropy, the predicted label (that of the largest logit) and its correctness, for each example."""
    predicted = predict(logits)
    losses = optax.softmax_cross_entropy_with_integer_labels(at_least_float32(logits), labels)
    return Outcome(losses, predicted, predicted == labels)


def add_up(objective: Objective, outputs: Any, labels: Labels, is_real: Bool[Array, "n"]) -> tuple[Array, Array]:
    """The sum and the count of an objective over the real examples of a batch; whatever the others give is left out."""
    total, count = jax.vmap(objective)(outputs, labels)
    return jnp.sum(at_least_float32(total), where=is_real), jnp.sum(at_least_float32(count), where=is_real)


def check_objectives(objectives: Mapping[str, Objective], outputs: Any, labels: Labels, rows: int) -> None:
    """Raises an error unless objectives, by name, take such outputs and labels and return a sum and a count.

    The outputs are those of the first `rows` examples; only their shapes and dtypes matter.
    """
    shapes = [leaf.shape for leaf in jax.tree.leaves(outputs)]
    if not shapes or any(shape[:1] != (rows,) for shape in shapes):
        said = list_some(shapes) or "no array"
        raise UserError(f"the function returns {said} for {rows} examples: let their axis come first in each array")
    for name, objective in objectives.items():
        what = "the loss" if name == "loss" else f"the metric {brief(name)}"
        if not callable(objective) or not isinstance(objective, Hashable):
            raise UserError(f"{what} is {brief(objective)}: give a function of the output and the label of an example")
        found = output_shapes(jax.vmap(objective), outputs, jax.tree.map(lambda leaf: leaf[:rows], labels))
        returned = [(leaf.shape[1:], leaf.dtype) for leaf in jax.tree.leaves(found)]
        are_numbers = [shape == () and _is_real(dtype) for shape, dtype in returned] == [True, True]
        if not isinstance(found, tuple) or len(found) != 2 or not are_numbers:
            said = list_some([f"{dtype} of shape {shape}" for shape, dtype in returned]) or "nothing"
            raise UserError(f"{what} returns {said} for an example: let it return two numbers, a sum and a count")
        if objective in (cross_entropy, token_cross_entropy):
            _check_range(labels, outputs.shape[-1], padded=objective is token_cross_entropy)


def _check_range(labels: Array, classes: int, padded: bool) -> None:
    """Raises an error if a label is no index of a class: it would be taken for another, or for none."""
    values = np.asarray(labels)
    least, largest = int(values.min()), int(values.max())
    if (least < 0 and not padded) or largest >= classes:
        raise UserError(f"there are labels from {least} to {largest} and {classes} logits: give labels from 0 on")


def _require_an_index_each(logits: Array, labels: Array) -> None:
    """Raises an error unless the labels of an example are integers, one for the logits at each position."""
    if 0 in (_shape(logits) or (0,))[-1:]:
        raise UserError(f"the function returns {_shape(logits)} for an example, no logits: let it return one or more")
    if _shape(labels) != _shape(logits)[:-1] or not jnp.issubdtype(jnp.result_type(labels), jnp.integer):
        kind = f"dtype {jnp.result_type(labels)} and shape {_shape(labels)}"
        raise UserError(
            f"the function returns {_shape(logits)} for an example, whose labels are of {kind}: give an index of a "
            "logit for each but the last axis, or another loss"
        )


def _shape(value: Any) -> tuple[int, ...]:
    """The shape of an array; an error for a tree of them."""
    if value is None:
        raise UserError("there are no labels, and the loss or a metric needs them: give labels, or a loss without")
    if not hasattr(value, "shape"):
        raise UserError(f"outputs or labels are a {type(value).__name__}: give arrays, or a loss that takes this")
    return value.shape


def _is_real(dtype: Any) -> bool:
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_))


def at_least_float32(values: Array) -> Array:
    """The values, half precision in single: sums would lose too much."""
    values = jnp.asarray(values)
    is_half = jnp.issubdtype(values.dtype, jnp.floating) and values.dtype.itemsize < 4
    return values.astype(jnp.float32) if is_half else values
