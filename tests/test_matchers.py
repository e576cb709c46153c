import jax
import numpy as np
import pytest

import mcomb
from mcomb import matchers
from mcomb.base import UserError


def mlp(params, x):
    return jax.nn.relu(x @ params["in"]) @ params["out"]


@pytest.fixture(scope="module")
def pair():
    """A small network, the same with its units in another order, what it is applied to, and the order."""
    rng = np.random.default_rng(0)
    a = {"in": rng.normal(size=(4, 6)).astype(np.float32), "out": rng.normal(size=(6, 3)).astype(np.float32)}
    inputs = rng.normal(size=(40, 4)).astype(np.float32)
    spec = mcomb.permutation_spec(mlp, a, inputs)
    planted = spec.random(jax.random.key(1))
    return spec, a, spec.apply(planted, a), inputs, np.asarray(mlp(a, inputs).argmax(1)), spec.invert(planted)


@pytest.mark.parametrize("matcher", matchers.MATCHERS)
def test_every_matcher_undoes_a_permutation(pair, matcher):
    spec, a, b, inputs, labels, expected = pair
    matching = mcomb.match(spec, a, b, mlp, inputs, labels, matcher=matcher)
    jax.tree.map(np.testing.assert_array_equal, matching.perms, expected)
    assert matching.objective == pytest.approx(sum(float(np.vdot(leaf, leaf)) for leaf in a.values()), rel=1e-5)


def test_weights_need_no_data_and_are_the_default(pair):
    spec, a, b, *_, expected = pair
    jax.tree.map(np.testing.assert_array_equal, mcomb.match(spec, a, b).perms, expected)


@pytest.mark.parametrize(
    ("matcher", "given", "words"),
    [
        ("activations", 0, "activations needs apply and inputs"),
        ("activations", 1, "activations needs inputs"),
        ("ste", 0, "ste needs apply and inputs and labels"),
        ("ste", 2, "ste needs labels"),
        ("wieghts", 0, "no matcher 'wieghts': choose from weights, activations, ste"),
    ],
)
def test_what_is_missing_or_unknown_is_named(pair, matcher, given, words):
    spec, a, b, inputs, *_ = pair
    with pytest.raises(UserError, match=words):
        mcomb.match(spec, a, b, *(mlp, inputs)[:given], matcher=matcher)


@pytest.mark.parametrize(("matcher", "function"), [("weights", "match_weights"), ("ste", "match_straight_through")])
def test_the_seed_is_passed_on(pair, matcher, function, monkeypatch):
    spec, a, b, inputs, labels, _ = pair
    seeds, some = [], mcomb.match(spec, a, b)
    monkeypatch.setattr(matchers, function, lambda *args, seed, **options: seeds.append(seed) or some)
    assert mcomb.match(spec, a, b, mlp, inputs, labels, matcher=matcher, seed=5) is some
    assert seeds == [5]
