from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import EPS, assert_close, assert_equal
from scipy import stats
from scipy.optimize import brentq

from mcomb import Distribution, combine, linear, sample, uniform
from mcomb.combination import bernoulli, blend, centered, hyperplane, minmax, mix, stitch, subcube, truncated_rate
from mcomb.errors import UserError

A = {"x": {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3)}, "y": jnp.full((2, 3), 7.0)}
B = jax.tree.map(lambda leaf: -leaf - 1, A)
COUNT = 4000  # shares in a sample

compiled = cache(jax.jit)


def draw(distribution, parameter, a, b, seed=0):
    """Draw a combination of A and B in a compiled function, as `evaluate` does."""
    return compiled(mix(distribution))(jax.random.key(seed), jnp.float32(parameter), a, b)


def draw_shares(distribution, parameter, seed=0):
    return np.asarray(compiled(distribution)(jax.random.key(seed), jnp.float32(parameter), jnp.zeros(COUNT)))


def check_mean(shares, mean, deviation):
    """Check that the mean of a sample is within five standard errors, and rounding, of the expected one."""
    assert abs(shares.mean() - mean) <= 5 * deviation / np.sqrt(COUNT) + EPS


def test_combine_share_zero_is_a_and_one_is_b():
    assert_equal(combine(A, B, 0.0), A)
    assert_equal(combine(A, B, 1.0), B)


def test_combine_takes_share_of_each_weight():
    share = {"x": {"kernel": jnp.array([[0.0, 1, 1], [1, 0, 1]]), "bias": jnp.ones(3)}, "y": jnp.zeros((2, 3))}
    mixed = combine(A, B, share)
    assert_equal(mixed, {"x": {"kernel": np.array([[0, -2, -3], [-4, 4, -6]]), "bias": B["x"]["bias"]}, "y": A["y"]})


def test_combine_takes_one_share_per_branch():
    mixed = combine(A, B, {"x": 0.0, "y": 0.75})
    assert_equal(mixed["x"], A["x"])
    assert_equal(mixed["y"], np.full((2, 3), 0.25 * 7 - 0.75 * 8))


def test_uniform_at_zero_is_the_midpoint():
    assert_close(draw(uniform, 0, A, B), combine(A, B, 0.5), roundings=2)


@settings(max_examples=20, deadline=None)
@given(st.floats(0, 0.5, width=32), st.integers(0, 1000))
def test_uniform_shares_fill_their_interval(s, seed):
    shares, deviation = draw_shares(uniform, s, seed), s / np.sqrt(3)
    assert (np.abs(shares - 0.5) <= s + EPS).all()
    check_mean(shares, 0.5, deviation)
    # The variance of a uniform sample's variance is 0.8 deviation⁴ / count.
    assert abs(shares.var() - deviation**2) <= 5 * np.sqrt(0.8 / COUNT) * deviation**2 + EPS


def test_mix_draws_differ_by_leaf_and_key():
    zeros, ones = (jax.tree.map(lambda leaf, v=v: jnp.full_like(leaf, v), A) for v in (0, 1))
    shares, other = (draw(uniform, 0.5, zeros, ones, seed) for seed in (0, 1))
    assert (np.abs(shares["x"]["kernel"] - shares["y"]) > EPS).all()
    assert (np.abs(shares["y"] - other["y"]) > EPS).all()


def test_mix_draws_depend_only_on_leaf_name():
    """Another leaf in the tree does not change the numbers, because random streams are named, not counted."""
    whole = draw(uniform, 0.5, A, B)
    assert_equal(whole["y"], draw(uniform, 0.5, {"y": A["y"]}, {"y": B["y"]})["y"])


