import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mcomb import combine, linear, mix, uniform
from mcomb.combination import bernoulli, blend, centered, hyperplane, minmax, stitch, subcube, truncated_rate

A = {"x": {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3)}, "y": jnp.full((2, 3), 7.0)}
B = jax.tree.map(lambda leaf: -leaf - 1, A)


def same(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


def test_v_one_is_a_and_v_zero_is_b():
    same(combine(A, B, 1.0), A, rtol=0)
    same(combine(A, B, 0.0), B, rtol=0)


def test_coefficients_are_per_weight():
    v = {"x": {"kernel": jnp.array([[1.0, 0, 0], [0, 1, 0]]), "bias": jnp.zeros(3)}, "y": jnp.ones((2, 3))}
    mixed = combine(A, B, v)
    np.testing.assert_array_equal(mixed["x"]["kernel"], [[0, -2, -3], [-4, 4, -6]])
    np.testing.assert_array_equal(mixed["x"]["bias"], B["x"]["bias"])
    np.testing.assert_array_equal(mixed["y"], A["y"])


def test_one_coefficient_may_serve_a_whole_branch():
    mixed = combine(A, B, {"x": 1.0, "y": 0.25})
    same(mixed["x"], A["x"])
    np.testing.assert_allclose(mixed["y"], 0.25 * 7 - 0.75 * 8)


def test_the_sweep_runs_from_a_at_zero_to_b_at_one():
    draw, key = mix(linear), jax.random.key(0)
    same(draw(key, jnp.float32(0), A, B), A, rtol=0)
    same(draw(key, jnp.float32(1), A, B), B, rtol=0)
    same(draw(key, jnp.float32(0.25), A, B), combine(A, B, 0.75))


def test_uniform_at_zero_is_the_midpoint():
    same(mix(uniform)(jax.random.key(0), jnp.float32(0), A, B), combine(A, B, 0.5), rtol=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.floats(0, 0.5, width=32), st.integers(0, 1000))
def test_uniform_shares_fill_their_interval(s, seed):
    u = np.asarray(uniform(jax.random.key(seed), jnp.float32(s), jnp.zeros(4000)))
    assert (u >= 0.5 - s - 1e-6).all()
    assert (u <= 0.5 + s + 1e-6).all()
    assert abs(u.mean() - 0.5) <= 5 * s / np.sqrt(3 * 4000) + 1e-6
    assert u.std() == pytest.approx(s / np.sqrt(3), rel=0.1, abs=1e-6)


def test_every_leaf_and_every_key_has_coefficients_of_its_own():
    draw = mix(uniform)
    zeros, ones = (jax.tree.map(lambda leaf, v=v: jnp.full_like(leaf, v), A) for v in (0, 1))
    shares = draw(jax.random.key(0), jnp.float32(0.5), zeros, ones)
    other = draw(jax.random.key(1), jnp.float32(0.5), zeros, ones)
    assert not np.allclose(shares["x"]["kernel"], shares["y"])
    assert not np.allclose(shares["y"], other["y"])


def test_coefficients_depend_on_a_leafs_name_alone():
    """Another leaf beside it must not change the numbers: streams are named, not counted."""
    draw, key = mix(uniform), jax.random.key(0)
    whole = draw(key, jnp.float32(0.5), A, B)
    part = draw(key, jnp.float32(0.5), {"y": A["y"]}, {"y": B["y"]})
    np.testing.assert_array_equal(whole["y"], part["y"])


def shares(distribution, parameter, count=4000, seed=0):
    return np.asarray(distribution(jax.random.key(seed), jnp.float32(parameter), jnp.zeros(count)))


@pytest.mark.parametrize("distribution", [linear, subcube, hyperplane, bernoulli])
def test_sweeps_begin_at_a_and_end_at_b_exactly(distribution):
    draw = mix(distribution)
    for seed in range(3):
        same(draw(jax.random.key(seed), jnp.float32(0), A, B), A, rtol=0)
        same(draw(jax.random.key(seed), jnp.float32(1), A, B), B, rtol=0)


@pytest.mark.parametrize(
    ("share", "low", "high"), [(0.1, 0, 0.2), (0.25, 0, 0.5), (0.5, 0, 1), (0.75, 0.5, 1), (0.9, 0.8, 1)]
)
def test_the_subcube_has_its_centre_at_the_share(share, low, high):
    found = stats.kstest(shares(subcube, share), stats.uniform(low, high - low).cdf)
    assert found.pvalue > 1e-3


@settings(max_examples=15, deadline=None)
@given(st.floats(0, 1), st.integers(0, 100))
def test_bernoulli_takes_either_weight_with_its_probability(p, seed):
    u = shares(bernoulli, p, seed=seed)
    assert set(np.unique(u)) <= {0.0, 1.0}
    assert abs(u.mean() - p) <= 5 * np.sqrt(p * (1 - p) / len(u)) + 1e-9


def truncated(mean):
    """The exponential distribution truncated to [0, 1] with a mean, from scipy and a rate found in float64."""
    from scipy.optimize import brentq

    small = min(mean, 1 - mean)
    rate = brentq(lambda r: stats.truncexpon.mean(b=r, scale=1 / r) - small, 1e-6, 2 / small)
    below = stats.truncexpon(b=rate, scale=1 / rate)
    return rate, below.cdf if mean <= 0.5 else lambda x: 1 - below.cdf(1 - x)


@pytest.mark.parametrize("mean", [0.01, 0.1, 0.3, 0.45, 0.49, 0.55, 0.8, 0.99])
def test_hyperplane_shares_follow_the_truncated_exponential(mean):
    rate, cdf = truncated(mean)
    assert float(truncated_rate(jnp.float32(min(mean, 1 - mean)))) == pytest.approx(rate, rel=2e-3)
    assert stats.kstest(shares(hyperplane, mean), cdf).pvalue > 1e-3


def test_hyperplane_at_one_half_is_uniform():
    assert float(truncated_rate(jnp.float32(0.5))) == 0
    assert stats.kstest(shares(hyperplane, 0.5), stats.uniform.cdf).pvalue > 1e-3


@settings(max_examples=60, deadline=None)
@given(st.floats(0, 1, width=32), st.integers(0, 100))
def test_hyperplane_is_stable_for_every_mean(mean, seed):
    u = shares(hyperplane, mean, seed=seed)
    assert np.isfinite(u).all()
    assert (u >= 0).all()
    assert (u <= 1).all()
    # A share's variance is at most that of the uniform distribution, and at most the square of the smaller mean.
    deviation = min(np.sqrt(1 / 12), mean, 1 - mean)
    assert abs(u.mean() - mean) <= 5 * deviation / np.sqrt(len(u)) + 1e-6


def test_centered_shares_fill_the_box_around_a():
    assert stats.kstest(shares(centered, 0.3), stats.uniform(-0.3, 0.6).cdf).pvalue > 1e-3
    same(mix(centered)(jax.random.key(0), jnp.float32(0), A, B), A, rtol=0)


def test_max_and_min_take_the_larger_and_the_smaller_weight():
    a, b = {"w": jnp.array([1.0, -3.0, 2.0, 0.5])}, {"w": jnp.array([-2.0, 1.0, 2.0, -0.25])}
    key = jax.random.key(0)
    np.testing.assert_array_equal(minmax(key, jnp.float32(0), a, b)["w"], [-2, -3, 2, 0.5])
    np.testing.assert_array_equal(minmax(key, jnp.float32(1), a, b)["w"], [1, 1, 2, -0.25])
    np.testing.assert_allclose(minmax(key, jnp.float32(0.5), a, b)["w"], [-0.5, -1, 2, 0.125])


def test_stitching_takes_the_lower_layers_from_b():
    draw, key = stitch({"x/kernel": 1, "x/bias": 1, "y": 2}.__getitem__), jax.random.key(0)
    same(draw(key, jnp.float32(0), A, B), A, rtol=0)
    same(draw(key, jnp.float32(1), A, B), {"x": B["x"], "y": A["y"]}, rtol=0)
    same(draw(key, jnp.float32(2), A, B), B, rtol=0)


def test_blending_three_networks_starts_from_a():
    c, key = jax.tree.map(jnp.ones_like, A), jax.random.key(0)
    for shares_, expected in (([0, 0], A), ([1, 0], B), ([0, 1], c)):
        same(blend(key, jnp.array(shares_, jnp.float32), A, B, c), expected, rtol=1e-6, atol=1e-6)
