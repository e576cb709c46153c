"""`align`: each matcher recovers a planted permutation and receives its data and options."""

import inspect
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_close, assert_equal, inner_product, inner_product_scale
from zoo import CASES, Shape, random_arrays

import mcomb
from mcomb import align, derive_spec
from mcomb.errors import UserError
from mcomb.matching.activations import match_activations
from mcomb.matching.matchers import as_matcher
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


MATCHERS = {
    "weights": mcomb.weights(),
    "activations": mcomb.activations(),
    # Fast and far enough to leave the first matching, so that it has to return to the best one.
    "ste": mcomb.straight_through(steps=15, learning_rate=0.1),
}


def each_matcher_and_family():
    return [
        pytest.param(matcher, family, marks=pytest.mark.slow if family in SLOW[matcher] else ())
        for matcher in MATCHERS
        for family in (FAMILIES_WITH_GRADIENTS if matcher == "ste" else FAMILIES)
    ]


def add_noise(params, amount, seed=5):
    """Add noise to every weight, relative to the standard deviation of its leaf."""
    rng = np.random.default_rng(seed)

    def add(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return leaf + amount * leaf.std() * rng.standard_normal(leaf.shape, np.float32)

    return jax.tree.map(add, params)


@cache
def planted_problem(family):
    """Return spec, function and parameters of a random network, inputs with its own labels, and a permutation.

    The network is certain of its labels: the inputs are those with the largest margins, and the logits are scaled. So
    no other permutation has a lower loss.
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


@pytest.mark.parametrize(("matcher", "family"), each_matcher_and_family())
def test_align_recovers_planted_permutation_despite_noise(matcher, family):
    spec, fn, a, inputs, labels, planted = planted_problem(family)
    b = add_noise(spec.apply(planted, a), NOISE[matcher])
    with jax.numpy_rank_promotion("allow"):
        aligned = align(fn, a, b, inputs, labels, matcher=MATCHERS[matcher], spec=spec)
    found = aligned.matching
    assert_equal(found.perms, spec.invert(planted))
    assert_equal(aligned.params, spec.apply(found.perms, b))
    assert_close(
        *(found.objective, inner_product(a, aligned.params)), roundings=16, scale=inner_product_scale(a, aligned.params)
    )
    assert found.trace[0] <= found.objective <= max(found.trace)
    if matcher == "ste":
        assert len(set(found.losses)) > 1


def mlp(params, x):
    return jax.nn.relu(x @ params["in"]) @ params["out"]


@pytest.fixture(scope="module")
def pair():
    """Return two networks, inputs and labels."""
    rng = np.random.default_rng(0)
    a, b = ({name: rng.standard_normal(n, np.float32) for name, n in (("in", (4, 6)), ("out", (6, 3)))} for _ in "ab")
    inputs, labels = rng.standard_normal((40, 4), np.float32), rng.integers(0, 3, 40).astype(np.int32)
    return a, b, inputs, labels


def test_align_by_weights_without_labels_is_default(pair):
    a, b, inputs, _ = pair
    found = align(mlp, a, b, inputs)
    assert_equal(found.matching.perms, match_weights(derive_spec(mlp, a, inputs), a, b).perms)
    assert_close(mlp(found.params, inputs), mlp(b, inputs), roundings=16)  # the same function
    assert inner_product(a, found.params) > inner_product(a, b)


@pytest.mark.parametrize("matcher", ["weights", "activations", pytest.param("ste", marks=pytest.mark.slow)])
def test_align_derives_spec_by_default(pair, matcher):
    a, b, *data = pair
    found, given = (
        align(mlp, a, b, *data, matcher=matcher, spec=spec) for spec in (None, derive_spec(mlp, a, data[0]))
    )
    assert found.spec == given.spec
    assert_equal((found.params, found.matching.perms), (given.params, given.matching.perms))


def test_align_repr_counts_moved_units(pair):
    a, _, inputs, _ = pair
    spec = derive_spec(mlp, a, inputs)
    (name,) = spec.sizes
    swapped = spec.apply({name: np.array([1, 0, 2, 3, 4, 5])}, a)
    found = align(mlp, a, swapped, inputs)
    assert repr(found) == f"Alignment(2 of 6 units moved, inner product with A {inner_product(a, a):.4g})"
    assert repr(found.matching) == f"Matching({name}: inner product with A {inner_product(a, a):.4g})"
    assert repr(align(mlp, a, a, inputs)).startswith("Alignment(0 of 6 units moved")


def test_align_by_activations_differs_from_weights():
    """Scaled weights of a unit change its weight matching but not its activations' correlations."""
    rng = np.random.default_rng(0)
    a = {"in": rng.standard_normal((4, 6), np.float32), "out": rng.standard_normal((6, 3), np.float32)}
    order = np.array([3, 1, 5, 0, 2, 4])
    b = {"in": a["in"][:, order], "out": -5 * a["out"]}  # weights of the next layer point to the identity
    inputs = rng.standard_normal((200, 4), np.float32)
    found = align(mlp, a, b, inputs, matcher="activations").params
    assert_equal(found["in"], a["in"])
    by_weights = align(mlp, a, b, inputs).params
    assert (by_weights["in"] != a["in"]).any()


@pytest.mark.parametrize(
    ("matcher", "given", "words"),
    [
        ("activations", {}, "Cannot match by activations without apply and inputs: pass them, or match by weights"),
        ("activations", {"apply": mlp}, "Cannot match by activations without inputs"),
        ("ste", {}, "Cannot match by straight_through without apply and inputs and labels"),
        ("ste", {"apply": mlp, "inputs": np.zeros((2, 4))}, "Cannot match by straight_through without labels"),
    ],
)
def test_matcher_names_missing_data(pair, matcher, given, words):
    a, b, inputs, _ = pair
    with pytest.raises(UserError, match=words):
        as_matcher(matcher).match(derive_spec(mlp, a, inputs), a, b, **given)


@pytest.mark.parametrize("matcher", ["ste", "straight_through", mcomb.straight_through()])
def test_align_names_missing_labels(pair, matcher):
    a, b, inputs, _ = pair
    with pytest.raises(UserError, match="Cannot match by straight_through without labels: pass them, or match by"):
        align(mlp, a, b, inputs, matcher=matcher)


@pytest.mark.parametrize("matcher", ["wieghts", "straight", ""])
def test_align_rejects_unknown_matcher(pair, matcher):
    words = f"Unknown matcher '{matcher}': choose from weights, activations, straight_through, or"
    with pytest.raises(UserError, match=words):
        align(mlp, *pair, matcher=matcher)


START = {"P": np.arange(6)}


@pytest.mark.parametrize(
    ("matcher", "function", "needs", "options"),
    [
        (mcomb.weights(), match_weights, (), {"restarts": 1, "seed": 0}),
        (
            mcomb.weights(restarts=8, seed=3, start=START, coarse=True),
            *(match_weights, ()),
            {"restarts": 8, "seed": 3, "start": START, "coarse": True},
        ),
        (
            mcomb.activations(inner_products=True, batch_size=16),
            *(match_activations, ("apply", "inputs")),
            {"inner_products": True, "batch_size": 16},
        ),
        (
            mcomb.straight_through(steps=7, learning_rate=0.5, batch_size=9, seed=2),
            *(match_straight_through, ("apply", "inputs", "labels", "loss")),
            {"steps": 7, "learning_rate": 0.5, "batch_size": 9, "seed": 2},
        ),
    ],
    ids=["default", "weights", "activations", "straight_through"],
)
def test_matcher_passes_data_and_options_on(pair, matcher, function, needs, options):
    a, b, inputs, labels = pair
    spec, calls = derive_spec(mlp, a, inputs), []
    assert matcher.function is function
    result = match_weights(spec, a, b)

    def record(*args, **given):
        calls.append(inspect.signature(function).bind(*args, **given).arguments)
        return result

    given = {"apply": mlp, "inputs": inputs, "labels": labels, "loss": mcomb.squared_error}
    found = align(mlp, a, b, inputs, labels, matcher=replace(matcher, function=record), spec=spec, loss=given["loss"])
    assert found.matching is result
    (arguments,) = calls
    expected = {"spec": spec, "a": a, "b": b} | {name: given[name] for name in needs} | options
    assert arguments.keys() == expected.keys()
    assert all(arguments[name] is value or arguments[name] == value for name, value in expected.items())


def test_matcher_options_change_result(pair):
    a, b, inputs, _ = pair
    assert len(align(mlp, a, b, inputs, matcher=mcomb.weights(restarts=3)).matching.tried) == 3


@pytest.mark.parametrize(
    ("matcher", "text"),
    [
        (mcomb.weights(restarts=8), "weights(restarts=8, seed=0)"),
        (mcomb.activations(), "activations(inner_products=False, batch_size=200)"),
        (mcomb.straight_through(steps=200), "straight_through(steps=200, learning_rate=0.01, batch_size=100, seed=0)"),
    ],
)
def test_matcher_repr_shows_options(matcher, text):
    assert repr(matcher) == text


def test_matcher_of_users_own():
    """Any function that returns a matching can match."""
    a = {"in": np.ones((4, 6), np.float32), "out": np.ones((6, 3), np.float32)}
    reverse = lambda spec, a, b: mcomb.Matching({name: np.arange(6)[::-1] for name in spec.sizes}, 1.0, (0.0, 1.0))  # noqa: E731
    b = {"in": np.arange(24, dtype=np.float32).reshape(4, 6), "out": a["out"]}
    found = align(mlp, a, b, np.ones((2, 4), np.float32), matcher=mcomb.Matcher("reverse", reverse))
    assert_equal(found.params["in"], b["in"][:, ::-1])