def test_leaves_whose_names_share_a_hash_have_their_own_shares():
    """The CRC-32 of these two names is the same."""
    names = "buckeroo", "plumless", "other"
    a, b = ({name: jnp.full(50, float(value)) for name in names} for value in (0, 1))
    shares = draw(uniform, 0.5, a, b)
    assert (shares["buckeroo"] != shares["plumless"]).all()
    for name in ("buckeroo", "other"):  # as alone
        assert_equal(shares[name], draw(uniform, 0.5, {name: a[name]}, {name: b[name]})[name])
    assert_equal(draw(uniform, 0.5, {"plumless": a["other"]}, {"plumless": b["other"]})["plumless"], shares["buckeroo"])


@pytest.mark.parametrize("distribution", [linear, subcube, hyperplane, bernoulli])
def test_distribution_range_runs_from_a_to_b(distribution):
    for seed in range(3):
        assert_equal(draw(distribution, 0, A, B, seed), A)
        assert_equal(draw(distribution, 1, A, B, seed), B)


def test_linear_has_same_share_for_all_weights():
    assert_close(draw(linear, 0.25, A, B), combine(A, B, 0.25), roundings=2)


@pytest.mark.parametrize(
    ("share", "low", "high"), [(0.1, 0, 0.2), (0.25, 0, 0.5), (0.5, 0, 1), (0.75, 0.5, 1), (0.9, 0.8, 1)]
)
def test_subcube_is_centred_at_share(share, low, high):
    assert stats.kstest(draw_shares(subcube, share), stats.uniform(low, high - low).cdf).pvalue > 1e-3


@settings(max_examples=15, deadline=None)
@given(st.floats(0, 1), st.integers(0, 100))
def test_bernoulli_takes_b_with_probability(p, seed):
    shares = draw_shares(bernoulli, p, seed)
    assert set(np.unique(shares)) <= {0.0, 1.0}
    check_mean(shares, p, np.sqrt(p * (1 - p)))


def truncated_exponential(mean):
    """Return rate and cdf of the exponential distribution truncated to [0, 1] with this mean, in float64."""
    small = min(mean, 1 - mean)
    rate = brentq(lambda r: stats.truncexpon.mean(b=r, scale=1 / r) - small, 1e-3, 2 / small, xtol=1e-12)
    lower = stats.truncexpon(b=rate, scale=1 / rate)
    return rate, lower.cdf if mean <= 0.5 else lambda x: 1 - lower.cdf(1 - x)


@pytest.mark.parametrize("mean", [0.01, 0.1, 0.3, 0.45, 0.46, 0.49, 0.55, 0.8, 0.99])
def test_hyperplane_follows_truncated_exponential(mean):
    mean = float(np.float32(mean))
    rate, cdf = truncated_exponential(mean)
    found = float(compiled(truncated_rate)(jnp.float32(min(mean, 1 - mean))))
    assert_close(found, rate, roundings=4, scale=max(rate, 12))  # near mean ½ the rate changes 12 times as much
    assert stats.kstest(draw_shares(hyperplane, mean), cdf).pvalue > 1e-3


def test_hyperplane_at_one_half_is_uniform():
    assert float(truncated_rate(jnp.float32(0.5))) == 0
    assert stats.kstest(draw_shares(hyperplane, 0.5), stats.uniform.cdf).pvalue > 1e-3


@settings(max_examples=60, deadline=None)
@given(st.floats(0, 1, width=32), st.integers(0, 100))
def test_hyperplane_is_stable_for_every_mean(mean, seed):
    shares = draw_shares(hyperplane, mean, seed)
    assert np.isfinite(shares).all()
    assert (shares >= 0).all()
    assert (shares <= 1).all()
    # A share's variance is at most that of the uniform distribution, and at most the square of the smaller mean.
    check_mean(shares, mean, min(np.sqrt(1 / 12), mean, 1 - mean))


def test_centered_fills_box_around_a():
    assert stats.kstest(draw_shares(centered, 0.3), stats.uniform(-0.3, 0.6).cdf).pvalue > 1e-3
    assert_equal(draw(centered, 0, A, B), A)


