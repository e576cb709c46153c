"""Element-wise combinations of networks, and the distributions that their coefficients are drawn from.

In the paper's definition (section 3) v is the coefficient of A: v = 1 gives A and v = 0 gives B. Its figures go the
other way, from A at 0 to B at 1. So the distributions here draw u = 1 − v, the share of B. Only `mix` converts it to v.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from mcomb.base import (
    Array,
    Params,
    UserError,
    at_least_float32,
    fold_names,
    in_dtype_of,
    is_inexact,
    map_named,
    named_leaves,
    require_alike,
)
from mcomb.threefry import unrolled

Distribution = Callable[[PRNGKeyArray, Float[Array, ""], Array], Array]
"""A function (key, parameter, leaf) that draws the share of B for each weight of a leaf, in float32 or wider.

Half precision is too coarse: a uniform share in bfloat16 has 128 values, and their mean is below ½.
"""

Draw = Callable[..., Params]
"""A function (key, parameter, *networks) that draws a combination of the networks."""


def combine(a: Params, b: Params, v: Params) -> Params:
    """The combination Θ_v = v ⊙ Θ_A + (1 − v) ⊙ Θ_B.

    `v` is a tree like A, or has one coefficient for a whole branch: with {"conv1": 1.0, "conv2": 0.5}, conv1 is A's and
    conv2 is the mean of A's and B's. Leaves keep A's dtype; half precision is mixed in float32. Leaves that are no
    floats, such as counters and random keys, are A's. Nothing is known of the function: running statistics are combined
    as weights are, until `estimate_statistics` gives better.
    """

    def combine_leaf(v: Any, a: Any, b: Any) -> Any:
        if not is_inexact(a):
            return a
        v = float(v) if isinstance(v, int) else v  # of whole numbers, JAX takes none beyond 32 bits
        return in_dtype_of(a, v * at_least_float32(a) + (1 - v) * at_least_float32(b))

    require_alike("the networks to combine", a, b)
    try:
        every = jax.tree.broadcast(v, a)
    except ValueError as error:
        raise UserError(
            "the coefficients are no tree like the network's: give one number, or one for each branch"
        ) from error
    coefficients = named_leaves(every)
    for name, leaf in named_leaves(a).items():
        if (shape := jnp.shape(coefficients[name])) and shape != jnp.shape(leaf):
            raise UserError(f"{name} has coefficients of shape {shape}: give one, or those of shape {jnp.shape(leaf)}")
    return jax.tree.map(combine_leaf, every, a, b)


def over_reals(function: Callable[..., Any], a: Any, *others: Any) -> Any:
    """Apply a function of real arrays to leaves, and return the result in A's dtype.

    Complex numbers are pairs of reals, half precision is in float32, and a leaf that is no float is A's.
    """
    if not is_inexact(a):
        return a
    if not jnp.iscomplexobj(a):
        return in_dtype_of(a, function(*map(at_least_float32, (a, *others))))
    pairs = function(*(jnp.stack([leaf.real, leaf.imag], -1) for leaf in (a, *others)))
    return jax.lax.complex(pairs[..., 0], pairs[..., 1])


def _share_dtype(leaf: Array) -> Any:
    """Return the dtype to draw the shares of a leaf in."""
    return jnp.promote_types(leaf.dtype, jnp.float32)


def check_parameters(draw: Distribution | Draw, values: Any) -> None:
    """Raise an error unless a distribution, or that of a draw from `mix`, has shares for all of the values.

    Inside a trace values are not known, and nothing is checked.
    """
    distribution = getattr(draw, "distribution", draw)
    if distribution not in RANGES or isinstance(values, jax.core.Tracer):
        return
    (least, largest), every = range_of(distribution), np.ravel(values)
    wrong = every[~(np.isfinite(every) & (every >= least) & (every <= largest))]
    if wrong.size:
        what = f"there are no {distribution.__name__} shares for {wrong[0]:g}"
        raise UserError(f"{what}: give {describe_range(least, largest)}")


def range_of(distribution: Distribution) -> tuple[float, float]:
    """Return the least and the largest parameter of a distribution, infinite if there is none."""
    return RANGES.get(distribution, (-math.inf, math.inf))


def describe_range(least: float, largest: float) -> str:
    """Return the words for a range."""
    if largest < math.inf:
        return f"a number from {least:g} to {largest:g}"
    return "a finite number" if least == -math.inf else f"{least:g} or more"


def linear(key: PRNGKeyArray, share: Float[Array, ""], leaf: Array) -> Array:
    """The same share for every weight: linear interpolation from A at share 0 to B at share 1."""
    return jnp.full(leaf.shape, share, _share_dtype(leaf))


def uniform(key: PRNGKeyArray, s: Float[Array, ""], leaf: Array) -> Array:
    """Shares uniform on [½ − s, ½ + s]."""
    check_parameters(uniform, s)
    return jax.random.uniform(key, leaf.shape, _share_dtype(leaf), 0.5 - s, 0.5 + s)


def subcube(key: PRNGKeyArray, share: Float[Array, ""], leaf: Array) -> Array:
    """Shares uniform on [0, 2λ] if λ ≤ ½, else on [2λ − 1, 1], where λ is `share`, their mean.

    The cube of possible shares grows out of A until it is the whole unit cube at λ = ½, then shrinks into B.
    """
    check_parameters(subcube, share)
    low, high = jnp.maximum(0, 2 * share - 1), jnp.minimum(1, 2 * share)
    return jax.random.uniform(key, leaf.shape, _share_dtype(leaf), low, high)


def hyperplane(key: PRNGKeyArray, mean: Float[Array, ""], leaf: Array) -> Array:
    """Shares from the exponential distribution truncated to [0, 1] with the given mean.

    This is how the paper (section 4.2.3) samples the intersection of the unit cube with a hyperplane of constant mean:
    given their own mean, d independent such shares are uniform on its hyperplane, and it differs from `mean` by only
    O(1/√d).
    """
    check_parameters(hyperplane, mean)
    u = jax.random.uniform(key, leaf.shape, _share_dtype(leaf))
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
    check_parameters(bernoulli, p)
    return jax.random.bernoulli(key, p, leaf.shape).astype(_share_dtype(leaf))


def centered(key: PRNGKeyArray, s: Float[Array, ""], leaf: Array) -> Array:
    """Shares uniform on [−s, s]: a box centred at A, whose edge along each weight is 2s times its difference to B."""
    check_parameters(centered, s)
    return jax.random.uniform(key, leaf.shape, _share_dtype(leaf), -s, s)


RANGES: dict[Distribution, tuple[float, float]] = {
    uniform: (0.0, math.inf),
    subcube: (0.0, 1.0),
    hyperplane: (0.0, 1.0),
    bernoulli: (0.0, 1.0),
    centered: (0.0, math.inf),
}
"""The least and the largest parameter of each distribution; `linear` takes any, and goes on beyond A and B."""


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
        if isinstance(layer, jax.core.Tracer):
            return map_named(lambda name, a, b: jnp.where(layer_of(name) <= layer, b, a), a, b)
        return map_named(lambda name, a, b: b if layer_of(name) <= layer else a, a, b)

    return draw


def blend(key: PRNGKeyArray, shares: Float[Array, "2"], a: Params, b: Params, c: Params) -> Params:
    """The combination Θ_A + λ_B (Θ_B − Θ_A) + λ_C (Θ_C − Θ_A) of three networks (the paper's section 5.4)."""

    def blend_leaf(a: Array, b: Array, c: Array) -> Array:
        return a + shares[0] * (b - a) + shares[1] * (c - a)

    return jax.tree.map(partial(over_reals, blend_leaf), a, b, c)


@cache
def mix(distribution: Distribution) -> Draw:
    """The draw of combinations of A and B whose shares of B come from `distribution`.

    Each leaf gets its own key, folded from its name, so its shares do not depend on which other leaves there are.
    (Only names with the same CRC-32 need to be told apart: see `fold_names`.) The real and the imaginary part of a
    complex weight are two weights. Leaves that are no floats are A's. The draw raises an error for a parameter that the
    distribution has no shares for, and so does `evaluate` for any of its parameters.
    """

    def draw(key: PRNGKeyArray, parameter: Float[Array, ""], a: Params, b: Params) -> Params:
        require_alike("the networks to mix", a, b)
        keys = fold_names(unrolled(key), [name for name, leaf in named_leaves(a).items() if is_inexact(leaf)])

        def mix_leaf(name: str, a: Any, b: Any) -> Any:
            u = distribution(keys[name], parameter, jnp.asarray(a))  # a plain number has no shape
            return combine(a, b, 1 - u)

        return map_named(lambda name, *leaves: over_reals(partial(mix_leaf, name), *leaves), a, b)

    draw.distribution = distribution  # type: ignore[attr-defined]
    return draw
