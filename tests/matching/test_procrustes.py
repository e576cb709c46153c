"""Matching by all groups: planted elements are found, and the objective never falls."""

from functools import cache

import jax
import numpy as np
import pytest
from groups import NETWORKS, case
from numerics import assert_close, assert_never_falls

import mcomb
from mcomb import UserError, align
from mcomb.matching.learned_groups import learn_basis
from mcomb.symmetry.folding import balancing

pytestmark = pytest.mark.usefixtures("any_rank")

PLANTED = [
    "MLP, ReLU",
    "MLP, tanh",
    "MLP, linear",
    "gated MLP",
    "deep MLP, leaky ReLU",
    "attention",
    "attention, query, key and value in one",
    "stream, RMSNorm",
    "stream, LayerNorm with bias",
    "stream, RMSNorm, tied",
    "LSTM",
]


@pytest.mark.parametrize("name", PLANTED)
def test_match_groups_finds_planted_elements(name):
    network, spec = case(name)
    moved = spec.apply(spec.random(jax.random.key(5)), network.params)
    aligned = align(network.apply, network.params, moved, network.inputs, spec=spec, matcher=mcomb.weights(restarts=4))
    assert_close(aligned.params, network.params, roundings=2_000)
    assert_never_falls(aligned.matching.trace, slack=1e-9 * abs(aligned.matching.objective))


@pytest.mark.parametrize("name", ["attention", "stream, LayerNorm with bias"])
def test_align_by_groups_keeps_the_function(name):
    network, spec = case(name)
    rng = np.random.default_rng(3)
    other = {leaf: x + 0.3 * np.float32(rng.normal(size=x.shape)) for leaf, x in network.params.items()}
    aligned = align(network.apply, network.params, other, network.inputs, groups="all")
    assert aligned.spec == spec
    before, after = (network.apply(own, network.inputs) for own in (other, aligned.params))
    assert_close(after, before, roundings=500)
    assert 0 < aligned.rounding < 1e-4
    assert f"rounding {aligned.rounding:.2g}" in repr(aligned)
    gains = [leaf for leaf in other if leaf.startswith("gain")]
    assert_close([aligned.params[leaf] for leaf in gains], [network.params[leaf] for leaf in gains], roundings=2)


TRANSPORTED = ["MLP, ReLU", "attention", "stream, RMSNorm", "stream, LayerNorm with bias", "gated MLP"]


@cache
def transported(name: str, groups: str):
    """Return a network, another one, their alignment, and a small random tree."""
    (network, spec), rng = case(name), np.random.default_rng(3)
    near, tree = (
        {leaf: scale * x + 0.3 * np.float32(rng.normal(size=x.shape)) for leaf, x in network.params.items()}
        for scale in (1, 0)
    )
    other = spec.apply(spec.random(jax.random.key(1)), near)
    return network, other, align(network.apply, network.params, other, network.inputs, groups=groups), tree


@pytest.mark.parametrize("groups", ["permutations", "all"])
@pytest.mark.parametrize("name", TRANSPORTED)
def test_transport_of_updates_changes_the_function_alike(name, groups):
    network, other, aligned, update = transported(name, groups)
    carried = aligned.transport(update)
    wanted, found, unchanged = (
        network.apply({leaf: params[leaf] + change[leaf] for leaf in params}, network.inputs)
        for params, change in ((other, update), (aligned.params, carried), (aligned.params, update))
    )
    assert_close(found, wanted, roundings=1_000)
    assert np.abs(unchanged - wanted).max() > 0.01


@pytest.mark.parametrize("groups", ["permutations", "all"])
@pytest.mark.parametrize("name", TRANSPORTED)
def test_transport_of_gradients_gives_those_of_aligned_network(name, groups):
    network, other, aligned, _ = transported(name, groups)
    gradient = jax.grad(lambda params: (network.apply(params, network.inputs) ** 2).mean())
    found = aligned.transport(gradient(other), kind="gradient")
    wanted = gradient(aligned.params)
    for leaf in wanted:
        np.testing.assert_allclose(found[leaf], wanted[leaf], rtol=0, atol=1e-4 * np.abs(wanted[leaf]).max())


def test_transport_names_missing_leaves_and_unknown_kinds():
    _, _, aligned, update = transported("MLP, ReLU", "all")
    with pytest.raises(UserError, match=r"bias is .* in the network and missing in the tree"):
        aligned.transport({leaf: x for leaf, x in update.items() if leaf != "bias"})
    with pytest.raises(UserError, match="Unknown kind 'momentum': choose update or gradient"):
        aligned.transport(update, kind="momentum")


def test_alignment_continues_from_a_start():
    network, spec = case("attention")
    rng = np.random.default_rng(3)
    other = {leaf: np.float32(rng.normal(size=x.shape)) for leaf, x in network.params.items()}
    first = mcomb.weights().match(spec, network.params, other)
    second = mcomb.weights(start=first.perms).match(spec, network.params, other)
    slack = 1e-6 * abs(first.objective)
    assert second.trace[0] == pytest.approx(first.objective, abs=slack)
    assert second.objective >= first.objective - slack


def test_networks_without_more_groups_match_as_ever():
    network = NETWORKS["MLP, GELU"]()
    other = {leaf: x[::-1].copy() for leaf, x in network.params.items()}
    mixed = align(network.apply, network.params, other, network.inputs, groups="all")
    plain = align(network.apply, network.params, other, network.inputs)
    assert (mixed.matching.perms["up"] == plain.matching.perms["up"]).all()
    assert mixed.matching.trace == plain.matching.trace