def test_minmax_takes_larger_and_smaller_weights():
    a, b = {"w": jnp.array([1.0, -3.0, 2.0, 0.5])}, {"w": jnp.array([-2.0, 1.0, 2.0, -0.25])}
    for share, expected in ((0, [-2, -3, 2, 0.5]), (1, [1, 1, 2, -0.25]), (0.5, [-0.5, -1, 2, 0.125])):
        assert_equal(minmax(jax.random.key(0), jnp.float32(share), a, b)["w"], np.array(expected))


def test_stitch_takes_lower_layers_from_b():
    draw_stitched = stitch({"x/kernel": 1, "x/bias": 1, "y": 2}.__getitem__)
    for layer, expected in enumerate((A, {"x": B["x"], "y": A["y"]}, B)):
        assert_equal(draw_stitched(jax.random.key(0), jnp.float32(layer), A, B), expected)


def test_blend_of_three_networks_starts_from_a():
    c = jax.tree.map(jnp.ones_like, A)
    inside = jax.tree.map(lambda a, b, c: (a + b + 2 * c) / 4, A, B, c)
    for shares, expected in (([0, 0], A), ([1, 0], B), ([0, 1], c), ([0.25, 0.5], inside)):
        blended = blend(jax.random.key(0), jnp.array(shares, jnp.float32), A, B, c)
        assert_close(blended, expected, roundings=4, scale=15)  # the largest difference of two weights


def test_combine_keeps_integers_of_a():
    def tree(scale):
        keys = jax.random.split(jax.random.key(scale), 2)
        counts = {"steps": jnp.array([1, 2]) * scale, "used": jnp.array([scale > 1])}
        return counts | {"key": keys, "weights": jnp.ones(2) * scale}

    a, b = tree(1), tree(2)
    for mixed in (draw(linear, 1.0, a, b), draw(bernoulli, 1.0, a, b), combine(a, b, 1.0)):
        assert_equal(mixed["weights"], b["weights"])
        for name in ("steps", "used"):
            assert_equal(mixed[name], a[name])
        assert_equal(jax.random.key_data(mixed["key"]), jax.random.key_data(a["key"]))


def test_mix_of_complex_weights_draws_two_shares():
    a, b = jnp.zeros(COUNT, jnp.complex64), jnp.full(COUNT, 1 + 1j, jnp.complex64)
    mixed = np.asarray(draw(uniform, 0.5, a, b))
    check_mean(mixed.real, 0.5, 12**-0.5)
    check_mean(mixed.imag, 0.5, 12**-0.5)
    assert abs(np.corrcoef(mixed.real, mixed.imag)[0, 1]) < 5 / np.sqrt(COUNT)
    assert_equal(combine(a, b, 0.75), jnp.full(COUNT, 0.75 + 0.75j, jnp.complex64))


HALVES = [jnp.bfloat16, jnp.float16]


def in_half(tree, dtype):
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("distribution", [linear, uniform, subcube, hyperplane, bernoulli, centered])
def test_mix_of_half_precision_is_in_float32(distribution, dtype):
    halves = [in_half(own, dtype) for own in (A, B)]
    singles = [in_half(own, jnp.float32) for own in halves]
    found, expected = (draw(distribution, 0.3, *both) for both in (halves, singles))
    for leaf in jax.tree.leaves(found):
        assert leaf.dtype == dtype
    assert_equal(found, in_half(expected, dtype))


@pytest.mark.parametrize("dtype", HALVES)
def test_distribution_shares_of_half_precision_are_float32(dtype):
    for distribution, parameter, mean in ((uniform, 0.5, 0.5), (hyperplane, 0.05, 0.05), (linear, 0.3, 0.3)):
        shares = distribution(jax.random.key(0), jnp.float32(parameter), jnp.zeros(COUNT, dtype))
        assert shares.dtype == jnp.float32
        assert_equal(shares, distribution(jax.random.key(0), jnp.float32(parameter), jnp.zeros(COUNT)))
        check_mean(np.asarray(shares), mean, 12**-0.5)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_combine_keeps_half_precision(dtype, convert):
    a, b = (jax.tree.map(convert, in_half(own, dtype)) for own in (A, B))
    middle = in_half(combine(A, B, 0.5), dtype)  # exact: whole numbers and halves
    for v in (0.5, np.float32(0.5), np.float64(0.5), jnp.float32(0.5), jnp.array(0.5, dtype)):
        found = combine(a, b, v)
        assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(dtype)}
        assert_equal(found, middle)
    for found in (
        minmax(jax.random.key(0), jnp.float32(0.5), a, b),
        blend(jax.random.key(0), jnp.array([0.5, 0.0]), a, b, a),
    ):
        assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(dtype)}
        assert_equal(found, middle)


