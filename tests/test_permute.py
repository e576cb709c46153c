import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcomb import PermutationSpec, check_permuted
from mcomb.base import UserError, named_leaves

SHAPES = {"a": (4, 3), "b": (3,), "c": (3, 5, 4), "d": (5, 5)}
AXES = {"a": ("X", "Y"), "b": ("Y",), "c": ("Y", "Z", "X"), "d": ("Z", "Z")}
PARAMS = {name: np.random.default_rng(0).normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
SPEC = PermutationSpec.of(PARAMS, AXES)

perms = st.integers(0, 2**31).map(lambda seed: SPEC.random(jax.random.key(seed)))


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_sizes_are_read_off_the_parameters():
    assert SPEC.sizes == {"X": 4, "Y": 3, "Z": 5}


def test_applying_takes_the_named_units_on_every_axis():
    p = SPEC.identity() | {"Y": np.array([2, 0, 1])}
    moved = SPEC.apply(p, PARAMS)
    np.testing.assert_array_equal(moved["a"], PARAMS["a"][:, [2, 0, 1]])
    np.testing.assert_array_equal(moved["b"], PARAMS["b"][[2, 0, 1]])
    np.testing.assert_array_equal(moved["c"], PARAMS["c"][[2, 0, 1]])
    np.testing.assert_array_equal(moved["d"], PARAMS["d"])


def test_identity_changes_nothing():
    same(SPEC.apply(SPEC.identity(), PARAMS), PARAMS)


@settings(max_examples=20, deadline=None)
@given(perms, perms)
def test_composition_applies_one_after_the_other(p, q):
    same(SPEC.apply(SPEC.compose(p, q), PARAMS), SPEC.apply(p, SPEC.apply(q, PARAMS)))


@settings(max_examples=20, deadline=None)
@given(perms)
def test_inverse_undoes(p):
    same(SPEC.apply(SPEC.invert(p), SPEC.apply(p, PARAMS)), PARAMS)
    same(SPEC.compose(p, SPEC.invert(p)), SPEC.identity())
    same(SPEC.compose(SPEC.invert(p), p), SPEC.identity())


@settings(max_examples=20, deadline=None)
@given(perms, perms, perms)
def test_composition_is_associative(p, q, r):
    same(SPEC.compose(p, SPEC.compose(q, r)), SPEC.compose(SPEC.compose(p, q), r))


@settings(max_examples=20, deadline=None)
@given(perms)
def test_random_gives_permutations(p):
    for name, size in SPEC.sizes.items():
        assert sorted(p[name].tolist()) == list(range(size))


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({k: v for k, v in AXES.items() if k != "c"}, "says nothing of c"),
        (AXES | {"e": ("X",)}, "names e, which the parameters lack"),
        (AXES | {"b": ("Y", None)}, r"gives b 2 axes, but its shape is \(3,\)"),
        (AXES | {"c": ("Y", "Z", "Z")}, "axis 2 of c has 4 entries, but permutation Z has 5"),
    ],
)
def test_a_wrong_spec_is_an_error_that_names_the_leaf(axes, message):
    with pytest.raises(UserError, match=message):
        PermutationSpec.of(PARAMS, axes)


def test_a_spec_is_checked_against_other_parameters_too():
    with pytest.raises(UserError, match="axis 0 of b has 4 entries"):
        SPEC.validate(PARAMS | {"b": np.zeros(4)})


def test_a_permuted_network_computes_the_same_function(network):
    setup, model, params, images = network
    spec = setup.spec(params)
    permuted = spec.apply(spec.random(jax.random.key(3)), params)
    before, after = (model.apply({"params": tree}, images) for tree in (params, permuted))
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-5)
    moved = named_leaves(jax.tree.map(lambda x, y: not np.array_equal(x, y), params, permuted))
    assert all(move for name, move in moved.items() if name != "logits/bias")


def test_every_hidden_unit_of_every_network_can_move(network):
    setup, _, params, _ = network
    assert len(setup.spec(params).sizes) == {"MLP on digits": 3, "Tiny-10 on CIFAR-10": 8}.get(setup.title, 12)


def test_a_network_that_computes_another_function_is_caught(network):
    setup, model, params, images = network
    spec = setup.spec(params)

    def apply(params, x):
        return model.apply({"params": params}, x)

    permuted = spec.apply(spec.random(jax.random.key(3)), params)
    check_permuted(apply, params, permuted, images)
    broken = permuted | {"logits": params["logits"]}
    with pytest.raises(UserError, match="computes another function"):
        check_permuted(apply, params, broken, images)
