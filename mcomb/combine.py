"""Element-wise combinations of networks, and the distributions their coefficients are drawn from.

The paper's definition (its section 3) gives A the coefficient v: v = 1 is A and v = 0 is B. Its sweeps run the
other way, from A at 0 to B at 1. So a distribution here draws u = 1 − v, the share of B; `mix` turns it into v,
and nothing else does.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, cast

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


def subcube(key: PRNGKeyArray, share: Float[Array, ""], leaf: Array) -> Array:
    """Shares uniform on [0, 2λ] up to λ = ½ and on [2λ − 1, 1] from there: a cube that slides from A to B."""
    low, high = jnp.maximum(0, 2 * share - 1), jnp.minimum(1, 2 * share)
    return jax.random.uniform(key, leaf.shape, leaf.dtype, low, high)


def hyperplane(key: PRNGKeyArray, mean: Float[Array, ""], leaf: Array) -> Array:
    """Shares from the exponential distribution truncated to [0, 1] that has the given mean.

    Independent such shares are uniform on the hyperplane of their own mean, which is the given one but for
    O(1/√d): the paper's way (its section 4.2.3) to sample where the cube meets a hyperplane.
    """
    u = jax.random.uniform(key, leaf.shape, leaf.dtype)
    small = jnp.minimum(mean, 1 - mean)  # the other half is its mirror image
    rate = truncated_rate(small)
    curved = -jnp.log1p(u * jnp.expm1(-rate)) / jnp.maximum(rate, 1e-6)
    below = jnp.where(rate < 1e-5, u, curved)
    return jnp.where(mean > 0.5, 1 - below, below)


def truncated_rate(mean: Float[Array, ""]) -> Float[Array, ""]:
    """The rate of the exponential truncated to [0, 1] whose mean is `mean`, between 0 (infinite) and ½ (zero)."""

    def mean_of(rate: Array) -> Array:
        # 1/r − 1/(eʳ − 1) loses all its digits near zero, where a few terms of its series are exact.
        series = 0.5 - rate / 12 + rate**3 / 720 - rate**5 / 30240
        return jnp.where(rate < 0.5, series, 1 / rate - 1 / jnp.expm1(jnp.minimum(rate, 80)))

    def halve(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) / 2
        too_high = mean_of(middle) < mean
        return jnp.where(too_high, low, middle), jnp.where(too_high, middle, high)

    # The mean is below 1/rate, so the rate is below 1/mean.
    low, high = jax.lax.fori_loop(0, 60, halve, (jnp.zeros_like(mean), 1 / jnp.maximum(mean, 1e-30)))
    return jnp.where(mean >= 0.5, 0.0, jnp.where(mean <= 0, jnp.inf, (low + high) / 2))


def bernoulli(key: PRNGKeyArray, p: Float[Array, ""], leaf: Array) -> Array:
    """Each weight B's with probability p, else A's: the vertices of the cube."""
    return jax.random.bernoulli(key, p, leaf.shape).astype(leaf.dtype)


def centered(key: PRNGKeyArray, s: Float[Array, ""], leaf: Array) -> Array:
    """Shares uniform on [−s, s]: a box around A with edges along the differences."""
    return jax.random.uniform(key, leaf.shape, leaf.dtype, -s, s)


def minmax(key: PRNGKeyArray, share: Float[Array, ""], a: Params, b: Params) -> Params:
    """From 'Max' at 0, which takes of each pair the weight larger in absolute value, to 'Min' at 1."""

    def one(a: Array, b: Array) -> Array:
        a_is_larger = jnp.abs(a) >= jnp.abs(b)
        return (1 - share) * jnp.where(a_is_larger, a, b) + share * jnp.where(a_is_larger, b, a)

    return jax.tree.map(one, a, b)


@cache
def stitch(layer_of: Callable[[str], int]) -> Draw:
    """The draw that takes layers 1 to l from B and those above from A."""

    def draw(key: PRNGKeyArray, layer: Float[Array, ""], a: Params, b: Params) -> Params:
        return map_named(lambda name, a, b: jnp.where(layer_of(name) <= layer, b, a), a, b)

    return draw


def blend(key: PRNGKeyArray, shares: Float[Array, "2"], a: Params, b: Params, c: Params) -> Params:
    """Θ_A + λ_B (Θ_B − Θ_A) + λ_C (Θ_C − Θ_A) (the paper's section 5.4)."""
    return jax.tree.map(lambda a, b, c: a + shares[0] * (b - a) + shares[1] * (c - a), a, b, c)


@cache
def mix(distribution: Distribution) -> Draw:
    """The draw of a combination of A and B whose shares come from `distribution`, leaf by leaf."""

    def draw(key: PRNGKeyArray, parameter: Float[Array, ""], a: Params, b: Params) -> Params:
        def one(name: str, a: Array, b: Array) -> Array:
            u = distribution(fold_name(key, name), parameter, a)
            return cast(Array, combine(a, b, 1 - u))

        return map_named(one, a, b)

    return draw
