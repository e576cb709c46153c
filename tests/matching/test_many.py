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
from mcomb.matching.many import MultiAlignment, align_many
from mcomb.matching.weights import match_weights


@cache
def spec_and_params(family):
    with jax.numpy_rank_promotion("allow"):
        case = CASES[family]()
        params = random_arrays(case.params)
        return derive_spec(case.fn, params, case.input), params


def align_networks(spec, networks, **options):
    """Align networks with a given spec, which makes the function and the inputs irrelevant."""
    return align_many(lambda params, x: x, networks, np.zeros(1), spec=spec, **options)


def noisy_copies(family, count, amount):
    """Return a spec, noisy copies of one network with their units in random orders, and these orders."""
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
    """Return a spec and networks that are almost only noise."""
    spec, networks, _ = noisy_copies(family, count, 10.0)
    return spec, networks


@pytest.mark.parametrize("reference", [pytest.param(0, marks=pytest.mark.slow), 2, None])
@pytest.mark.parametrize(
    "family",
    ["grouped convolution", *(pytest.param(name, marks=pytest.mark.slow) for name in ("scanned transformer", "NNX"))],
)
def test_align_many_recovers_orders_of_noisy_copies(family, reference):
    spec, networks, planted = noisy_copies(family, 4, 0.3)
    alignment = align_networks(spec, networks, reference=reference)
    for i, j in itertools.permutations(range(4), 2):
        assert_equal(alignment.between(i, j), spec.compose(planted[i], spec.invert(planted[j])))
    for found, perms, network in zip(alignment.params, alignment.perms, networks, strict=True):
        assert_equal(found, spec.apply(perms, network))
    if reference is not None:
        assert_equal(alignment.perms[reference], spec.identity())


@pytest.mark.parametrize("reference", [1, None])
@pytest.mark.parametrize("family", [pytest.param("scanned transformer", marks=pytest.mark.slow), "grouped convolution"])
def test_align_many_permutations_are_transitive(family, reference):
    """The networks have nothing in common, and some permutations are nested in others."""
    spec, networks = unrelated_networks(family, 3)
    alignment = align_networks(spec, networks, reference=reference)
    for i, j, k in itertools.product(range(3), repeat=3):
        assert_equal(spec.compose(alignment.between(i, j), alignment.between(j, k)), alignment.between(i, k))
        assert_equal(alignment.between(i, i), spec.identity())


def test_align_many_matches_each_network_to_reference():
    spec, networks = unrelated_networks("VGG", 3)
    alignment = align_networks(spec, networks, reference=1, seed=3)
    for i in (0, 2):
        assert_equal(alignment.perms[i], match_weights(spec, networks[1], networks[i], seed=3).perms)


@pytest.mark.parametrize(
    "family",
    ["grouped convolution", *(pytest.param(name, marks=pytest.mark.slow) for name in ("scanned transformer", "VGG"))],
)
def test_align_many_ends_at_local_optimum(family):
    spec, networks = unrelated_networks(family, 4)
    alignment = align_networks(spec, networks, reference=None)
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
        assert matching.objective - matching.trace[0] <= many.ROUND_TOLERANCE * alignment.objective + 16 * EPS * scale


def test_align_many_starts_from_current_permutations(monkeypatch):
    starts = []

    def record(*args, start, **options):
        starts.append(start)
        return match_weights(*args, start=start, **options)

    monkeypatch.setattr(many, "match_weights", record)
    spec, networks = unrelated_networks("VGG", 3)
    alignment = align_networks(spec, networks, reference=None)
    assert len(starts) == 3 * len(alignment.trace) - 1 > 3
    for start in starts[:2]:  # the first round does not match the network that it visits first
        assert_equal(start, spec.identity())
    last = {tuple(np.concatenate(list(start.values())).tolist()) for start in starts[-3:]}
    assert last == {tuple(np.concatenate(list(perms.values())).tolist()) for perms in alignment.perms}


def test_align_many_first_round_uses_earlier_networks(monkeypatch):
    calls = []

    def record(spec, target, network, **options):
        matching = match_weights(spec, target, network, **options)
        calls.append((target, network, spec.apply(matching.perms, network)))
        return matching

    monkeypatch.setattr(many, "match_weights", record)
    spec, networks = unrelated_networks("VGG", 3)
    align_networks(spec, networks, reference=None)
    (first, _, aligned), (second, *_) = calls[:2]
    assert any(jax.tree.all(jax.tree.map(np.array_equal, first, network)) for network in networks)
    assert_equal(second, jax.tree.map(np.add, first, aligned))


def test_align_many_is_deterministic_and_pure():
    spec, networks = unrelated_networks("VGG", 3)
    before = jax.tree.map(np.copy, networks)
    first, again = (align_networks(spec, networks, reference=None, seed=2) for _ in range(2))
    assert_equal(networks, before)
    assert_equal(first.perms, again.perms)
    assert first.trace == again.trace


@pytest.mark.parametrize(
    ("count", "reference", "words"),
    [(1, 0, "fewer than two networks"), (3, 3, "no network 3 among 3"), (3, -1, "from 0 to 2")],
)
def test_align_many_rejects_misuse(count, reference, words):
    spec, networks = unrelated_networks("VGG", 3)
    with pytest.raises(UserError, match=words):
        align_networks(spec, networks[:count], reference=reference)


@pytest.mark.parametrize("pair", [(0, 9), (-1, 0), (2, 2)])
def test_align_many_between_rejects_unknown_networks(pair):
    found = MultiAlignment(({}, {}), ({}, {}), PermutationSpec({}, {}), 0.0, (0.0,))
    with pytest.raises(UserError, match=r"There is no network .* among 2: pass an index from 0 to 1"):
        found.between(*pair)


def test_align_many_derives_spec_by_default():
    case = CASES["VGG"]()
    spec, networks = unrelated_networks("VGG", 2)
    found = align_many(case.fn, networks, case.input)
    assert found.spec == spec
    expected = align_networks(spec, networks)
    assert_equal((found.params, found.perms), (expected.params, expected.perms))
    assert repr(found) == f"MultiAlignment(2 networks, sum of inner products {found.objective:.4g})"
