import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_close, assert_equal, assert_never_falls
from zoo import CASES, random_arrays

import mcomb
from mcomb import merge
from mcomb.errors import UserError
from mcomb.merging.partial import _any_unit, _masks, _split, apply_partly_merged, merge_partly
from mcomb.symmetry.jaxpr_walk import all_equations
from mcomb.trees import is_inexact, named_leaves

RNG = np.random.default_rng(0)
X = RNG.normal(size=(50, 5)).astype(np.float32)


def apply(params, x):
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"][None])
    return x @ params[-1]["w"] + params[-1]["b"][None]


def network(seed, sizes=(5, 8, 6, 3)):
    rng = np.random.default_rng(seed)
    layers = itertools.pairwise(sizes)
    return [{"w": normal(rng, i, o), "b": normal(rng, o)} for i, o in layers]


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


A, B, C = (network(seed) for seed in (1, 2, 3))
SPEC = mcomb.derive_spec(apply, A, X)
FIRST, SECOND = SPEC.sizes  # the permutations of both hidden layers


def size(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree) if is_inexact(leaf))


def mean_output(fn, networks, x):
    return sum(fn(network, x) for network in networks) / len(networks)


def apart(spec, merged):
    """Return which units of each permutation are kept apart."""
    units = {name: merged.params.get("apart", {}).get(name.replace("/", "."), []) for name in spec.sizes}
    return {
        name: np.isin(np.arange(np.prod(spec.shape(name))), units[name]).reshape(spec.shape(name)) for name in units
    }


@pytest.mark.parametrize(
    ("networks", "per"),
    [pytest.param((A, B), "layer", marks=pytest.mark.slow), ((A, B, C), "unit")],
    ids=["layers", "units"],
)
def test_partial_merge_ranges_from_average_to_ensemble(networks, per):
    budgets = np.linspace(1, len(networks), 4)
    every = [merge_partly(apply, networks, X, spec=SPEC, budget=budget, per=per) for budget in budgets]
    average = merge(apply, networks, X, method="average", spec=SPEC).params
    assert_equal(every[0].params, {"first": average})
    assert_equal(every[0].apply(every[0].params, X), apply(average, X))
    assert_close(every[-1].apply(every[-1].params, X), mean_output(apply, networks, X), roundings=16)
    assert_never_falls([merged.weights for merged in every])
    for budget, merged in zip(budgets, every, strict=True):
        assert merged.weights == size(merged.params) <= budget * size(A)
        parts = [np.unique(mask) for mask in apart(SPEC, merged).values()]
        assert per == "unit" or all(len(part) == 1 for part in parts)
        if per == "unit":  # one more unit would exceed the budget
            most = (len(networks) - 1) * (8 + 1 + 6)
            assert merged.weights > budget * size(A) - most
    for fewer, more in itertools.pairwise(every):
        for name in SPEC.sizes:
            assert not (apart(SPEC, fewer)[name] & ~apart(SPEC, more)[name]).any()


def test_partial_merge_averages_merged_units():
    merged = merge_partly(apply, (A, B), X, spec=SPEC, budget=1.5)
    first, second = apart(SPEC, merged).values()
    assert 0 < first.sum() < len(first)
    assert 0 < second.sum() < len(second)

    def mix(both, is_apart):
        mean = (both[0] + both[1]) / 2
        return [np.where(is_apart, own, mean) for own in both]

    average = merge(apply, (A, B), X, method="average", spec=SPEC).params
    streams = [X.astype(np.float64)] * 2
    into = np.zeros(5, bool)
    for i, is_apart in enumerate((first, second, np.zeros(3, bool))):
        is_own = into[:, None] | is_apart[None]
        bias_is_own = is_apart if i < 2 else np.full(3, "2/b" in named_leaves(merged.params.get("rest")))
        streams = [
            x @ np.where(is_own, own[i]["w"], average[i]["w"]) + np.where(bias_is_own, own[i]["b"], average[i]["b"])
            for x, own in zip(streams, (A, B), strict=True)
        ]
        if i < 2:
            streams = [np.maximum(x, 0) for x in mix(streams, is_apart)]
        into = is_apart
    assert_close(merged.apply(merged.params, X), (streams[0] + streams[1]) / 2, roundings=64)


def test_partial_merge_keeps_unmatched_units_apart():
    a = network(1, (5, 12, 3))
    b = jax.tree.map(np.copy, a)
    planted = np.isin(np.arange(12), [2, 7, 11])
    b[0]["w"][:, planted], b[1]["w"][planted] = normal(RNG, 5, 3), normal(RNG, 3, 3)
    spec = mcomb.derive_spec(apply, a, X)
    budget = 1 + 3 * (5 + 1 + 3) / size(a)
    merged = merge_partly(apply, (a, b), X, spec=spec, budget=budget)
    (units,) = merged.params["apart"].values()
    assert_equal(units, np.flatnonzero(planted))
    goal = mean_output(apply, (a, b), X)
    assert_close(merged.apply(merged.params, X), goal, roundings=64)
    average = merge(apply, (a, b), X, method="average", spec=spec).params
    assert np.abs(apply(average, X) - goal).max() > 0.1


