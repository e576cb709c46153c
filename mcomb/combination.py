"""Combine networks element by element, with shares from distributions.

A share is always the share of B: 0 is A and 1 is B. The paper's coefficient v (section 3) is 1 − share.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from mcomb.errors import UserError, brief
from mcomb.keys import fold_names, stream, unrolled
from mcomb.trees import Array, Params, at_least_float32, in_dtype_of, is_inexact, map_named, named_leaves, require_alike

Draw = Callable[..., Params]
"""A function (key, point, *networks) that draws a combination of the networks."""


@dataclass(frozen=True)
class Distribution:
    """A distribution of the share of B, drawn independently for each weight.

    Calling it with a key, a value of its parameter and a leaf draws the shares of that leaf.

    Attributes:
        name: The name to display.
        parameter: The name of its parameter.
        low: The smallest value of the parameter in a default sweep.
        high: The largest value of the parameter in a default sweep.
        function: Draws shares: `function(key, point, leaf)`.
        limits: The smallest and largest valid values of the parameter.
        is_random: Whether shares differ from draw to draw.

    Examples:
        >>> def draw_triangular(key, mode, leaf):
        ...     return jax.random.triangular(key, 0.0, mode, 1.0, leaf.shape)
        >>> triangular = mcomb.Distribution("triangular", "mode", 0.1, 0.9, draw_triangular)
        >>> mcomb.sweep(apply, (a, aligned.params), x_test, y_test, triangular, points=5)
        Sweep(5 values of mode, 10 combinations each: loss barrier 0.0709, accuracy barrier 0.0327)
    """

    name: str
    parameter: str
    low: float
    high: float
    function: Callable[[PRNGKeyArray, Float[Array, ""], Array], Array]
    limits: tuple[float, float] = (-math.inf, math.inf)
    is_random: bool = True

    def __repr__(self) -> str:
        return self.name

    def __call__(self, key: PRNGKeyArray, point: Float[Array, ""], leaf: Array) -> Array:
        """Draw the share of B for each weight of a leaf, in float32 or wider."""
        self.check(point)
        return self.function(key, point, leaf)

    def check(self, points: Any) -> None:
        """Check that values of the parameter are within the limits.

        Args:
            points: One value or an array of values. Values that JAX is tracing are not checked.

        Raises:
            UserError: A value is outside the limits.

        Examples:
            >>> mcomb.bernoulli.check(2)
            Traceback (most recent call last):
            mcomb.errors.UserError: p = 2 is out of range for bernoulli: pass a number from 0 to 1.
        """
        if isinstance(points, jax.core.Tracer):
            return
        low, high = self.limits
        try:
            values = np.ravel(np.asarray(points, np.float64))
        except (TypeError, ValueError) as error:
            raise UserError(f"{self.parameter} = {brief(points)} is not a number: pass {self.bounds}.") from error
        wrong = values[~(np.isfinite(values) & (values >= low) & (values <= high))]
        if wrong.size:
            raise UserError(f"{self.parameter} = {wrong[0]:g} is out of range for {self.name}: pass {self.bounds}.")

    @property
    def bounds(self) -> str:
        """Return the limits of the parameter in words."""
        low, high = self.limits
        if high < math.inf:
            return f"a number from {low:g} to {high:g}"
        return "a finite number" if low == -math.inf else f"{low:g} or more"


def combine(a: Params, b: Params, share: Params) -> Params:
    """Return the weighted average (1 − share) · A + share · B, element by element.

    The share is always that of B: 0 is A and 1 is B. The paper's coefficient v is 1 − share.

    Args:
        a: Parameters of network A.
        b: Parameters of network B.
        share: A number, a tree like A's, or one number for each branch. With `{"conv1": 0.0, "conv2": 0.5}`, conv1 is
            A's and conv2 is the mean of A's and B's.

    Returns:
        Parameters with A's dtypes. Leaves that are not floats, such as counters, are A's. Running statistics
        (BatchNorm) are averaged like weights: call `estimate_statistics` afterwards.

    Raises:
        UserError: The networks differ in names or shapes, or the shares do not fit them.

    Examples:
        >>> quarter = mcomb.combine(a, aligned.params, 0.25)  # three quarters of A
        >>> mcomb.score(apply, quarter, x_test, y_test)
        Metrics(loss=0.3092, accuracy=0.8978)
    """

    def combine_leaf(share: Any, a: Any, b: Any) -> Any:  # leaves may be numbers
        share = float(share) if isinstance(share, int) else share  # JAX rejects integers beyond 32 bits
        return _mix(a, b, share) if is_inexact(a) else a

    require_alike("The networks to combine", a, b)
    try:
        every = jax.tree.broadcast(share, a)
    except ValueError as error:
        raise UserError(
            "The shares are not a tree like the network's: pass one number, or a number or an array for each branch."
        ) from error
    coefficients = named_leaves(every)
    for name, leaf in named_leaves(a).items():
        if (shape := jnp.shape(coefficients[name])) and shape != jnp.shape(leaf):
            raise UserError(
                f"{name} has shares of shape {shape}: pass one share, or shares of shape {jnp.shape(leaf)}."
            )
    return jax.tree.map(combine_leaf, every, a, b)


def _mix(a: Any, b: Any, share: Any) -> Array:
    """Return v · a + (1 − v) · b for the paper's v = 1 − share."""
    v = 1 - share
    return in_dtype_of(a, v * at_least_float32(a) + (1 - v) * at_least_float32(b))


