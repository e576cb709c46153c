"""Define losses and metrics once for training, matching and evaluation.

An *objective*, a loss or a metric, is a function of the output and the label of one example that returns a sum and a
count. The result is the total of the sums divided by the total of the counts. Padding therefore has no effect if it is
not counted, and long examples weigh more than short ones. Outputs and labels may be arrays or trees of arrays.

    def absolute_error(output, target):
        return jnp.abs(output - target).sum(), output.size
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Bool, Float, Int

from mcomb.errors import UserError, brief, list_some, require_positive
from mcomb.trees import (
    Apply,
    Array,
    Inputs,
    Labels,
    Params,
    at_least_float32,
    count_examples,
    from_lists,
    output_shapes,
)

Objective = Callable[[Any, Any], tuple[Any, Any]]
"""A function (output, label) of one example that returns a sum and a count."""


def cross_entropy(logits: Array, labels: Array) -> tuple[Array, Array]:
    """Return the cross-entropy of logits with class indices: the loss of a classifier or a language model.

    Args:
        logits: Logits of one example, of shape (..., classes).
        labels: Class indices of shape (...): one for a classifier, one at each position for a language model. At a
            position, a negative index is padding and does not count.

    Returns:
        The sum over positions, and their number. The perplexity is the exponential of the mean.

    Raises:
        UserError: The labels are not integers, or do not have the shape of the logits without its last axis.

    Examples:
        >>> mcomb.cross_entropy(jnp.zeros(4), jnp.array(2))  # log 4, and one label
        (Array(1.3862944, dtype=float32), Array(1, dtype=int32))
    """
    _require_an_index_each(logits, labels)
    is_real = labels >= 0
    losses = optax.softmax_cross_entropy_with_integer_labels(at_least_float32(logits), jnp.where(is_real, labels, 0))
    return jnp.sum(losses, where=is_real), jnp.sum(is_real)


def accuracy(logits: Array, labels: Array) -> tuple[Array, Array]:
    """Count the labels with the largest logit; negative labels are padding and do not count.

    Args:
        logits: Logits of one example, of shape (..., classes).
        labels: Class indices of shape (...).

    Returns:
        The number of correct predictions and the number of labels.

    Raises:
        UserError: The labels are not integers, or do not have the shape of the logits without its last axis.

    Examples:
        >>> correct, count = mcomb.accuracy(jnp.array([0.1, 0.9]), jnp.array(1))
        >>> int(correct), int(count)
        (1, 1)
    """
    _require_an_index_each(logits, labels)
    return jnp.sum((predict(logits) == labels) & (labels >= 0)), jnp.sum(labels >= 0)


def predicted(logits: Array, labels: Array) -> tuple[Array, int]:
    """Return the predicted class at each position, as an objective to be read for each example."""
    return predict(logits), 1


AGREES_WITH = ("A only", "B only", "both", "neither")


def agreement(logits: Array, label: Mapping[str, Array]) -> tuple[Array, Array]:
    """Count which of two networks a prediction agrees with, and whether it is correct.

    Args:
        logits: Logits of one example, of shape (..., classes).
        label: A dict with class indices as `"label"`, and predictions of A and B, of shape (2, ...), as `"predicted"`.

    Returns:
        Counts of shape (4, 2), with rows AGREES_WITH and columns (correct, wrong), and the number of labels.
    """
    own, (of_a, of_b) = predict(logits), label["predicted"]
    is_a, is_b = ((own == other) & (own >= 0) for other in (of_a, of_b))
    agrees_with = jnp.where(is_a, jnp.where(is_b, 2, 0), jnp.where(is_b, 1, 3))
    cell = jax.nn.one_hot(2 * agrees_with + (own != label["label"]), 8)
    is_real = label["label"] >= 0
    counts = jnp.sum(cell, axis=tuple(range(cell.ndim - 1)), where=is_real[..., None])
    return counts.reshape(4, 2), jnp.sum(is_real)


def tempered_cross_entropy(temperatures: Sequence[float]) -> Objective:
    """Return an objective that measures the cross-entropy at several softmax temperatures.

    Args:
        temperatures: The numbers to divide the logits by.

    Returns:
        An objective whose mean has one entry for each temperature.

    Raises:
        UserError: A temperature is not a positive, finite number.

    Examples:
        >>> metrics = {"tempered": mcomb.tempered_cross_entropy((0.5, 1.0, 2.0))}
        >>> mcomb.score(apply, a, x_test, y_test, metrics=metrics).tempered.round(2)
        array([0.36, 0.29, 0.49])
    """
    given = from_lists(temperatures)
    if np.ndim(given) != 1 or not np.size(given):
        raise UserError(f"The temperatures are {brief(temperatures)}: pass a tuple of numbers.")
    values = np.asarray(given).tolist()
    require_positive(**{f"temperature {i}": value for i, value in enumerate(values)})
    return _tempered_cross_entropy(tuple(values))


@cache
def _tempered_cross_entropy(temperatures: tuple[float, ...]) -> Objective:
    """Return the same objective for the same temperatures, so that it is compiled once."""

    def objective(logits: Array, labels: Array) -> tuple[Array, Array]:
        sums = jax.vmap(lambda temperature: cross_entropy(logits / temperature, labels)[0])(jnp.array(temperatures))
        return sums, jnp.sum(labels >= 0)

    return objective


@cache
def on_label(objective: Objective) -> Objective:
    """Return the objective for labels that are dicts, applied to their entry `"label"`."""
    return lambda output, label: objective(output, label["label"])


def is_classifier(outputs: Any, labels: Labels) -> bool:
    """Return whether labels are class indices, one for the logits at each position."""
    shape, of_labels = getattr(outputs, "shape", None), getattr(labels, "shape", None)
    if not shape or of_labels is None or len(shape) < 2:
        return False
    return shape[1:-1] == of_labels[1:] and bool(jnp.issubdtype(labels.dtype, jnp.integer))


def squared_error(output: Array, target: Array) -> tuple[Array, int]:
    """Return the squared error of an output: the loss of a regression.

    Args:
        output: The output for one example.
        target: The label of the example, of the same shape.

    Returns:
        The sum of squared differences, and the number of entries.

    Raises:
        UserError: The shapes differ.

    Examples:
        >>> targets = np.eye(10, dtype="float32")[y_test]
        >>> round(mcomb.score(apply, a, x_test, targets, loss=mcomb.squared_error).loss, 1)
        18.6
    """
    if _shape(output) != _shape(target):
        raise UserError(
            f"The function returns {_shape(output)} for an example whose label is {_shape(target)}: use equal shapes."
        )
    return jnp.sum(jnp.square(at_least_float32(output - target))), jnp.size(output)


def predict(logits: Float[Array, "... classes"]) -> Int[Array, "..."]:
    """Return the class of the largest logit, or -1 if that logit is not finite."""
    return jnp.where(jnp.isfinite(logits.max(-1)), logits.argmax(-1), -1)


def add_up(objective: Objective, outputs: Any, labels: Labels, is_real: Bool[Array, "n"]) -> tuple[Array, Array]:
    """Return the sum and the count of an objective over the real examples of a batch, without its padding."""

    def add(values: Array) -> Array:
        values = at_least_float32(values)
        return jnp.sum(values, axis=0, where=is_real.reshape(-1, *[1] * (values.ndim - 1)))

    total, count = jax.vmap(objective)(outputs, labels)
    return add(total), add(count)


def minibatch_loss(objective: Objective, outputs: Any, labels: Labels, is_real: Bool[Array, "n"]) -> Float[Array, ""]:
    """Return the mean loss of a minibatch; 0 if it contains only padding, so that the gradient is 0 too."""
    total, count = add_up(objective, outputs, labels, is_real)
    return total / jnp.where(count == 0, 1, count)


def check_data(apply: Apply, params: Params, inputs: Inputs, labels: Labels, loss: Objective) -> int:
    """Return the number of examples; raise an error unless function, inputs, labels and loss fit together."""
    count = count_examples(inputs, labels)
    check_objectives({"loss": loss}, output_shapes(apply, params, inputs), labels, count)
    return count


def count_training(apply: Apply, params: Params, inputs: Inputs, labels: Labels, loss: Objective) -> int:
    """Check the data, and return the number of training examples: the last tenth of the data is held out."""
    count = check_data(apply, params, inputs, labels, loss)
    if count < 2:
        raise UserError(f"{count} examples are too few, because some are held out: pass at least two.")
    return count - max(1, count // 10)


def check_objectives(objectives: Mapping[str, Objective], outputs: Any, labels: Labels, rows: int) -> None:
    """Raise an error unless the objectives accept these outputs and labels and return a sum and a count.

    The outputs belong to the first `rows` examples. Only their shapes and dtypes matter.
    """
    shapes = [leaf.shape for leaf in jax.tree.leaves(outputs)]
    if not shapes or any(shape[:1] != (rows,) for shape in shapes):
        listed = list_some(shapes) or "no array"
        raise UserError(
            f"The function returns {listed} for {rows} examples: return arrays with examples along the first axis."
        )
    for name, objective in objectives.items():
        what = "The loss" if name == "loss" else f"The metric {brief(name)}"
        if not callable(objective) or not isinstance(objective, Hashable):
            raise UserError(
                f"{what} is {brief(objective)}: pass a function of the output and the label of one example."
            )
        found = output_shapes(jax.vmap(objective), outputs, jax.tree.map(lambda leaf: leaf[:rows], labels))
        returned = [(leaf.shape[1:], leaf.dtype) for leaf in jax.tree.leaves(found)]
        are_numbers = len(returned) == 2 and all(_is_real(dtype) for _, dtype in returned)
        shapes_fit = are_numbers and returned[1][0] in ((), returned[0][0]) and (name != "loss" or returned[0][0] == ())
        if not isinstance(found, tuple) or len(found) != 2 or not shapes_fit:
            listed = list_some([f"{dtype} of shape {shape}" for shape, dtype in returned]) or "nothing"
            raise UserError(f"{what} returns {listed} for an example: return two numbers, a sum and a count.")
        if objective in (cross_entropy, accuracy):
            _check_range(labels, outputs.shape[-1], padded=outputs.ndim > 2)


def _check_range(labels: Array, classes: int, padded: bool) -> None:
    """Raise an error if a label is not the index of a class, because it would select another class or none."""
    values = np.asarray(labels)
    least, largest = int(values.min()), int(values.max())
    if (least < 0 and not padded) or largest >= classes:
        raise UserError(
            f"Labels range from {least} to {largest} for {classes} logits: use labels from 0 to {classes - 1}."
        )


def _require_an_index_each(logits: Array, labels: Array) -> None:
    """Raise an error unless the labels of an example are integers, one for the logits at each position."""
    if 0 in (_shape(logits) or (0,))[-1:]:
        raise UserError(
            f"The function returns {_shape(logits)} for an example, which has no logits: return at least one."
        )
    if _shape(labels) != _shape(logits)[:-1] or not jnp.issubdtype(jnp.result_type(labels), jnp.integer):
        kind = f"dtype {jnp.result_type(labels)} and shape {_shape(labels)}"
        raise UserError(
            f"The function returns {_shape(logits)} for an example whose labels have {kind}: pass integer labels of "
            f"shape {_shape(logits)[:-1]}, or another loss."
        )


def _shape(value: Any) -> tuple[int, ...]:
    """Return the shape of an array; raise an error for a tree."""
    if value is None:
        raise UserError("The loss or a metric needs labels: pass labels, or a loss that does not use them.")
    if not hasattr(value, "shape"):
        raise UserError(f"Outputs or labels are a {type(value).__name__}: pass arrays, or a loss that takes this type.")
    return value.shape


def _is_real(dtype: Any) -> bool:
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_))
