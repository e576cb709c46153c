import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mcomb.lab.generation import generate

CONTEXT, CLASSES = 5, 7


def count_up(params, tokens):
    """Predict the successor of each token."""
    return 1e3 * jax.nn.one_hot((tokens + params) % CLASSES, CLASSES)


def sum_all(params, tokens):
    """Predict the sum of the tokens up to each position."""
    return 1e3 * jax.nn.one_hot(jnp.cumsum(tokens, axis=1) % CLASSES, CLASSES)


@pytest.mark.parametrize("prompt", [[3], [1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 0, 1]])
@pytest.mark.parametrize("length", [1, 4, 12])
def test_generate_feeds_each_token_back(prompt, length):
    found = generate(count_up, 1, np.array(prompt), length, CONTEXT)
    assert found.tolist() == [(prompt[-1] + i) % CLASSES for i in range(1, length + 1)]


@pytest.mark.parametrize("prompt", [[3], [1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 0, 1]])
def test_generate_reads_only_context(prompt):
    found = generate(sum_all, 0, np.array(prompt), 12, CONTEXT).tolist()
    tokens = list(prompt)
    for token in found:
        assert token == sum(tokens[-CONTEXT:]) % CLASSES
        tokens.append(token)


def test_generate_depends_only_on_seed():
    def guess(params, tokens):
        return jnp.zeros((*tokens.shape, CLASSES))

    first, again, other = (generate(guess, 0, np.array([0]), 50, CONTEXT, seed).tolist() for seed in (0, 0, 1))
    assert first == again != other
    assert {*first} == {*range(CLASSES)}
