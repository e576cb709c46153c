"""Element-wise combinations of networks, and the distributions that their coefficients are drawn from.

In the paper's definition (section 3) v is the coefficient of A: v = 1 gives A and v = 0 gives B. Its figures go the
other way, from A at 0 to B at 1. So the distributions here draw u = 1 − v, the share of B. Only `mix` converts it to v.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Float, PRNGKeyArray

from mcomb.base import Array, Params, UserError, fold_name, is_inexact, map_named, named_leaves, require_alike
from mcomb.threefry import unrolled

Distribution = Callable[[PRNGKeyArray, Float[Array, ""], Array], Array]
"""A function (key, parameter, leaf) that draws the share of B for each weight of a leaf."""

Draw = Callable[..., Params]
"""A function (key, parameter, *networks) that draws a combination of the networks."""


def combine(a: Params, b: Params, v: Params) -> Params:
    """The combination Θ_v = v ⊙ Θ_A + (1 − v) ⊙ Θ_B.

    `v` is a tree like A, or has one coefficient for a whole branch: with {"conv1": 1.0, "conv2": 0.5}, conv1 is A's and
    conv2 is the mean of A's and B's. Leaves that are no floats, such as counters and random keys, are A's. Nothing is
    known of the function: running statistics are combined as weights are, until `estimate_statistics` gives better.
    """

    def combine_leaf(v: Any, a: Array, b: Array) -> Array:
        v = float(v) if isinstance(v, int) else v  # of whole numbers, JAX takes none beyond 32 bits
        return v * a + (1 - v) * b if is_inexact(a) else a

    require_alike("the networks to combine", a, b)
    try:
        every = jax.tree.broadcast(v, a)
    except ValueError as error:
        raise UserError(
            "the coefficients are no tree like the network's: give one number, or a number or an array for each branch"
        ) from error
    coefficients = named_leaves(every)
    for name, leaf in named_leaves(a).items():
        if (shape := jnp.shape(coefficients[name])) and shape != jnp.shape(leaf):
            raise UserError(f"{name} has coefficients of shape {shape}: give one, or those of shape {jnp.shape(leaf)}")
    return jax.tree.map(combine_leaf, every, a, b)


def over_reals(function: Callable[..., Array], a: Array, *others: Array) -> Array:
    """What a function of real arrays makes of leaves: complex numbers are pairs of reals, what is no float is A's."""
    if not is_inexact(a):
        return a
    if not jnp.iscomplexobj(a):
        return function(a, *others)
    pairs = function(*(jnp.stack([leaf.real, leaf.imag], -1) for leaf in (a, *others)))
    return jax.lax.complex(pairs[..., 0], pairs[..., 1])


def linear(key: PRNGKeyArray, share: Float[Array, ""], leaf: Array) -> Array:
    """The same share for every weight: linear interpolation from A at share 0 to B at share 1."""
    return jnp.full(leaf.shape, share, leaf.dtype)


def uniform(key: PRNGKeyArray, s: Float[Array, ""], leaf: Array) -> Array:
    """Shares uniform on [½ − s, ½ + s]."""
    return jax.random.uniform(key, leaf.shape, leaf.dtype, 0.5 - s, 0.5 + s)


def subcube(key: PRNGKeyArray, share: Float[Array, ""], leaf: Array) -> Array:
    """Shares uniform on [0, 2λ] if λ ≤ ½, else on [2λ − 1, 1], where λ is `share`, their mean.

    The cube of possible shares grows out of A until it is the whole unit cube at λ = ½, then shrinks into B.
    """
    low, high = jnp.maximum(0, 2 * share - 1), jnp.minimum(1, 2 * share)
    return jax.random.uniform(key, leaf.shape, leaf.dtype, low, high)


def hyperplane(key: PRNGKeyArray, mean: Float[Array, ""], leaf: Array) -> Array:
    """Shares from the exponential distribution truncated to [0, 1] with the given mean.

    This is how the paper (section 4.2.3) samples the intersection of the unit cube with a hyperplane of constant mean:
    given their own mean, d independent such shares are uniform on its hyperplane, and it differs from `mean` by only
    O(1/√d).
    """
    u = jax.random.uniform(key, leaf.shape, leaf.dtype)
    rate = truncated_rate(jnp.minimum(mean, 1 - mean))  # for a mean above ½, draw 1 − share
    inverse_cdf = -jnp.log1p(u * jnp.expm1(-rate)) / jnp.maximum(rate, 1e-6)
    shares = jnp.where(rate < 1e-5, u, inverse_cdf)
    return jnp.where(mean > 0.5, 1 - shares, shares)


