"""Generate text with a language model."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32, Integer, PRNGKeyArray

from mcomb.keys import stream
from mcomb.trees import Apply, Array, Params


def generate(
    apply: Apply, params: Params, prompt: Integer[np.ndarray, "p"], length: int, context: int, seed: int = 0
) -> Int32[np.ndarray, "length"]:
    """Continue a prompt with tokens drawn from a language model.

    Args:
        apply: The function from parameters and tokens of shape (n, context) to logits.
        params: The network's parameters.
        prompt: The first tokens, at least one.
        length: The number of tokens to draw.
        context: The number of tokens that the network reads.
        seed: The seed. Networks with the same seed make similar choices.

    Returns:
        The new tokens.
    """
    tokens = jnp.concatenate([jnp.asarray(prompt, jnp.int32), jnp.zeros(max(length, context), jnp.int32)])
    return np.asarray(_generate(apply, context, length, params, tokens, len(prompt), stream(seed, "generate")))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _generate(
    apply: Apply, context: int, length: int, params: Params, tokens: Array, start: Array, key: PRNGKeyArray
) -> Array:
    def step(tokens: Any, place: Any) -> tuple[Any, Any]:
        first = jnp.maximum(place - context, 0)  # unread tokens after `place` do not matter to a causal network
        window = jax.lax.dynamic_slice(tokens, (first,), (context,))
        logits = apply(params, window[None])[0, place - first - 1]
        token = jax.random.categorical(jax.random.fold_in(key, place), logits).astype(jnp.int32)
        return tokens.at[place].set(token), token

    return jax.lax.scan(step, tokens, start + jnp.arange(length))[1]