def test_partial_merge_splits_constant_units_last():
    rng = np.random.default_rng(4)
    dead = jax.tree.map(np.copy, A), jax.tree.map(lambda leaf: leaf + normal(rng, *leaf.shape) / 10, A)
    for own in dead:
        own[0]["b"][:2] = -100
    dead[1][0]["b"][2] = -100
    parts = [
        apart(SPEC, merge_partly(apply, dead, X, spec=SPEC, budget=budget))[FIRST]
        for budget in (1 + 13 / size(A), 2 - 11 / size(A))
    ]
    assert_equal(parts[0], np.arange(8) == 2)
    assert_equal(parts[1], np.arange(8) >= 2)


ARCHITECTURES = [
    "grouped convolution",
    "query, key and value in one",
    "VGG",
    "LSTM",
    "transformer encoder",
    "scanned transformer",
    "decoder with tied embeddings",
    "mixer",
    "Equinox",
    "NNX",
    "GRU",
    "tied autoencoder",
    "BatchNorm ResNet",
    "inverted residual",
    "DenseNet",
    "untied over positions",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_partial_merge_of_any_architecture(name):
    case = CASES[name]()
    x = random_arrays(jax.ShapeDtypeStruct((8, *case.input.shape[1:]), case.input.dtype), 3)
    a, b = (mcomb.estimate_statistics(case.fn, random_arrays(case.params, seed), x) for seed in (1, 2))
    spec = mcomb.derive_spec(case.fn, a, x)
    assert spec.sizes
    fn = jax.jit(case.fn)
    half, every = (merge_partly(case.fn, (a, b), x, spec=spec, budget=budget) for budget in (1.5, 2))
    assert_close(jax.jit(every.apply)(every.params, x), mean_output(fn, (a, b), x), roundings=2**10)
    assert size(a) < half.weights == size(half.params) <= 1.5 * size(a)
    found = jax.jit(half.apply)(half.params, x)
    with pytest.MonkeyPatch.context() as patch:  # compute each stream by itself, then the mean over the streams
        patch.setattr("mcomb.merging.partial._product", lambda *args: None)
        assert_close(found, jax.jit(partial(half.apply))(half.params, x), roundings=2**10)
    # A network merged with itself is itself, whichever units are apart.
    masks = jax.tree.map(np.asarray, _masks(spec, half.params))
    floats = {name: leaf for name, leaf in named_leaves(a).items() if is_inexact(leaf)}
    is_own = {name: _any_unit(spec, masks, spec.axes[name], leaf.shape) for name, leaf in floats.items()}
    same = _split(spec, a, (a, a), apart(spec, half), is_own)
    assert {*named_leaves(same["others"])} == {*named_leaves(half.params["others"])}
    assert_close(jax.jit(half.apply)(same, x), fn(a, x), roundings=2**10)


def test_partial_merge_size_and_flops_follow_budget(tmp_path):
    networks = [network(seed, (64, 256, 256, 256, 10)) for seed in (1, 2)]
    x = normal(RNG, 32, 64)
    spec = mcomb.derive_spec(apply, networks[0], x)
    mcomb.write_checkpoint(tmp_path / "one.safetensors", networks[0])
    one, work = (tmp_path / "one.safetensors").stat().st_size, flops(apply, networks[0], x)
    for budget in (1.25, 1.5):
        merged = merge_partly(apply, networks, x, spec=spec, budget=budget)
        mcomb.write_checkpoint(tmp_path / "merged.safetensors", merged.params)
        assert merged.weights > 1.2 * size(networks[0])
        assert (tmp_path / "merged.safetensors").stat().st_size < (budget + 0.03) * one
        # The last layer, with 1 in 60 weights, is computed for each network.
        assert flops(merged.apply, merged.params, x) < (budget + 0.03) * work


def flops(fn, params, x):
    """Count the additions and multiplications of all matrix products."""
    products = [eqn for eqn in all_equations(jax.make_jaxpr(fn)(params, x)) if eqn.primitive.name == "dot_general"]
    assert products
    sizes = [(eqn.outvars[0].aval.size, eqn.invars[0].aval, eqn.params["dimension_numbers"][0][0]) for eqn in products]
    return sum(2 * size * np.prod([left.shape[axis] for axis in summed]) for size, left, summed in sizes)


@pytest.mark.parametrize("budget", [1, 1.5, 2])
def test_partial_merge_is_scored_and_written(tmp_path, budget):
    merged = merge_partly(apply, (A, B), X, spec=SPEC, budget=budget)
    labels = RNG.integers(0, 3, len(X))
    found = mcomb.score(merged.apply, merged.params, X, labels)
    assert_close(found.accuracy, np.mean(merged.apply(merged.params, X).argmax(1) == labels), roundings=1)
    for path in (tmp_path / "folder", tmp_path / "file.safetensors", tmp_path / "file.npz", tmp_path / "file.msgpack"):
        mcomb.write_checkpoint(path, merged.params)
        read = mcomb.read_checkpoint(path)
        read["first"] = jax.tree.unflatten(jax.tree.structure(A), jax.tree.leaves(read["first"]))
        assert_equal(apply_partly_merged(SPEC, apply)(read, X), merged.apply(merged.params, X))


def test_partial_merge_without_permutations():
    def fixed(params, x):
        return jnp.cumsum(x @ params["w"], axis=1) * params["s"][None]

    a, b = ({"w": normal(RNG, 5, 4), "s": normal(RNG, 4), "steps": np.int32(i)} for i in (1, 2))
    b["w"] = a["w"]  # equal weights are split last
    spec = mcomb.derive_spec(fixed, a, X)
    assert not spec.sizes
    merged = merge_partly(fixed, (a, b), X, spec=spec, budget=1.5)
    assert "others" not in merged.params
    assert {*named_leaves(merged.params["rest"])} == {"s"}
    assert merged.params["first"]["steps"] == 1
    assert_close(merged.apply(merged.params, X), mean_output(fixed, (a, b), X), roundings=16)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"budget": 0.9}, r"budget is 0\.9: pass a number from 1 to 2, the number of networks"),
        ({"budget": 2.5}, r"budget is 2\.5"),
        ({"budget": np.nan}, "budget is nan"),
        ({"per": "weight"}, "Cannot keep each 'weight' apart: choose from unit, layer"),
        ({"networks": (A,)}, r"fewer than two networks \(got 1\): pass a tuple"),
        ({"apply": lambda params, x: apply(params, x).argmax(1)}, "not floats and have no mean"),
    ],
)
def test_partial_merge_rejects_misuse(change, words):
    given = {"networks": (A, B), "apply": apply, "inputs": X, "budget": 1.5, "per": "unit"} | change
    method = mcomb.partial(budget=given.pop("budget"), per=given.pop("per"))
    with pytest.raises(UserError, match=words):
        merge(**given, method=method, spec=SPEC)