def _share_dtype(leaf: Array) -> Any:
    """Return the dtype for the shares of a leaf: at least float32, because half precision has too few values."""
    return jnp.promote_types(leaf.dtype, jnp.float32)


def over_reals(function: Callable[..., Array], a: Any, *others: Any) -> Any:
    """Apply a function of real arrays to leaves: complex numbers become pairs, leaves that are not floats stay A's."""
    if not is_inexact(a):
        return a
    if not jnp.iscomplexobj(a):
        return in_dtype_of(a, function(*map(at_least_float32, (a, *others))))
    pairs = function(*(jnp.stack([leaf.real, leaf.imag], -1) for leaf in (a, *others)))
    return jax.lax.complex(pairs[..., 0], pairs[..., 1])


def _draw_linear(key: PRNGKeyArray, share: Float[Array, ""], leaf: Array) -> Array:
    """Return the same share for every weight: linear interpolation from A at share 0 to B at share 1."""
    return jnp.full(leaf.shape, share, _share_dtype(leaf))


def _draw_uniform(key: PRNGKeyArray, s: Float[Array, ""], leaf: Array) -> Array:
    """Draw shares uniformly from [½ − s, ½ + s]."""
    return jax.random.uniform(key, leaf.shape, _share_dtype(leaf), 0.5 - s, 0.5 + s)


def _draw_subcube(key: PRNGKeyArray, share: Float[Array, ""], leaf: Array) -> Array:
    """Draw shares uniformly from [0, 2λ] if λ ≤ ½, else from [2λ − 1, 1], where λ is their mean, `share`.

    The cube of possible shares grows from A to the whole unit cube at λ = ½, then shrinks to B.
    """
    low, high = jnp.maximum(0, 2 * share - 1), jnp.minimum(1, 2 * share)
    return jax.random.uniform(key, leaf.shape, _share_dtype(leaf), low, high)


def _draw_hyperplane(key: PRNGKeyArray, mean: Float[Array, ""], leaf: Array) -> Array:
    """Draw shares from the exponential distribution truncated to [0, 1] with the given mean.

    The paper (section 4.2.3) samples the intersection of the unit cube with a hyperplane of constant mean in this way.
    Conditioned on their sample mean, d independent shares are uniform on the hyperplane of that mean. The sample mean
    differs from `mean` by only O(1/√d).
    """
    u = jax.random.uniform(key, leaf.shape, _share_dtype(leaf))
    rate = truncated_rate(jnp.minimum(mean, 1 - mean))  # for a mean above ½, draw 1 − share
    inverse_cdf = -jnp.log1p(u * jnp.expm1(-rate)) / jnp.maximum(rate, 1e-6)
    shares = jnp.where(rate < 1e-5, u, inverse_cdf)
    return jnp.where(mean > 0.5, 1 - shares, shares)