def test_combine_by_float64_share_keeps_float32():
    a, b = (jax.tree.map(np.asarray, own) for own in (A, B))
    for leaf in jax.tree.leaves(combine(a, b, np.float64(0.3))):
        assert leaf.dtype == np.float32


OUTSIDE = [
    (uniform, -0.5, "0 or more"),
    (uniform, np.inf, "0 or more"),
    (subcube, 1.5, "a number from 0 to 1"),
    (subcube, -0.1, "a number from 0 to 1"),
    (hyperplane, -0.2, "a number from 0 to 1"),
    (hyperplane, np.nan, "a number from 0 to 1"),
    (bernoulli, 1.5, "a number from 0 to 1"),
    (centered, -0.1, "0 or more"),
]


@pytest.mark.parametrize(("distribution", "parameter", "remedy"), OUTSIDE)
def test_distribution_rejects_points_out_of_range(distribution, parameter, remedy):
    name, point = distribution.parameter, f"{parameter:g}"
    key, problem = jax.random.key(0), f"{name} = {point} is out of range for {distribution!r}: pass {remedy}"
    with pytest.raises(UserError, match=problem):
        sample(A, B, distribution, parameter)
    with pytest.raises(UserError, match=problem):
        distribution(key, jnp.float32(parameter), jnp.zeros(3))
    with pytest.raises(UserError, match=problem):
        mix(distribution)(key, jnp.float32(parameter), A, B)


@pytest.mark.parametrize(
    ("distribution", "parameter"),
    [(linear, -1), (linear, 2), (uniform, 0.75), (centered, 3), (subcube, 1), (hyperplane, 0), (bernoulli, 1)],
)
def test_distribution_takes_ends_and_extrapolation(distribution, parameter):
    """The line extends beyond A and B, and so do the boxes around A and around the midpoint."""
    drawn = mix(distribution)(jax.random.key(0), jnp.float32(parameter), A, B)
    assert_close(drawn, draw(distribution, parameter, A, B), roundings=8, scale=40.0)


def test_distribution_accepts_any_traced_point():
    drawn = jax.jit(mix(bernoulli))(jax.random.key(0), jnp.float32(1.5), A, B)
    assert_equal(drawn, B)


def test_sample_draws_each_weight_by_itself():
    zeros, ones = ({"w": jnp.full(COUNT, value)} for value in (0.0, 1.0))
    found = np.asarray(sample(zeros, ones, uniform, 0.25)["w"])
    check_mean(found, 0.5, 0.5 * 12**-0.5)
    assert 0.25 <= found.min() < 0.26
    assert 0.74 < found.max() <= 0.75
    assert_equal(sample(zeros, ones, uniform, 0.25)["w"], found)
    assert (sample(zeros, ones, uniform, 0.25, seed=1)["w"] != found).mean() > 0.99


def test_sample_of_linear_equals_combine():
    assert_close(sample(A, B, linear, 0.25), combine(A, B, 0.25), roundings=2)


def test_distribution_of_users_own():
    """Its shares are those of its function, and it shows its name."""
    half = Distribution("half", "p", 0.0, 1.0, lambda key, p, leaf: jnp.full(leaf.shape, p / 2))
    assert repr(half) == "half"
    assert_close(sample(A, B, half, 0.5), combine(A, B, 0.25), roundings=2)
