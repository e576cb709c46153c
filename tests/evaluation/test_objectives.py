import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_close, assert_equal

from mcomb.evaluation.objectives import accuracy, add_up, agreement, cross_entropy, predict


def log_softmax(logits):
    shifted = np.float64(logits) - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_cross_entropy_and_accuracy_equal_numpy(scale):
    """The exponentials of the larger logits overflow."""
    rng = np.random.default_rng(0)
    logits, labels = np.float32(scale) * rng.standard_normal((50, 7), np.float32), rng.integers(0, 7, 50)
    losses, counts = jax.vmap(cross_entropy)(logits, labels)
    assert_close(losses, -log_softmax(logits)[np.arange(50), labels], roundings=4, scale=np.abs(logits).max())
    assert_equal(predict(logits), logits.argmax(1))
    correct, same_counts = jax.vmap(accuracy)(logits, labels)
    assert_equal(correct, logits.argmax(1) == labels)
    assert 0 < correct.sum() < 50
    assert_equal((counts, same_counts), (np.ones(50), np.ones(50)))


def test_cross_entropy_gradient_is_probability_minus_label():
    rng = np.random.default_rng(0)
    logits, labels = rng.standard_normal((20, 5), np.float32), rng.integers(0, 5, 20)
    gradient = jax.jit(jax.grad(lambda logits: jax.vmap(cross_entropy)(logits, labels)[0].sum()))(logits)
    assert_close(gradient, np.exp(log_softmax(logits)) - np.eye(5)[labels], roundings=4)


def test_cross_entropy_of_positions_skips_negative_labels():
    logits = np.random.default_rng(0).standard_normal((4, 5), np.float32)
    labels = np.array([3, -1, 0, -100])
    total, count = cross_entropy(logits, labels)
    assert_close(total, -log_softmax(logits)[[0, 2], [3, 0]].sum(), roundings=8)
    assert count == 2
    assert accuracy(logits, labels) == ((logits.argmax(1) == labels).sum(), 2)


def test_cross_entropy_of_bfloat16_is_in_float32():
    """A mean of many losses in bfloat16 would stall."""
    logits, labels = jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3), jnp.array([0, 1])
    of_single = jax.vmap(cross_entropy)(logits.astype(jnp.float32), labels)[0]
    losses = jax.vmap(cross_entropy)(logits, labels)[0]
    assert losses.dtype == jnp.float32
    assert_equal(losses, of_single)


def test_add_up_of_bfloat16_is_in_float32():
    """In bfloat16 the next number after 1000 is 1004."""
    total, count = add_up(
        lambda output, label: (output, 1), jnp.ones(1005, jnp.bfloat16), None, jnp.arange(1005) < 1001
    )
    assert (total, count) == (1001, 1001)
    total, _ = cross_entropy(jnp.zeros((1001, 2), jnp.bfloat16), jnp.zeros(1001, int))
    assert_close(total, 1001 * np.log(2), roundings=16)


@pytest.mark.parametrize("wrong", [[np.nan, 0, 0], [0, 0, np.nan], [np.inf, 0, 0], [-np.inf] * 3])
def test_predict_ignores_logits_that_are_not_finite(wrong):
    """Otherwise the largest of them might be correct by chance."""
    logits = jnp.array([wrong, [0.0, -np.inf, 1.0]], jnp.float32)
    assert_equal(predict(logits), np.array([-1, 2]))
    for label in range(3):
        assert accuracy(logits, jnp.array([label, 2])) == (1, 2)
    counts, _ = agreement(logits[0], {"label": jnp.array(0), "predicted": jnp.array([-1, -1])})
    assert_equal(counts, np.array([[0, 0], [0, 0], [0, 0], [0, 1]]))  # agrees with neither, and is wrong


def test_agreement_of_positions_skips_negative_labels():
    logits = jnp.eye(3)[jnp.array([0, 1, 2, 0, 1])]
    label = jnp.array([0, 1, 0, -1, 2])
    of_a, of_b = [0, 1, 1, 0, 0], [0, 2, 1, 0, 1]
    counts, count = agreement(logits, {"label": label, "predicted": jnp.array([of_a, of_b])})
    assert_equal(counts, np.array([[1, 0], [0, 1], [1, 0], [0, 1]]))
    assert count == 4
