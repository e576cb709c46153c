import itertools

import jax
import numpy as np
import pytest
from zoo import spec_of

from mcomb import PermutationSpec, match_weights
from mcomb.base import UserError


def noisy(params, amount, seed=5):
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(
        tree, [leaf + amount * leaf.std() * rng.normal(size=leaf.shape).astype(np.float32) for leaf in leaves]
    )


@pytest.mark.parametrize("amount", [0.0, 0.3])
def test_a_planted_permutation_is_recovered(network, amount):
    _, model, params, images = network
    spec = spec_of(model, params, images)
    planted = spec.random(jax.random.key(7))
    shuffled = noisy(spec.apply(planted, params), amount)
    found = match_weights(spec, params, shuffled).perms
    jax.tree.map(np.testing.assert_array_equal, found, spec.invert(planted))


def test_the_objective_is_the_inner_product_and_never_falls(network):
    _, model, a, images = network
    b = noisy(a, 3.0)
    spec = spec_of(model, a, images)
    matching = match_weights(spec, a, b)
    inner = sum(
        float(np.vdot(x, y))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(spec.apply(matching.perms, b)), strict=True)
    )
    assert matching.objective == pytest.approx(inner, rel=1e-5)
    assert matching.trace[-1] == matching.objective
    assert all(later >= earlier for earlier, later in itertools.pairwise(matching.trace))
    assert matching.objective > matching.trace[0]


def test_arguments_are_left_alone_and_equal_seeds_give_equal_results(network):
    _, model, a, images = network
    b = jax.tree.map(np.array, noisy(a, 3.0))
    before = jax.tree.map(np.copy, (a, b))
    first, again = (match_weights(spec_of(model, a, images), a, b, seed=3) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, (a, b), before)
    jax.tree.map(np.testing.assert_array_equal, first.perms, again.perms)
    assert first.trace == again.trace


def test_one_hidden_layer_is_matched_optimally():
    """With a single permutation a visit solves the whole problem: brute force finds nothing better."""
    rng = np.random.default_rng(0)
    a, b = ({"in": rng.normal(size=(3, 5)), "out": rng.normal(size=(5, 2))} for _ in range(2))
    spec = PermutationSpec.of(a, {"in": (None, "P"), "out": ("P", None)})
    best = max(
        np.vdot(a["in"], b["in"][:, order]) + np.vdot(a["out"], b["out"][list(order)])
        for order in itertools.permutations(range(5))
    )
    assert match_weights(spec, a, b).objective == pytest.approx(best, rel=1e-6)


def test_a_permutation_on_both_axes_of_a_leaf_never_lowers_the_objective():
    rng = np.random.default_rng(0)
    for seed in range(10):
        a, b = ({"recurrent": rng.normal(size=(6, 6)), "bias": rng.normal(size=6)} for _ in range(2))
        spec = PermutationSpec.of(a, {"recurrent": ("P", "P"), "bias": ("P",)})
        trace = match_weights(spec, a, b, seed=seed).trace
        assert all(later >= earlier for earlier, later in itertools.pairwise(trace))


def test_networks_that_do_not_fit_the_spec_are_refused(network):
    _, model, a, images = network
    wide = jax.tree.map(lambda leaf: leaf.repeat(2, axis=-1), a)
    with pytest.raises(UserError, match="entries, but permutation"):
        match_weights(spec_of(model, a, images), a, wide)