def truncated_rate(mean: Float[Array, ""]) -> Float[Array, ""]:
    """Return the rate of the exponential distribution truncated to [0, 1] with this mean, which is at most ½.

    The rate falls from infinity at mean 0 to zero, the uniform distribution, at mean ½.
    """

    def truncated_mean(rate: Array) -> Array:
        # 1/r − 1/(eʳ − 1) cancels near zero, where the first terms of its series are exact up to rounding.
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


def _draw_bernoulli(key: PRNGKeyArray, p: Float[Array, ""], leaf: Array) -> Array:
    """Draw 1 with probability p, else 0: each weight is B's or A's, a vertex of the unit cube."""
    return jax.random.bernoulli(key, p, leaf.shape).astype(_share_dtype(leaf))


def _draw_centered(key: PRNGKeyArray, s: Float[Array, ""], leaf: Array) -> Array:
    """Draw shares uniformly from [−s, s]: a box around A with edges of 2s times the difference between A and B."""
    return jax.random.uniform(key, leaf.shape, _share_dtype(leaf), -s, s)


linear = Distribution("linear", "share", 0.0, 1.0, _draw_linear, is_random=False)
"""The same share for every weight: the line from A at 0 to B at 1, which may be extended.

Examples:
    >>> mixture = mcomb.sample(a, aligned.params, mcomb.linear, 0.5)
    >>> mcomb.score(apply, mixture, x_test, y_test)
    Metrics(loss=0.3202, accuracy=0.9012)
"""

uniform = Distribution("uniform", "s", 0.0, 0.5, _draw_uniform, (0.0, math.inf))
"""Shares uniform on [½ − s, ½ + s]: the paper's main experiment. At s = ½ they fill the unit cube.

Examples:
    >>> mixture = mcomb.sample(a, aligned.params, mcomb.uniform, 0.5)
    >>> mcomb.score(apply, mixture, x_test, y_test)
    Metrics(loss=0.3304, accuracy=0.8978)
"""

subcube = Distribution("subcube", "share", 0.0, 1.0, _draw_subcube, (0.0, 1.0))
"""Shares uniform on a cube with the given mean, which grows from A to the unit cube at ½ and shrinks to B.

Examples:
    >>> mixture = mcomb.sample(a, aligned.params, mcomb.subcube, 0.25)
    >>> mcomb.score(apply, mixture, x_test, y_test)
    Metrics(loss=0.3118, accuracy=0.9045)
"""

hyperplane = Distribution("hyperplane", "share", 0.0, 1.0, _draw_hyperplane, (0.0, 1.0))
"""Shares uniform on the part of the unit cube with the given mean share (section 4.2.3 of the paper).

Examples:
    >>> mixture = mcomb.sample(a, aligned.params, mcomb.hyperplane, 0.25)
    >>> mcomb.score(apply, mixture, x_test, y_test)
    Metrics(loss=0.3177, accuracy=0.8995)
"""

bernoulli = Distribution("bernoulli", "p", 0.0, 1.0, _draw_bernoulli, (0.0, 1.0))
"""Each weight is B's with probability p, else A's: a vertex of the unit cube.

Examples:
    >>> mixture = mcomb.sample(a, aligned.params, mcomb.bernoulli, 0.1)
    >>> mcomb.score(apply, mixture, x_test, y_test)
    Metrics(loss=0.3284, accuracy=0.8995)
"""

centered = Distribution("centered", "s", 0.0, 1.0, _draw_centered, (0.0, math.inf))
"""Shares uniform on [−s, s]: a box around A, half of it outside the unit cube.

Examples:
    >>> mixture = mcomb.sample(a, aligned.params, mcomb.centered, 0.5)
    >>> mcomb.score(apply, mixture, x_test, y_test)
    Metrics(loss=0.3047, accuracy=0.9112)
"""


def minmax(key: PRNGKeyArray, share: Float[Array, ""], a: Params, b: Params) -> Params:
    """Interpolate linearly from 'Max' at share 0 to 'Min' at share 1.

    Max takes the weight with the larger absolute value from each pair, and Min takes the other.
    """

    def interpolate(a: Array, b: Array) -> Array:
        a_is_larger = jnp.abs(a) >= jnp.abs(b)
        return (1 - share) * jnp.where(a_is_larger, a, b) + share * jnp.where(a_is_larger, b, a)

    return jax.tree.map(partial(over_reals, interpolate), a, b)