def test_partial_merge_returns_function_and_details():
    found = merge(apply, (A, B), X, method=mcomb.partial(budget=1.5))
    direct = merge_partly(apply, (A, B), X, spec=SPEC, budget=1.5)
    assert_equal(found.params, direct.params)
    assert_equal(found.apply(found.params, X), direct.apply(direct.params, X))
    assert isinstance(found.details, mcomb.PartlyMerged)
    assert found.details.weights == direct.weights
    assert repr(found) == "Merged(by partial(budget=1.5, per='unit'))"


def test_partial_merge_names_unsupported_units():
    def branched(params, x):
        hidden = jnp.tanh(x @ params["up"])
        return jax.lax.cond(x.sum() > 0, lambda h: h @ params["down"], lambda h: -h @ params["down"], hidden)

    a, b = ({"up": normal(RNG, 5, 4), "down": normal(RNG, 4, 3)} for _ in range(2))
    spec = mcomb.derive_spec(branched, a, X)
    with pytest.raises(UserError, match="Cannot merge units of up inside a cond"):
        merge_partly(branched, (a, b), X, spec=spec, budget=1.5)


def test_partial_merge_of_stacked_layers_keeps_units_apart():
    def stacked(params, x):
        for i in range(2):
            x = x + jnp.tanh(x @ params["up"][i]) @ params["down"][i]
        return x

    a, b = ({"up": normal(RNG, 2, 5, 4), "down": normal(RNG, 2, 4, 5)} for _ in range(2))
    merged = merge_partly(stacked, (a, b), X, spec=mcomb.derive_spec(stacked, a, X), budget=2.0)
    assert_close(merged.apply(merged.params, X), mean_output(stacked, (a, b), X), roundings=64)


def test_partial_merge_of_float16_does_not_overflow():
    """The mean of numbers near the largest float16 is near it too."""

    def half(params, x):
        return jnp.tanh(x @ params["w"]) @ params["v"]

    def large(seed):
        rng = np.random.default_rng(seed)
        weights = {"w": rng.normal(size=(5, 4)), "v": 2e4 * rng.uniform(0.5, 1, size=(4, 3))}
        return jax.tree.map(lambda leaf: leaf.astype(np.float16), weights)

    a, b, x = large(1), large(2), np.abs(X).astype(np.float16)
    merged = merge(half, (a, b), x, method=mcomb.partial(budget=2))
    outputs, theirs = merged.apply(merged.params, x), [np.float32(half(own, x)) for own in (a, b)]
    assert outputs.dtype == np.float16
    assert np.abs(sum(theirs)).max() > np.finfo(np.float16).max  # the sum overflows
    assert_close(np.float32(outputs), sum(theirs) / 2, roundings=2**14)
