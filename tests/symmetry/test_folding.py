"""Canonical forms: gains of 1, balanced heads and scales, and the same function."""

import jax
import numpy as np
import pytest
from groups import NETWORKS, case
from numerics import EPS, assert_close

pytestmark = pytest.mark.usefixtures("any_rank")


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("form", ["fold", "balance"])
def test_canonical_forms_compute_the_same_function(name, form):
    network, spec = case(name)
    before = network.apply(network.params, network.inputs)
    after = network.apply(getattr(spec, form)(network.params), network.inputs)
    assert_close(after, before, roundings=200)


@pytest.mark.parametrize("name", ["stream, RMSNorm with bias", "stream, LayerNorm with bias"])
def test_folding_sets_gains_to_one(name):
    network, spec = case(name)
    negative = network.params | {"gain1": -network.params["gain1"]}
    folded = spec.fold(negative)
    assert_close([folded[f"gain{i}"] for i in (1, 2, 3)], [np.ones(4)] * 3, roundings=1)
    assert_close(network.apply(folded, network.inputs), network.apply(negative, network.inputs), roundings=200)


def test_balance_gives_heads_orthogonal_columns_of_equal_norms():
    network, spec = case("attention")
    balanced = spec.balance(network.params)
    for write, read in (("q", "k"), ("v", "out")):
        reader = balanced[read] if read == "k" else balanced[read].transpose(2, 0, 1)
        grams = [np.einsum("chd,che->hde", x, x) for x in (balanced[write], reader)]
        assert_close(grams[0], grams[1], roundings=100)
        norms = np.diagonal(grams[0], axis1=-2, axis2=-1)
        assert (np.diff(norms) <= 100 * EPS * norms.max()).all()
        assert_close(grams[0], np.eye(3) * norms[:, None], roundings=100)


def test_balance_of_heads_does_not_depend_on_the_basis():
    network, spec = case("attention, query, key and value in one")
    moved = spec.apply(spec.identity() | {n: spec.random(jax.random.key(1))[n] for n in spec.groups}, network.params)
    one, other = spec.balance(network.params), spec.balance(moved)
    assert_close(np.abs(other["qkv"]), np.abs(one["qkv"]), roundings=2_000)


def test_balance_gives_scales_the_smallest_sum_of_squares():
    network, spec = case("MLP, squared ReLU")
    balanced = spec.balance(network.params)
    incoming = (balanced["up"] ** 2).sum(0) + balanced["bias"] ** 2
    assert_close(incoming, 2 * (balanced["down"] ** 2).sum(1), roundings=100)


def test_heads_of_low_rank_are_balanced():
    network, spec = case("attention")
    params = network.params | {"q": network.params["q"] * np.array([1, 1, 0], np.float32)}
    balanced = spec.balance(params)
    assert all(np.isfinite(leaf).all() for leaf in balanced.values())
    before, after = (network.apply(own, network.inputs) for own in (params, balanced))
    assert_close(after, before, roundings=2_000)