@cache
def stitch(layer_of: Callable[[str], int]) -> Draw:
    """Return the draw that takes layers 1 to l from B and the layers above l from A, where l is the parameter.

    `layer_of` returns the layer number of a leaf from its name: layer_of("conv2/kernel") is 2.
    """

    def draw(key: PRNGKeyArray, layer: Float[Array, ""], a: Params, b: Params) -> Params:
        if isinstance(layer, jax.core.Tracer):
            return map_named(lambda name, a, b: jnp.where(layer_of(name) <= layer, b, a), a, b)
        return map_named(lambda name, a, b: b if layer_of(name) <= layer else a, a, b)

    return draw


def blend(key: PRNGKeyArray, shares: Float[Array, "2"], a: Params, b: Params, c: Params) -> Params:
    """Return Θ_A + λ_B (Θ_B − Θ_A) + λ_C (Θ_C − Θ_A) for three networks (section 5.4 of the paper)."""

    def blend_leaf(a: Array, b: Array, c: Array) -> Array:
        return a + shares[0] * (b - a) + shares[1] * (c - a)

    return jax.tree.map(partial(over_reals, blend_leaf), a, b, c)


def sample(a: Params, b: Params, distribution: Distribution, point: float, *, seed: int = 0) -> Params:
    """Draw one combination of two networks, with an independent share for each weight.

    Args:
        a: Parameters of network A.
        b: Parameters of network B.
        distribution: The distribution of the shares of B, such as `mcomb.uniform`.
        point: The value of the distribution's parameter.
        seed: Seed of the draw.

    Returns:
        The parameters of the combination, with A's dtypes. Leaves that are not floats are A's.

    Raises:
        UserError: The networks differ in names or shapes, or `point` is out of range.

    Examples:
        >>> mixture = mcomb.sample(a, aligned.params, mcomb.uniform, 0.5, seed=1)
        >>> mcomb.score(apply, mixture, x_test, y_test)
        Metrics(loss=0.3491, accuracy=0.9028)
    """
    if not isinstance(distribution, Distribution):
        raise UserError(f"{brief(distribution)} is not a distribution: pass one such as mcomb.uniform.")
    distribution.check(point)
    if np.ndim(point):
        raise UserError(f"Cannot sample at {np.size(point)} values of {distribution.parameter}: pass one number.")
    return mix(distribution)(stream(seed, "sample"), jnp.float32(point), a, b)


def as_draw(draw: Distribution | Draw, count: int = 2) -> Draw:
    """Return the function (key, point, *networks) that draws combinations of `count` networks."""
    if isinstance(draw, Distribution):
        if count != 2:
            raise UserError(f"Cannot mix {count} networks with {draw.name}: pass two.")
        return mix(draw)
    try:
        inspect.signature(draw).bind(*range(2 + count))
    except TypeError as error:
        name = getattr(draw, "__name__", f"a {type(draw).__name__}")
        remedy = "pass a distribution such as mcomb.uniform, or a function (key, point, *networks)"
        raise UserError(f"{name} cannot draw combinations of {count} networks: {remedy}.") from error
    except ValueError:  # some built-in functions have no signature
        pass
    return draw


def _as_float(number: Any) -> Any:
    """Return a whole number or a truth value as a float, and anything else as it is."""
    dtype = jnp.result_type(number)
    return number * 1.0 if jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_ else number


@cache
def mix(distribution: Distribution) -> Draw:
    """Return the function (key, point, a, b) that draws combinations whose shares of B come from a distribution.

    Each leaf gets its own key, folded from its name, so that its shares do not depend on the other leaves. The real and
    imaginary parts of a complex weight get separate shares. Leaves that are not floats are A's.
    """

    def draw(key: PRNGKeyArray, point: Float[Array, ""], a: Params, b: Params) -> Params:
        require_alike("The networks to combine", a, b)
        point = jax.tree.map(_as_float, point)
        keys = fold_names(unrolled(key), [name for name, leaf in named_leaves(a).items() if is_inexact(leaf)])

        def mix_leaf(name: str, a: Array, b: Array) -> Array:
            share = distribution(keys[name], point, jnp.asarray(a))  # a Python number has no shape
            return _mix(a, b, share)

        return map_named(lambda name, *leaves: over_reals(partial(mix_leaf, name), *leaves), a, b)

    return draw
