"""The action of mixed groups: elements compose, invert, and keep the function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from groups import case
from numerics import assert_close

from mcomb import UserError
from mcomb.symmetry.matrix_groups import SymmetrySpec

pytestmark = pytest.mark.usefixtures("any_rank")

MIXED = ["MLP, ReLU", "attention", "attention, query, key and value in one", "stream, LayerNorm with bias", "LSTM"]


def elements(spec: SymmetrySpec, count: int = 2):
    return [spec.random(jax.random.key(i)) for i in range(count)]


@pytest.mark.parametrize("name", MIXED)
def test_elements_compose(name):
    network, spec = case(name)
    p, q = elements(spec)
    one_by_one = spec.apply(p, spec.apply(q, network.params))
    assert_close(spec.apply(spec.compose(p, q), network.params), one_by_one, roundings=50)


@pytest.mark.parametrize("name", MIXED)
def test_elements_invert(name):
    network, spec = case(name)
    (element,) = elements(spec, 1)
    moved = spec.apply(element, network.params)
    assert any(np.abs(moved[leaf] - network.params[leaf]).max() > 0.1 for leaf in moved)
    assert_close(spec.apply(spec.invert(element), moved), network.params, roundings=50)
    unit = spec.compose(element, spec.invert(element))
    assert_close(unit, {name: np.asarray(x, unit[name].dtype) for name, x in spec.identity().items()}, roundings=1)


@pytest.mark.parametrize("name", MIXED)
def test_elements_act_alike_inside_jit(name):
    network, spec = case(name)
    (element,) = elements(spec, 1)
    inside = jax.jit(spec.apply)(element, network.params)
    assert_close(inside, spec.apply(element, network.params), roundings=50)


@pytest.mark.parametrize("name", MIXED)
def test_rounding_is_that_of_the_dtype(name):
    network, spec = case(name)
    assert spec.rounding(network.apply, network.params, network.inputs, spec.identity()) < 1e-7
    assert spec.rounding(network.apply, network.params, network.inputs) < 1e-4


def test_dtypes_and_array_types_are_kept():
    network, spec = case("attention")
    (element,) = elements(spec, 1)
    half = {name: jnp.asarray(leaf, jnp.bfloat16) for name, leaf in network.params.items()}
    assert {type(leaf) for leaf in spec.apply(element, network.params).values()} == {np.ndarray}
    moved = spec.apply(element, half)
    assert all(isinstance(leaf, jax.Array) and leaf.dtype == jnp.bfloat16 for leaf in moved.values())


def test_rotations_leave_gains_alone():
    network, spec = case("stream, RMSNorm")
    element = spec.identity() | {name: spec.random(jax.random.key(3))[name] for name in spec.groups}
    moved = spec.apply(element, network.params)
    assert all((moved[name] == network.params[name]).all() for name in moved if name.startswith("gain"))
    assert np.abs(moved["up1"] - network.params["up1"]).max() > 0.1


def test_mean_keeping_rotations_fix_ones():
    _, spec = case("stream, LayerNorm")
    (name,) = spec.groups
    (element,) = elements(spec, 1)
    assert_close(element[name].sum(-1), np.ones(4), roundings=4)


def test_check_finds_a_wrong_group():
    network, spec = case("MLP, ReLU")
    with pytest.raises(UserError, match="computes another function"):
        spec.check(lambda p, x: network.apply(p, x) + p["bias"].sum(), network.params, network.inputs)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("attention", lambda e: {k: x for k, x in e.items() if k != "q"}, "pass one for each name"),
        ("attention", lambda e: e | {"q": e["q"][0]}, "q has shape"),
        ("stream, RMSNorm", lambda e: e | {"embed": 2 * e["embed"]}, "embed is not orthogonal"),
        ("stream, LayerNorm", lambda e: e | {"embed": -e["embed"]}, "embed does not keep the mean"),
        ("MLP, ReLU", lambda e: e | {"up:scale": -e["up:scale"]}, "factors that are not positive"),
        ("MLP, tanh", lambda e: e | {"up:sign": 2 * e["up:sign"]}, "factors that are not sign"),
    ],
)
def test_elements_that_are_wrong_are_refused(name, change, message):
    network, spec = case(name)
    with pytest.raises(UserError, match=message):
        spec.apply(change(spec.identity()), network.params)


def test_gains_of_zero_are_refused():
    network, spec = case("stream, RMSNorm")
    params = network.params | {"gain2": network.params["gain2"] * np.array([1, 0, 1, 1], np.float32)}
    with pytest.raises(UserError, match="The gain gain2 is 0 for some units"):
        spec.apply(spec.random(jax.random.key(0)), params)


def test_table_names_groups_and_powers():
    _, spec = case("stream, RMSNorm")
    text = str(spec)
    assert "rotations" in text
    assert "folds this gain" in text
    assert "gain1 up1^-1" in text
    assert "frozen by" in text
    _, spec = case("attention")
    assert "k[2]⁻¹" in str(spec)
    assert "(one for each of q)" in str(spec)