def truncated_rate(mean: Float[Array, ""]) -> Float[Array, ""]:
    """The rate of the exponential distribution truncated to [0, 1] that has this mean, which is at most ½.

    The rate falls from infinity at mean 0 to zero, the uniform distribution, at mean ½.
    """

    def truncated_mean(rate: Array) -> Array:
        # 1/r − 1/(eʳ − 1) cancels near zero; there the first terms of its series are exact to rounding.
        series = 0.5 - rate / 12 + rate**3 / 720 - rate**5 / 30240
        return jnp.where(rate < 0.5, series, 1 / rate - 1 / jnp.expm1(jnp.minimum(rate, 80)))

    def bisect(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) / 2
        too_high = truncated_mean(middle) < mean
        return jnp.where(too_high, low, middle), jnp.where(too_high, middle, high)

    # The mean is below 1/rate, so the rate is below 1/mean.
    low, high = jax.lax.fori_loop(0, 60, bisect, (jnp.zeros_like(mean), 1 / jnp.maximum(mean, 1e-30)))
    return jnp.where(mean >= 0.5, 0.0, jnp.where(mean <= 0, jnp.inf, (low + high) / 2))


def bernoulli(key: PRNGKeyArray, p: Float[Array, ""], leaf: Array) -> Array:
    """Share 1 with probability p, else 0: each weight is B's or A's, a vertex of the unit cube."""
    return jax.random.bernoulli(key, p, leaf.shape).astype(leaf.dtype)


def centered(key: PRNGKeyArray, s: Float[Array, ""], leaf: Array) -> Array:
    """Shares uniform on [−s, s]: a box centred at A, whose edge along each weight is 2s times its difference to B."""
    return jax.random.uniform(key, leaf.shape, leaf.dtype, -s, s)


def minmax(key: PRNGKeyArray, share: Float[Array, ""], a: Params, b: Params) -> Params:
    """Linear interpolation from 'Max' at share 0 to 'Min' at share 1.

    Max takes from each pair of weights the one with the larger absolute value, Min the other.
    """

    def interpolate(a: Array, b: Array) -> Array:
        a_is_larger = jnp.abs(a) >= jnp.abs(b)
        return (1 - share) * jnp.where(a_is_larger, a, b) + share * jnp.where(a_is_larger, b, a)

    return jax.tree.map(partial(over_reals, interpolate), a, b)


@cache
def stitch(layer_of: Callable[[str], int]) -> Draw:
    """The draw that takes layers 1 to l from B and the layers above l from A, where l is the parameter.

    `layer_of` gives the layer number of a leaf from its name: layer_of("conv2/kernel") is 2.
    """

    def draw(key: PRNGKeyArray, layer: Float[Array, ""], a: Params, b: Params) -> Params:
        return map_named(lambda name, a, b: jnp.where(layer_of(name) <= layer, b, a), a, b)

    return draw


def blend(key: PRNGKeyArray, shares: Float[Array, "2"], a: Params, b: Params, c: Params) -> Params:
    """The combination Θ_A + λ_B (Θ_B − Θ_A) + λ_C (Θ_C − Θ_A) of three networks (the paper's section 5.4)."""

    def blend_leaf(a: Array, b: Array, c: Array) -> Array:
        return a + shares[0] * (b - a) + shares[1] * (c - a)

    return jax.tree.map(partial(over_reals, blend_leaf), a, b, c)


def check_draw(draw: Draw, networks: Sequence[Params]) -> None:
    """Raise an error unless a draw takes a key, a parameter and as many networks as there are."""
    if not _takes(draw, 2 + len(networks)):
        name = getattr(draw, "__name__", None) or f"a {type(draw).__name__}"
        remedy = "give mcomb.mix(mcomb.uniform) and two networks, or another draw"
        if _takes(draw, 3):  # a distribution of shares, which takes one leaf
            remedy = f"give mcomb.mix({name})"
        elif name.startswith("mix("):
            remedy = "give two"
        raise UserError(f"{name} cannot draw from {len(networks)} networks: {remedy}")


def _takes(function: Any, count: int) -> bool:
    """Return whether a function can be called with so many arguments."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # Python knows no signature of some builtins
        return True
    return True


def _as_float(number: Any) -> Any:
    """Return a whole number or a truth value as a float, and anything else as it is."""
    dtype = jnp.result_type(number)
    return number * 1.0 if jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_ else number


@cache
def mix(distribution: Distribution) -> Draw:
    """The draw of combinations of A and B whose shares of B come from `distribution`.

    Each leaf gets its own key, folded from its name, so its shares do not depend on which other leaves there are. The
    real and the imaginary part of a complex weight are two weights. Leaves that are no floats are A's.
    """
    name = getattr(distribution, "__name__", None) or f"a {type(distribution).__name__}"
    if not _takes(distribution, 3):
        raise UserError(
            f"{name} is no distribution: give a function of a key, a parameter and a leaf, as mcomb.uniform"
        )

    def draw(key: PRNGKeyArray, parameter: Float[Array, ""], a: Params, b: Params) -> Params:
        require_alike("the networks to mix", a, b)
        key, parameter = unrolled(key), jax.tree.map(_as_float, parameter)

        def mix_leaf(name: str, a: Array, b: Array) -> Array:
            u = distribution(fold_name(key, name), parameter, jnp.asarray(a))  # a plain number has no shape
            return cast(Array, combine(a, b, 1 - u))

        return map_named(lambda name, *leaves: over_reals(partial(mix_leaf, name), *leaves), a, b)

    draw.__name__ = draw.__qualname__ = f"mix({name})"
    return draw
