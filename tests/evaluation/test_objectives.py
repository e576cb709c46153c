import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_close, assert_equal

from mcomb.evaluation.objectives import accuracy, add_up, classify, cross_entropy, token_cross_entropy


def log_softmax(logits):
    shifted = np.float64(logits) - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_the_loss_is_the_cross_entropy_and_the_label_that_of_the_largest_logit(scale):
    """Also for logits whose exponentials overflow."""
    rng = np.random.default_rng(0)
    logits, labels = np.float32(scale) * rng.standard_normal((50, 7), np.float32), rng.integers(0, 7, 50)
    outcome = classify(logits, labels)
    assert_close(outcome.loss, -log_softmax(logits)[np.arange(50), labels], roundings=4, scale=np.abs(logits).max())
    assert_equal(outcome.predicted, logits.argmax(1))
    assert_equal(outcome.correct, logits.argmax(1) == labels)
    assert 0 < outcome.correct.sum() < 50


def test_its_gradient_is_the_predicted_probability_minus_the_label():
    rng = np.random.default_rng(0)
    logits, labels = rng.standard_normal((20, 5), np.float32), rng.integers(0, 5, 20)
    gradient = jax.jit(jax.grad(lambda logits: classify(logits, labels).loss.sum()))(logits)
    assert_close(gradient, np.exp(log_softmax(logits)) - np.eye(5)[labels], roundings=4)


def test_losses_of_half_precision_are_in_single():
    """The mean of many in bfloat16 would stall long before the end."""
    logits, labels = jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3), jnp.array([0, 1])
    single = classify(logits.astype(jnp.float32), labels)
    assert_equal(classify(logits, labels).loss, single.loss)
    assert cross_entropy(logits[0], labels[0])[0] == single.loss[0]


def test_sums_of_half_precision_are_in_single():
    """In bfloat16 the next number after 1000 is 1004."""
    total, count = add_up(
        lambda output, label: (output, 1), jnp.ones(1005, jnp.bfloat16), None, jnp.arange(1005) < 1001
    )
    assert (total, count) == (1001, 1001)
    total, _ = token_cross_entropy(jnp.zeros((1001, 2), jnp.bfloat16), jnp.zeros(1001, int))
    assert_close(total, 1001 * np.log(2), roundings=16)


@pytest.mark.parametrize("wrong", [[np.nan, 0, 0], [0, 0, np.nan], [np.inf, 0, 0], [-np.inf] * 3])
def test_logits_that_are_not_finite_predict_no_label(wrong):
    """The largest of them would be at some place, and be right by luck."""
    logits = jnp.array([wrong, [0.0, -np.inf, 1.0]], jnp.float32)
    for label in range(3):
        outcome = classify(logits, jnp.array([label, 2]))
        assert_equal((outcome.predicted, outcome.correct), (np.array([-1, 2]), np.array([False, True])))
        assert accuracy(logits, jnp.array([label, 2])) == (1, 2)
