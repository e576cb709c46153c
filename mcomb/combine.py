"""Element-wise combinations of networks, and the distributions their coefficients are drawn from.

The paper's definition (its section 3) gives A the coefficient v: v = 1 is A and v = 0 is B. Its sweeps run the
other way, from A at 0 to B at 1. So a distribution here draws u = 1 − v, the share of B; `mix` turns it into v,
and nothing else does.
"""

from collections.abc import Callable
from functools import cache
from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Float, PRNGKeyArray

from mcomb.base import Array, Params, fold_name, map_named

Distribution = Callable[[PRNGKeyArray, Float[Array, ""], Array], Array]
"""The shares of B for one leaf, from a key, the sweep's parameter and the leaf."""

Draw = Callable[..., Params]
"""A network, from a key, the sweep's parameter and the networks to combine."""


def combine(a: Params, b: Params, v: Params) -> Params:
    """Θ_v = v ⊙ Θ_A + (1 − v) ⊙ Θ_B; `v` is a tree like A's, or has one coefficient for a whole branch."""
    return jax.tree.map(lambda v, a, b: v * a + (1 - v) * b, jax.tree.broadcast(v, a), a, b)


def linear(key: PRNGKeyArray, share: Float[Array, ""], leaf: Array) -> Array:
    """The same share for every weight: interpolation from A at 0 to B at 1."""
    return jnp.full(leaf.shape, share, leaf.dtype)


def uniform(key: PRNGKeyArray, s: Float[Array, ""], leaf: Array) -> Array:
    """Shares uniform on [½ − s, ½ + s]."""
    return jax.random.uniform(key, leaf.shape, leaf.dtype, 0.5 - s, 0.5 + s)


@cache
def mix(distribution: Distribution) -> Draw:
    """The draw of a combination of A and B whose shares come from `distribution`, leaf by leaf."""

    def draw(key: PRNGKeyArray, parameter: Float[Array, ""], a: Params, b: Params) -> Params:
        def one(name: str, a: Array, b: Array) -> Array:
            u = distribution(fold_name(key, name), parameter, a)
            return cast(Array, combine(a, b, 1 - u))

        return map_named(one, a, b)

    return draw