ACTIVE = ["MLP, ReLU", "MLP, tanh", "gated MLP", "attention", "stream, RMSNorm", "stream, LayerNorm with bias"]


@pytest.mark.parametrize("name", ACTIVE)
def test_match_groups_by_activations_finds_planted_elements(name):
    network, spec = case(name)
    moved = spec.apply(spec.random(jax.random.key(5)), network.params)
    aligned = align(network.apply, network.params, moved, network.inputs, spec=spec, matcher="activations")
    assert_close(aligned.params, network.params, roundings=5_000)
    by_weights = align(network.apply, network.params, moved, network.inputs, spec=spec).matching
    assert aligned.matching.objective == pytest.approx(by_weights.objective, rel=1e-4)


@pytest.mark.parametrize("name", ["MLP, ReLU", "attention", "stream, LayerNorm with bias"])
def test_learned_alignment_lowers_the_loss_between_networks(name):
    network, spec = case(name)
    rng = np.random.default_rng(3)
    other = {leaf: x + 0.5 * np.float32(rng.normal(size=x.shape)) for leaf, x in network.params.items()}
    targets = np.asarray(network.apply(network.params, network.inputs))
    matcher = mcomb.straight_through(steps=40, learning_rate=0.02, batch_size=8)
    aligned = align(
        network.apply,
        network.params,
        other,
        network.inputs,
        targets,
        spec=spec,
        matcher=matcher,
        loss=mcomb.squared_error,
    )
    losses, trace = aligned.matching.losses, aligned.matching.trace
    assert min(losses) < 0.95 * losses[0]
    assert len(trace) == len(losses)
    assert aligned.matching.objective == trace[losses.index(min(losses))] < trace[0]
    before, after = (network.apply(own, network.inputs) for own in (other, aligned.params))
    assert_close(after, before, roundings=2_000)


@pytest.mark.parametrize("name", ["attention", "MLP, linear", "stream, RMSNorm"])
def test_learned_basis_lowers_the_loss_of_mixtures(name):
    network, spec = case(name)
    rng = np.random.default_rng(3)
    other = {leaf: x + np.float32(rng.normal(size=x.shape)) for leaf, x in network.params.items()}
    pair = network.params, align(network.apply, network.params, other, network.inputs, spec=spec).params
    targets = np.asarray(network.apply(network.params, network.inputs))
    data = network.apply, network.inputs, targets
    options = {"loss": mcomb.squared_error, "learning_rate": 0.02, "batch_size": 16}
    basis = learn_basis(spec, pair, *data, mcomb.bernoulli, 0.5, steps=200, **options)

    def mean_loss(element):
        moved = [spec.apply(element, params) for params in pair]
        draws = [mcomb.sample(*moved, mcomb.bernoulli, 0.5, seed=seed) for seed in range(100, 130)]
        return np.mean([mcomb.score(network.apply, draw, *data[1:], loss=mcomb.squared_error).loss for draw in draws])

    assert mean_loss(basis) < 0.96 * mean_loss(balancing(spec, pair[0]))
    moved = spec.apply(basis, pair[1])
    assert_close(network.apply(moved, network.inputs), network.apply(pair[1], network.inputs), roundings=5_000)


def test_matchers_for_permutations_only_refuse_other_groups():
    network, spec = case("MLP, ReLU")
    matcher = mcomb.Matcher("mine", lambda spec, a, b: None)
    with pytest.raises(UserError, match="Cannot match by mine beyond permutations"):
        align(network.apply, network.params, network.params, network.inputs, spec=spec, matcher=matcher)


def test_coarse_matching_is_for_permutations():
    network, spec = case("MLP, ReLU")
    with pytest.raises(UserError, match="coarse=True only matches permutations"):
        align(
            network.apply, network.params, network.params, network.inputs, spec=spec, matcher=mcomb.weights(coarse=True)
        )


@pytest.mark.parametrize("reference", [1, None])
def test_align_many_by_groups_aligns_several_networks(reference):
    network, spec = case("stream, RMSNorm")
    networks = [spec.apply(spec.random(jax.random.key(i)), network.params) for i in range(3)]
    several = mcomb.align_many(network.apply, networks, network.inputs, groups="all", reference=reference)
    assert several.spec == spec
    for params in several.params:
        assert_close(params, several.params[0], roundings=2_000)
    before = network.apply(networks[2], network.inputs)
    assert_close(network.apply(several.params[2], network.inputs), before, roundings=500)
    assert_close(spec.apply(several.between(0, 2), networks[2]), networks[0], roundings=2_000)


@pytest.mark.parametrize("method", ["average", "refit", mcomb.partial(budget=1.5)])
def test_merge_by_groups_aligns_networks_first(method):
    network, spec = case("stream, RMSNorm")
    moved = spec.apply(spec.random(jax.random.key(5)), network.params)
    aligned = align(network.apply, network.params, moved, network.inputs, groups="all")
    pair = (network.params, aligned.params)
    merged = mcomb.merge(network.apply, pair, network.inputs, method=method, spec=aligned.spec)
    before = network.apply(network.params, network.inputs)
    assert_close(merged.apply(merged.params, network.inputs), before, roundings=10_000)
