import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import CASES, drawn

from mcomb import align, match_weights, permutation_spec
from mcomb.align import align_many
from mcomb.base import UserError
from mcomb.weights import objective


def noisy(params, amount, seed):
    """The parameters with noise on every weight, and on nothing else."""
    rng = np.random.default_rng(seed)

    def add(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return leaf + amount * leaf.std() * rng.normal(size=leaf.shape).astype(np.float32)

    return jax.tree.map(add, params)


def copies(name, count, amount):
    """A spec, noisy copies of one network with their units in random orders, and these orders."""
    with jax.numpy_rank_promotion("allow"):
        case = CASES[name]()
        params = drawn(case.params)
        spec = permutation_spec(case.fn, params, case.input)
    planted = [spec.random(jax.random.key(i)) for i in range(count)]
    return spec, [noisy(spec.apply(p, params), amount, i) for i, p in enumerate(planted)], planted


def strangers(name, count):
    """A spec and networks that have nothing to do with each other."""
    spec, networks, _ = copies(name, count, 10.0)
    return spec, networks


def equal(p, q):
    jax.tree.map(np.testing.assert_array_equal, p, q)


def inner_products(spec, networks):
    return sum(objective(spec, a, b) for a, b in itertools.combinations(networks, 2))


@pytest.mark.parametrize("reference", [0, 2, None])
@pytest.mark.parametrize("name", ["transformer encoder", "scanned transformer", "grouped convolution", "VGG", "NNX"])
def test_the_planted_permutations_of_noisy_copies_are_recovered(name, reference):
    spec, networks, planted = copies(name, 4, 0.3)
    alignment = align_many(spec, networks, reference=reference)
    for i, j in itertools.permutations(range(4), 2):
        equal(alignment.between(i, j), spec.compose(planted[i], spec.invert(planted[j])))
    if reference is not None:
        equal(alignment.perms[reference], spec.identity())


@pytest.mark.parametrize("reference", [1, None])
@pytest.mark.parametrize("name", ["transformer encoder", "scanned transformer", "grouped convolution"])
def test_from_c_to_b_and_on_to_a_is_from_c_to_a(name, reference):
    """Also where nothing fits, and where permutations are families such as one for each head."""
    spec, networks = strangers(name, 3)
    alignment = align_many(spec, networks, reference=reference)
    for i, j, k in itertools.product(range(3), repeat=3):
        equal(spec.compose(alignment.between(i, j), alignment.between(j, k)), alignment.between(i, k))
        equal(alignment.between(i, i), spec.identity())


def test_with_a_reference_each_network_is_matched_to_it():
    spec, networks = strangers("VGG", 3)
    alignment = align_many(spec, networks, reference=1, seed=3)
    for i in (0, 2):
        equal(alignment.perms[i], match_weights(spec, networks[1], networks[i], seed=3).perms)


@pytest.mark.parametrize("name", ["VGG", "transformer encoder", "DenseNet"])
def test_the_barycentre_never_loses_and_ends_where_no_network_can_be_matched_better(name):
    spec, networks = strangers(name, 4)
    alignment = align_many(spec, networks, reference=None)
    assert list(alignment.trace) == sorted(alignment.trace)
    assert alignment.trace[-1] == alignment.objective > alignment.trace[0] > inner_products(spec, networks)
    moved = [spec.apply(perms, params) for perms, params in zip(alignment.perms, networks, strict=True)]
    assert alignment.objective == pytest.approx(inner_products(spec, moved), rel=1e-5)
    for i, network in enumerate(moved):
        others = jax.tree.map(lambda *leaves: sum(leaves), *(moved[:i] + moved[i + 1 :]))
        matching = match_weights(spec, others, network)
        assert matching.objective - matching.trace[0] <= 1e-5 * alignment.objective


def test_it_goes_on_from_where_each_network_is(monkeypatch):
    starts = []

    def recorded(*args, start, **options):
        starts.append(start)
        return match_weights(*args, start=start, **options)

    monkeypatch.setattr(align, "match_weights", recorded)
    spec, networks = strangers("VGG", 3)
    alignment = align_many(spec, networks, reference=None)
    assert len(starts) == 3 * len(alignment.trace) - 1 > 3
    for start in starts[:2]:  # the first network of the first round stays where it is
        equal(start, spec.identity())
    last = {tuple(np.concatenate(list(start.values())).tolist()) for start in starts[-3:]}
    assert last == {tuple(np.concatenate(list(perms.values())).tolist()) for perms in alignment.perms}


def test_arguments_are_left_alone_and_equal_seeds_give_equal_results():
    spec, networks = strangers("VGG", 3)
    before = jax.tree.map(np.copy, networks)
    first, again = (align_many(spec, networks, reference=None, seed=2) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, networks, before)
    equal(first.perms, again.perms)
    assert first.trace == again.trace


@pytest.mark.parametrize(
    ("count", "reference", "words"), [(1, 0, "1 networks"), (3, 3, "no network 3 among 3"), (3, -1, "from 0 to 2")]
)
def test_what_cannot_be_aligned_is_refused(count, reference, words):
    spec, networks = strangers("VGG", 3)
    with pytest.raises(UserError, match=words):
        align_many(spec, networks[:count], reference=reference)
