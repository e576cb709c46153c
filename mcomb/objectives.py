"""The loss of a classifier and the labels it predicts, defined once for training, matching and evaluation."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Bool, Float, Int

from mcomb.base import Array, UserError


class Outcome(NamedTuple):
    """The loss of each example, its predicted label, and whether that label is correct."""

    loss: Float[Array, "n"]
    predicted: Int[Array, "n"]
    correct: Bool[Array, "n"]


def check_labels(logits: Any, labels: Array) -> None:
    """Raises an error unless there are logits for each example, and labels that are their indices.

    An index beyond them would be taken for another, or for none. Of the logits only the shape matters.
    """
    shape: tuple[int, ...] = getattr(logits, "shape", ())
    if len(shape) != 2:
        raise UserError(f"the function returns {shape or 'no array'}: let it return logits, (examples, classes)")
    if not jnp.issubdtype(jnp.result_type(labels), jnp.integer) or jnp.ndim(labels) != 1:
        kind = f"dtype {jnp.result_type(labels)} and shape {jnp.shape(labels)}"
        raise UserError(f"labels are of {kind}: give an index of a class for each example")
    least, largest = int(jnp.min(jnp.asarray(labels))), int(jnp.max(jnp.asarray(labels)))
    if least < 0 or largest >= shape[1]:
        raise UserError(f"there are labels from {least} to {largest} and {shape[1]} logits: give labels from 0 on")


def classify(logits: Float[Array, "n classes"], labels: Int[Array, "n"]) -> Outcome:
    """The cross-entropy, the predicted label (that of the largest logit) and its correctness, for each example."""
    predicted = logits.argmax(axis=-1)
    return Outcome(optax.softmax_cross_entropy_with_integer_labels(logits, labels), predicted, predicted == labels)
