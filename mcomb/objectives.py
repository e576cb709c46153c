"""The loss of a classifier and the labels it predicts, defined once for training, matching and evaluation."""

from typing import NamedTuple

import optax
from jaxtyping import Bool, Float, Int

from mcomb.base import Array


class Outcome(NamedTuple):
    """The loss of each example, its predicted label, and whether that label is correct."""

    loss: Float[Array, "n"]
    predicted: Int[Array, "n"]
    correct: Bool[Array, "n"]


def classify(logits: Float[Array, "n classes"], labels: Int[Array, "n"]) -> Outcome:
    """The cross-entropy, the predicted label (that of the largest logit) and its correctness, for each example."""
    predicted = logits.argmax(axis=-1)
    return Outcome(optax.softmax_cross_entropy_with_integer_labels(logits, labels), predicted, predicted == labels)
