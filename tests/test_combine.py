import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcomb import combine, linear, mix, uniform

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
