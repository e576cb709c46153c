import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import EPS, assert_close, assert_equal, assert_never_falls, inner_product, inner_product_scale
from zoo import CASES, random_arrays

from mcomb import PermutationSpec, derive_spec
from mcomb.errors import UserError
from mcomb.matching import many
from mcomb.matching.many import Alignment, align_many
from mcomb.matching.weights import match_weights


@cache
def spec_and_params(family):
    with jax.numpy_rank_promotion("allow"):
        case = CASES[family]()
        params = random_arrays(case.params)
        return derive_spec(case.fn, params, case.input), params


def noisy_copies(family, count, amount):
    """A spec, copies of one network with noise and with their units in random orders, and these orders."""
    spec, params = spec_and_params(family)

    def add_noise(leaf, rng):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return leaf + amount * leaf.std() * rng.standard_normal(leaf.shape, np.float32)

    planted = [spec.random(jax.random.key(i)) for i in range(count)]
    rngs = map(np.random.default_rng, range(count))
    copies = [
        jax.tree.map(lambda leaf, rng=rng: add_noise(leaf, rng), spec.apply(perms, params))
        for perms, rng in zip(planted, rngs, strict=True)
    ]
    return spec, copies, planted


def unrelated_networks(family, count):
    """A spec and networks of which hardly anything but noise is left."""
    spec, networks, _ = noisy_copies(family, count, 10.0)
    return spec, networks


@pytest.mark.parametrize("reference", [pytest.param(0, marks=pytest.mark.slow), 2, None])
@pytest.mark.parametrize(
    "family",
    ["grouped convolution", *(pytest.param(name, marks=pytest.mark.slow) for name in ("scanned transformer", "NNX"))],
)
def test_noisy_copies_are_brought_into_one_order(family, reference):
    spec, networks, planted = noisy_copies(family, 4, 0.3)
    alignment = align_many(spec, networks, reference=reference)
    for i, j in itertools.permutations(range(4), 2):
        assert_equal(alignment.between(i, j), spec.compose(planted[i], spec.invert(planted[j])))
    if reference is not None:
        assert_equal(alignment.perms[reference], spec.identity())


@pytest.mark.parametrize("reference", [1, None])
@pytest.mark.parametrize("family", [pytest.param("scanned transformer", marks=pytest.mark.slow), "grouped convolution"])
def test_permutations_between_networks_are_transitive(family, reference):
    """Also for networks that do not fit, and for permutations that are nested in others."""
    spec, networks = unrelated_networks(family, 3)
    alignment = align_many(spec, networks, reference=reference)
    for i, j, k in itertools.product(range(3), repeat=3):
        assert_equal(spec.compose(alignment.between(i, j), alignment.between(j, k)), alignment.between(i, k))
        assert_equal(alignment.between(i, i), spec.identity())


def test_with_a_reference_each_network_is_matched_to_it():
    spec, networks = unrelated_networks("VGG", 3)
    alignment = align_many(spec, networks, reference=1, seed=3)
    for i in (0, 2):
        assert_equal(alignment.perms[i], match_weights(spec, networks[1], networks[i], seed=3).perms)


@pytest.mark.parametrize(
    "family",
    ["grouped convolution", *(pytest.param(name, marks=pytest.mark.slow) for name in ("scanned transformer", "VGG"))],
)
def test_the_barycentre_never_gets_worse_and_ends_where_no_network_can_be_matched_better(family):
    spec, networks = unrelated_networks(family, 4)
    alignment = align_many(spec, networks, reference=None)
    assert_never_falls(alignment.trace)

    def objective(networks):
        return sum(inner_product(a, b) for a, b in itertools.combinations(networks, 2))

    assert alignment.trace[-1] == alignment.objective > alignment.trace[0] > objective(networks)
    aligned = [spec.apply(perms, params) for perms, params in zip(alignment.perms, networks, strict=True)]
    scale = sum(inner_product_scale(a, b) for a, b in itertools.combinations(networks, 2))
    assert_close(alignment.objective, objective(aligned), roundings=16, scale=scale)
    for i, network in enumerate(aligned):
        others = jax.tree.map(lambda *leaves: sum(leaves), *(aligned[:i] + aligned[i + 1 :]))
        matching = match_weights(spec, others, network)
        assert matching.objective - matching.trace[0] <= many.TOLERANCE * alignment.objective + 16 * EPS * scale


def test_each_matching_starts_from_the_networks_current_permutations(monkeypatch):
    starts = []

    def record(*args, start, **options):
        starts.append(start)
        return match_weights(*args, start=start, **options)

    monkeypatch.setattr(many, "match_weights", record)
    spec, networks = unrelated_networks("VGG", 3)
    alignment = align_many(spec, networks, reference=None)
    assert len(starts) == 3 * len(alignment.trace) - 1 > 3
    for start in starts[:2]:  # the first round does not match the network that it visits first
        assert_equal(start, spec.identity())
    last = {tuple(np.concatenate(list(start.values())).tolist()) for start in starts[-3:]}
    assert last == {tuple(np.concatenate(list(perms.values())).tolist()) for perms in alignment.perms}


def test_the_first_round_matches_each_network_to_those_before_it_only(monkeypatch):
    calls = []

    def record(spec, target, network, **options):
        matching = match_weights(spec, target, network, **options)
        calls.append((target, network, spec.apply(matching.perms, network)))
        return matching

    monkeypatch.setattr(many, "match_weights", record)
    spec, networks = unrelated_networks("VGG", 3)
    align_many(spec, networks, reference=None)
    (first, _, aligned), (second, *_) = calls[:2]
    assert any(jax.tree.all(jax.tree.map(np.array_equal, first, network)) for network in networks)
    assert_equal(second, jax.tree.map(np.add, first, aligned))


def test_arguments_are_left_alone_and_equal_seeds_give_equal_results():
    spec, networks = unrelated_networks("VGG", 3)
    before = jax.tree.map(np.copy, networks)
    first, again = (align_many(spec, networks, reference=None, seed=2) for _ in range(2))
    assert_equal(networks, before)
    assert_equal(first.perms, again.perms)
    assert first.trace == again.trace


@pytest.mark.parametrize(
    ("count", "reference", "words"), [(1, 0, "1 networks"), (3, 3, "no network 3 among 3"), (3, -1, "from 0 to 2")]
)
def test_what_cannot_be_aligned_is_refused(count, reference, words):
    spec, networks = unrelated_networks("VGG", 3)
    with pytest.raises(UserError, match=words):
        align_many(spec, networks[:count], reference=reference)


@pytest.mark.parametrize("pair", [(0, 9), (-1, 0), (2, 2)])
def test_there_is_nothing_between_networks_that_are_not_there(pair):
    found = Alignment(PermutationSpec({}, {}), ({}, {}), 0.0, (0.0,))
    with pytest.raises(UserError, match=r"there is no network .* among 2: give an index from 0 to 1"):
        found.between(*pair)
