"""Merges leaf by leaf equal their papers' definitions, computed here entry by entry."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from numerics import assert_close, assert_equal

import mcomb
from mcomb.errors import UserError
from mcomb.trees import named_leaves

INPUTS = np.ones((4, 3), np.float32)
SHAPES = {"layers": [{"kernel": (3, 5)}, {"kernel": (5, 4)}], "head": {"kernel": (4, 2), "bias": (2,)}}


def apply(params, x):
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["kernel"])
    return x @ params["head"]["kernel"] + params["head"]["bias"][None]


def network(seed, scale=1.0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map(lambda shape: (scale * rng.normal(size=shape)).astype(dtype), SHAPES, is_leaf=is_shape)


BASE = network(0)
A, B, C = (jax.tree.map(np.add, BASE, network(seed, 0.1)) for seed in (1, 2, 3))


def merge(method, networks=(A, B, C)):
    return mcomb.merge(apply, networks, INPUTS, method=method).params


def per_leaf(define, networks=(A, B, C)):
    """Apply a definition on lists of Python floats to the base and all networks."""

    def one(base, *leaves):
        flat = [np.ravel(leaf).astype(float).tolist() for leaf in (base, *leaves)]
        return np.reshape(define(*flat), np.shape(base))

    return jax.tree.map(one, BASE, *networks)


def test_task_arithmetic_adds_differences():
    def define(base, *networks):
        return [x + 0.4 * sum(own[i] - x for own in networks) for i, x in enumerate(base)]

    assert_close(merge(mcomb.task_arithmetic(BASE, scale=0.4)), per_leaf(define), roundings=16)


def test_task_arithmetic_weights_differences_by_shares():
    def define(base, a, b):
        return [x + 2 * (0.3 * (a[i] - x) + 0.7 * (b[i] - x)) for i, x in enumerate(base)]

    found = merge(mcomb.task_arithmetic(BASE, shares=0.7), (A, B))
    assert_close(found, per_leaf(define, (A, B)), roundings=16)


@pytest.mark.parametrize("density", [0.2, 0.5, 1.0])
def test_ties_trims_elects_and_averages(density):
    def define(base, *networks):
        kept = []
        for own in networks:
            difference = [y - x for x, y in zip(base, own, strict=True)]
            largest = sorted(range(len(base)), key=lambda i: -abs(difference[i]))[: math.ceil(density * len(base))]
            kept.append([d if i in largest else 0.0 for i, d in enumerate(difference)])
        merged = []
        for i, x in enumerate(base):
            entries = [own[i] for own in kept]
            sign = 1 if sum(entries) > 0 else -1
            agreeing = [entry for entry in entries if entry * sign > 0]
            merged.append(x + 0.8 * (sum(agreeing) / len(agreeing) if agreeing else 0))
        return merged

    assert_close(merge(mcomb.ties(BASE, density=density, scale=0.8)), per_leaf(define), roundings=16)


def test_ties_resolves_a_conflict_by_shares():
    """Where signs differ, the network with the larger weighted entry decides alone."""
    base = {"w": np.zeros(3, np.float32)}
    a, b = {"w": np.array([1, -1, 2], np.float32)}, {"w": np.array([-2, -3, 0], np.float32)}
    linear = lambda params, x: x @ params["w"]  # noqa: E731

    def ties(**options):
        return mcomb.merge(linear, (a, b), INPUTS, method=mcomb.ties(base, density=1, **options)).params["w"]

    assert_equal(ties(), np.array([-2, -2, 2], np.float32))
    assert_close(ties(shares=0.25), np.array([1, -1.5, 2], np.float32), roundings=2)


def test_dare_keeps_a_rescaled_random_fraction():
    base = {"w": np.zeros(40_000, np.float32)}
    a, b = ({"w": np.full(40_000, value, np.float32)} for value in (1, 10))
    linear = lambda params, x: params["w"][None, :1] * x  # noqa: E731
    dare = lambda **options: mcomb.merge(linear, (a, b), INPUTS, method=mcomb.dare(base, **options)).params["w"]  # noqa: E731

    found = dare(density=0.25)
    values, counts = np.unique(found, return_counts=True)
    assert_equal(values, np.array([0, 4, 40, 44], np.float32))
    expected = 40_000 * np.array([0.75**2, 0.75 * 0.25, 0.75 * 0.25, 0.25**2])  # independent choices
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()
    assert_equal(dare(density=0.25), found)
    assert (dare(density=0.25, seed=1) != found).any()
    assert_equal(dare(density=1.0, scale=0.5), np.full(40_000, 5.5, np.float32))
    assert_equal(np.unique(dare(density=0.25, elect=True)), np.array([0, 4, 22, 40], np.float32))


def test_dare_chooses_entries_of_each_leaf_independently():
    found = named_leaves(merge(mcomb.dare(network(0, 0.0), density=0.5), (network(1), network(1))))
    kept = [np.ravel(leaf)[:8] != 0 for name, leaf in found.items() if leaf.size >= 8]
    assert len({tuple(own) for own in kept}) == len(kept) > 1


def test_slerp_follows_the_arc():
    """Independent definition: rotate A towards B in their plane, and change the length factors likewise."""

    def define(_, a, b):
        a, b = np.array(a), np.array(b)
        angle = np.arctan2(np.linalg.norm(b - a * (a @ b) / (a @ a)), (a @ b) / np.linalg.norm(a))
        first, second = a / np.linalg.norm(a), b / np.linalg.norm(b)
        side = second - first * (first @ second)
        side /= np.linalg.norm(side)
        at = lambda turn: np.cos(turn) * first + np.sin(turn) * side  # noqa: E731
        # The arc between vectors of one length, for A's length and for B's, in the weights of the formula.
        arc = at(0.3 * angle)
        weights = np.linalg.solve(np.stack([[1, first @ second], [0, side @ second]]), [arc @ first, arc @ side])
        return weights[0] * a + weights[1] * b

    networks = (network(1), network(2))
    assert_close(merge(mcomb.slerp(shares=0.3), networks), per_leaf(define, networks), roundings=64)


def test_slerp_keeps_the_length_and_ends_at_the_networks():
    a = network(1)
    unit = lambda tree: jax.tree.map(lambda x: x / np.linalg.norm(x), tree)  # noqa: E731
    a, b = unit(a), unit(network(2))
    for leaf in jax.tree.leaves(merge("slerp", (a, b))):
        assert np.linalg.norm(leaf) == pytest.approx(1, abs=1e-6)
    assert_close(merge(mcomb.slerp(shares=0), (a, b)), a, roundings=4)
    assert_close(merge(mcomb.slerp(shares=1), (a, b)), b, roundings=4)
    assert_close(merge(mcomb.slerp(shares=0.3), (a, a)), a, roundings=4)
    zero = jax.tree.map(np.zeros_like, a)
    assert_close(merge(mcomb.slerp(shares=0.25), (zero, a)), jax.tree.map(lambda x: x / 4, a), roundings=4)


def test_average_has_shares_for_layers():
    shares = {"layers.0-0": 0.25, "head.bias": (1, 0)}
    found = named_leaves(merge(mcomb.average(shares=shares), (A, B)))
    for name, leaf in found.items():
        share = 0.25 if name.startswith("layers/0") else 0.0 if name == "head/bias" else 0.5
        a, b = (named_leaves(own)[name] for own in (A, B))
        assert_close(leaf, (1 - share) * a + share * b, roundings=4)
    found = merge(mcomb.average(shares=(0.5, 0.3, 0.2)))
    expected = jax.tree.map(lambda a, b, c: 0.5 * a + 0.3 * b + 0.2 * c, A, B, C)
    assert_close(found, expected, roundings=4)


METHODS = {
    "average": mcomb.average,
    "slerp": mcomb.slerp,
    "task_arithmetic": lambda: mcomb.task_arithmetic(BASE, scale=0.5),
    "ties": lambda: mcomb.ties(BASE),
    "dare": lambda: mcomb.dare(BASE),
}


@pytest.mark.parametrize("name", METHODS)
def test_leaves_keep_their_dtypes_and_integers(name):
    """Half precision is merged in float32, and rounded once."""

    def mixed(tree):
        return jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16), tree) | {"count": np.array([3, 4])}

    method = METHODS[name]()
    if method.base is not None:
        exact = mixed(BASE)
        method = getattr(mcomb, name)(exact, **method.options)
    half = tuple(map(mixed, (A, B)))
    found = mcomb.merge(apply, half, INPUTS, method=method).params
    assert_equal(found["count"], half[0]["count"])
    assert found["count"].dtype == half[0]["count"].dtype
    wide = [jax.tree.map(lambda x: x.astype(np.float32) if x.dtype.kind != "i" else x, tree) for tree in half]
    if method.base is not None:
        method = getattr(mcomb, name)(jax.tree.map(lambda x: x.astype(np.float32), mixed(BASE)), **method.options)
    wanted = mcomb.merge(apply, wide, INPUTS, method=method).params
    for key, leaf in named_leaves(found).items():
        if key != "count":
            assert leaf.dtype == ml_dtypes.bfloat16
            assert_equal(leaf, named_leaves(wanted)[key].astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("name", METHODS)
def test_complex_leaves_merge_as_pairs_of_reals(name):
    """A complex leaf gives the same as its real and imaginary parts in a real leaf."""
    rng = np.random.default_rng(0)
    base, a, b = (rng.normal(size=(4, 2)).astype(np.float32) for _ in range(3))
    results = []
    for make in (lambda x: {"w": x}, lambda x: {"w": x.view(np.complex64)[:, 0]}):
        method = METHODS[name]()
        if method.base is not None:
            method = getattr(mcomb, name)(make(base), **method.options)
        linear = lambda params, x: params["w"].real.sum() * x  # noqa: E731
        results.append(mcomb.merge(linear, (make(a), make(b)), INPUTS, method=method).params["w"])
    real, found = results
    assert found.dtype == np.complex64
    assert_equal(found.view(np.float32).reshape(4, 2), real)


@pytest.mark.parametrize("name", METHODS)
def test_running_statistics_are_estimated(name):
    def normed(params, x):
        return (x @ params["w"] - params["mean"][None]) * jax.lax.rsqrt(params["var"][None] + 1e-5)

    rng = np.random.default_rng(0)
    draw = lambda: {  # noqa: E731
        "w": rng.normal(size=(3, 2)).astype(np.float32),
        "mean": np.zeros(2, np.float32),
        "var": np.ones(2, np.float32),
    }
    base, a, b, x = draw(), draw(), draw(), rng.normal(size=(50, 3)).astype(np.float32)
    method = METHODS[name]()
    if method.base is not None:
        method = getattr(mcomb, name)(base, **method.options)
    found = mcomb.merge(normed, (a, b), x, method=method).params
    np.testing.assert_allclose(found["mean"], (x @ found["w"]).mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["var"], (x @ found["w"]).var(0), rtol=1e-4)


@pytest.mark.parametrize(
    ("configure", "words"),
    [
        (lambda: mcomb.ties(BASE, density=0), "density is 0: pass a number above 0 and at most 1"),
        (lambda: mcomb.dare(BASE, density=1.5), "density is 1.5"),
        (lambda: mcomb.task_arithmetic(BASE, scale=math.nan), "scale is nan: pass a finite number"),
        (lambda: mcomb.average(shares=1.5), "shares has 1.5: pass the share of B from 0 to 1, or 2 such"),
        (lambda: mcomb.average(shares=(0.5, 0.6)), "that sum to 1"),
        (
            lambda: mcomb.average(shares={"layers.7-9": 0.5}),
            "No weight belongs to the layers 'layers.7-9': use parts of names",
        ),
    ],
)
def test_task_vectors_name_wrong_options(configure, words):
    with pytest.raises(UserError, match=words):
        merge(configure(), (A, B))


def test_average_with_one_share_needs_two_networks():
    with pytest.raises(UserError, match="shares has one number for 3 networks: pass 3 shares"):
        merge(mcomb.average(shares=0.5))
