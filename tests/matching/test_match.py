"""All matchers: a planted permutation is recovered, and `match` calls the one that is asked for."""

import inspect
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_close, assert_equal, inner_product, inner_product_scale
from zoo import CASES, Shape, random_arrays

import mcomb
from mcomb import derive_spec, matching
from mcomb.errors import UserError
from mcomb.matching.activations import match_activations
from mcomb.matching.straight_through import match_straight_through
from mcomb.matching.weights import match_weights

# How much noise each matcher must bear, relative to the standard deviation of each leaf.
NOISE = {"weights": 0.3, "activations": 0.01, "ste": 0.1}
FAMILIES = (
    "query, key and value in one",  # heads and their dimensions as blocks of one axis
    "scanned transformer",  # permutations nested in others and batched over layers
    "DenseNet",  # segments of a concatenated axis
    "inverted residual",  # depthwise convolutions, BatchNorm, a product of two layers
    "VGG",  # channels that are flattened
    "grouped convolution",  # groups of channels
    "LSTM",  # the same permutation on two axes of a leaf
    "tied autoencoder",  # a leaf that is used twice
    "untied over positions",  # a permutation of its own at each position
    "NNX",  # leaves that are not floats
)
FAMILIES_WITH_GRADIENTS = FAMILIES[0], FAMILIES[3]  # compiling gradients of all families takes long
SLOW = {
    "weights": FAMILIES[1::2],
    "activations": FAMILIES[1:4] + FAMILIES[5:7] + FAMILIES[9:],
    "ste": FAMILIES_WITH_GRADIENTS,
}


def each_matcher_and_family():
    return [
        pytest.param(matcher, family, marks=pytest.mark.slow if family in SLOW[matcher] else ())
        for matcher in matching.MATCHERS
        for family in (FAMILIES_WITH_GRADIENTS if matcher == "ste" else FAMILIES)
    ]


def add_noise(params, amount, seed=5):
    """The parameters with noise on every weight, relative to the standard deviation of its leaf."""
    rng = np.random.default_rng(seed)

    def add(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return leaf + amount * leaf.std() * rng.standard_normal(leaf.shape, np.float32)

    return jax.tree.map(add, params)


@cache
def planted_problem(family):
    """A random network as (spec, function, parameters), with inputs and the labels it gives them, and a permutation.

    Of many inputs, those are taken for which the network is most certain of its label, and its logits are scaled so
    that it is certain enough of all of them: no other permutation has a lower loss.
    """
    with jax.numpy_rank_promotion("allow"):
        case = CASES[family]()
        params = random_arrays(case.params)
        inputs = random_arrays(Shape((200, *case.input.shape[1:]), case.input.dtype), 3)
        flat = jax.jit(lambda params, x: case.fn(params, x).reshape(len(x), -1))
        logits = np.sort(flat(params, inputs), axis=1)
        margins = logits[:, -1] - logits[:, -2]
        most_certain = np.argsort(margins)[-40:]
        scale = 5 / margins[most_certain[0]]

        def fn(params, x):
            return scale * flat(params, x)

        inputs = inputs[most_certain]
        labels = np.asarray(fn(params, inputs).argmax(1), np.int32)
        spec = derive_spec(fn, params, case.input)
    return spec, fn, params, inputs, labels, spec.random(jax.random.key(7))


def run_matcher(matcher, spec, a, b, fn, inputs, labels):
    if matcher == "weights":
        return match_weights(spec, a, b)
    if matcher == "activations":
        return match_activations(spec, a, b, fn, inputs)
    # Fast and far enough to leave the first matching: it has to come back to the best one.
    found = match_straight_through(spec, a, b, fn, inputs, labels, steps=15, learning_rate=0.1)
    assert len(set(found.losses)) > 1
    return found


@pytest.mark.parametrize(("matcher", "family"), each_matcher_and_family())
def test_a_planted_permutation_is_recovered_in_spite_of_noise(matcher, family):
    spec, fn, a, inputs, labels, planted = planted_problem(family)
    b = add_noise(spec.apply(planted, a), NOISE[matcher])
    with jax.numpy_rank_promotion("allow"):
        found = run_matcher(matcher, spec, a, b, fn, inputs, labels)
    assert_equal(found.perms, spec.invert(planted))
    aligned = spec.apply(found.perms, b)
    assert_close(found.objective, inner_product(a, aligned), roundings=16, scale=inner_product_scale(a, aligned))
    assert found.trace[0] <= found.objective <= max(found.trace)


def mlp(params, x):
    return jax.nn.relu(x @ params["in"]) @ params["out"]


@pytest.fixture(scope="module")
def pair():
    """The spec of a small function, two networks for it, inputs and labels."""
    rng = np.random.default_rng(0)
    a, b = ({name: rng.standard_normal(n, np.float32) for name, n in (("in", (4, 6)), ("out", (6, 3)))} for _ in "ab")
    inputs, labels = rng.standard_normal((40, 4), np.float32), rng.integers(0, 3, 40).astype(np.int32)
    return mcomb.derive_spec(mlp, a, inputs), a, b, inputs, labels


def test_weights_need_no_data_and_are_the_default(pair):
    spec, a, b, *_ = pair
    assert_equal(mcomb.match(spec, a, b).perms, match_weights(spec, a, b).perms)


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
    spec, a, b, inputs, _ = pair
    with pytest.raises(UserError, match=words):
        mcomb.match(spec, a, b, *(mlp, inputs)[:given], matcher=matcher)


@pytest.mark.parametrize(
    ("matcher", "function", "passed_on"),
    [
        ("weights", match_weights, {"seed"}),
        ("activations", match_activations, {"apply", "inputs"}),
        ("ste", match_straight_through, {"apply", "inputs", "labels", "loss", "seed"}),
    ],
)
def test_each_name_calls_its_matcher_with_what_it_needs(pair, matcher, function, passed_on, monkeypatch):
    spec, a, b, inputs, labels = pair
    given = {"spec": spec, "a": a, "b": b, "apply": mlp, "inputs": inputs, "labels": labels}
    given |= {"loss": mcomb.squared_error, "seed": 5}
    calls, result = [], mcomb.match(spec, a, b)

    def record(*args, **options):
        calls.append(inspect.signature(function).bind(*args, **options).arguments)
        return result

    assert matching.MATCHERS[matcher][0] is function
    monkeypatch.setitem(matching.MATCHERS, matcher, (record, matching.MATCHERS[matcher][1]))
    assert mcomb.match(**given, matcher=matcher) is result
    (arguments,) = calls
    assert arguments.keys() == {"spec", "a", "b", *passed_on}
    assert all(value is given[name] for name, value in arguments.items())
