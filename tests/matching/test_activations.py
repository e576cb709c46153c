import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from handwritten import mlp_spec
from zoo import CASES, FEATURES, Shape, drawn, spec_of

from mcomb import PermutationSpec, match_activations, match_weights, permutation_spec
from mcomb.matching.activations import _compare, correlations
from mcomb.base import UserError
from mcomb.lab.models import MLP


def noisy(params, amount, seed=5):
    """Parameters with noise of a share of each leaf's deviation."""
    rng = np.random.default_rng(seed)

    def add(leaf):
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf + (amount * np.std(leaf) * rng.normal(size=leaf.shape)).astype(leaf.dtype) if floating else leaf

    return jax.tree.map(add, params)


def fn_of(model):
    return lambda params, x: model.apply({"params": params}, x)


def check_recovered(spec, params, fn, inputs, **options):
    """A planted permutation is found, up to the order of units that are dead."""
    planted = spec.random(jax.random.key(7))
    expected = spec.invert(planted)
    shuffled = noisy(spec.apply(planted, params), 1e-3)
    found = match_activations(spec, params, shuffled, fn, inputs, **options)
    undone = correlations(spec, params, spec.apply(expected, shuffled), fn, inputs, **options)
    for name, values in undone.items():
        alive = values > 0.2  # where a stream's unit is dead in some of its places, the mean is below 1
        assert alive.mean() > 0.4
        np.testing.assert_array_equal(found.perms[name][alive], expected[name][alive])
        np.testing.assert_array_equal(np.sort(found.perms[name]), spec.identity()[name])
    assert found.objective == found.trace[-1] > found.trace[0]


@pytest.mark.parametrize(
    "name",
    [
        *("decoder with tied embeddings", "scanned transformer", "LSTM", "NNX", "DenseNet"),
        *("grouped convolution", "mixer", "untied over positions"),
    ],
)
def test_a_planted_permutation_of_all_kinds_of_units_is_recovered(name):
    with jax.numpy_rank_promotion("allow"):
        case = CASES[name]()
        spec = permutation_spec(case.fn, case.params, case.input)
        inputs = drawn(Shape((40, *case.input.shape[1:]), case.input.dtype))
        check_recovered(spec, drawn(case.params), case.fn, inputs, batch_size=16)


def test_a_planted_permutation_of_our_networks_is_recovered(network):
    setup, model, params, images = network
    inputs = np.random.default_rng(0).random((40, *setup.image), np.float32)
    check_recovered(spec_of(model, params, images), params, fn_of(model), inputs)


def test_a_written_spec_is_matched_too():
    inputs = np.random.default_rng(0).random((40, 8, 8, 1), np.float32)
    params = drawn(jax.eval_shape(MLP(1, 10).init, jax.random.key(0), inputs)["params"])
    check_recovered(mlp_spec(params), params, fn_of(MLP(1, 10)), inputs)


def test_units_between_parameters_are_matched_by_their_weights():
    def low_rank(params, x):
        return x @ (params["u"] @ params["v"])

    params = {"u": Shape((8, 5), jnp.float32), "v": Shape((5, 4), jnp.float32)}
    check_recovered(permutation_spec(low_rank, params, FEATURES), drawn(params), low_rank, drawn(FEATURES))


def layer(params, x):
    return jax.nn.relu(x @ params["in"] + params["bias"].reshape(1, -1)) @ params["out"]


AXES = {"in": (None, "P"), "bias": ("P",), "out": ("P", None)}


def layers(units=5, rows=37):
    """Two networks of one hidden layer, their spec, some inputs, and their hidden units in double precision."""
    shapes = {"in": (3, units), "bias": (units,), "out": (units, 2)}
    a, b = (drawn({name: Shape(shape, jnp.float32) for name, shape in shapes.items()}, seed) for seed in (0, 1))
    inputs = np.random.default_rng(0).standard_normal((rows, 3), np.float32)

    def hidden(params):
        return np.maximum(inputs.astype(np.float64) @ params["in"] + params["bias"], 0)

    return PermutationSpec.from_axes(a, AXES), a, b, inputs, hidden


def everything(spec, a, b, fn, inputs, **options):
    """The correlations of all units with all units, from those of equal units for each shift."""
    units = np.arange(spec.sizes["P"])
    found = np.zeros((len(units), len(units)))
    for shift in units:
        order = np.roll(units, shift)
        found[units, order] = correlations(spec, a, spec.apply({"P": order}, b), fn, inputs, **options)["P"]
    return found


@pytest.mark.parametrize("batch_size", [1, 5, 200])
def test_streamed_correlations_are_those_of_numpy_all_at_once(batch_size):
    spec, a, b, inputs, hidden = layers()
    for params in (a, b):
        params["bias"] += 3  # alive
    expected = np.corrcoef(hidden(a).T, hidden(b).T)[:5, 5:]
    np.testing.assert_allclose(
        everything(spec, a, b, layer, inputs, batch_size=batch_size), expected, rtol=1e-4, atol=1e-5
    )


def test_a_large_mean_costs_no_precision_and_dead_units_correlate_with_nothing():
    spec, a, b, inputs, hidden = layers(rows=301)
    for params in (a, b):
        params["bias"] += 1000
        params["bias"][1] = -1000
        params["in"][:, 3] = 0
    expected = np.zeros((5, 5))
    alive = [0, 2, 4]
    expected[np.ix_(alive, alive)] = np.corrcoef(hidden(a).T[alive], hidden(b).T[alive])[:3, 3:]
    np.testing.assert_allclose(everything(spec, a, b, layer, inputs, batch_size=20), expected, atol=2e-3)
    assert np.isfinite(match_activations(spec, a, b, layer, inputs).objective)


@pytest.mark.parametrize("inner_products", [False, True])
def test_one_hidden_layer_is_matched_optimally(inner_products):
    spec, a, b, inputs, hidden = layers()
    products = hidden(a).T @ hidden(b) if inner_products else np.corrcoef(hidden(a).T, hidden(b).T)[:5, 5:]
    best = max(itertools.permutations(range(5)), key=lambda order: np.nan_to_num(products)[range(5), order].sum())
    found = match_activations(spec, a, b, layer, inputs, inner_products=inner_products, batch_size=8)
    assert found.perms["P"].tolist() == list(best)
    inner = sum(np.vdot(a[name], spec.apply(found.perms, b)[name]) for name in a)
    assert found.objective == pytest.approx(inner, rel=1e-5)
    assert found.trace == (pytest.approx(sum(np.vdot(a[name], b[name]) for name in a), rel=1e-5), found.objective)
    assert found.objective <= match_weights(spec, a, b).objective


def test_one_device_gives_what_two_do(request):
    case = CASES["grouped convolution"]()
    a, b = drawn(case.params, 0), drawn(case.params, 1)
    inputs = drawn(Shape((7, *case.input.shape[1:]), case.input.dtype))
    with jax.numpy_rank_promotion("allow"):
        spec = permutation_spec(case.fn, case.params, case.input)
        two = correlations(spec, a, b, case.fn, inputs, batch_size=2)
        request.getfixturevalue("one_device")
        one = correlations(spec, a, b, case.fn, inputs, batch_size=2)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), one, two)
    assert {name: values.shape for name, values in one.items()} == {name: spec.shape(name) for name in spec.sizes}


def test_arguments_are_left_alone_and_equal_specs_are_compiled_for_once():
    spec, a, b, inputs, _ = layers()
    before = jax.tree.map(np.copy, (a, b, inputs))
    first = match_activations(spec, a, b, layer, inputs)
    compiled = _compare._cache_size()
    again = match_activations(PermutationSpec.from_axes(a, AXES), a, b, layer, inputs)
    assert _compare._cache_size() == compiled
    jax.tree.map(np.testing.assert_array_equal, (a, b, inputs), before)
    np.testing.assert_array_equal(first.perms["P"], again.perms["P"])
    assert first.trace == again.trace


def test_what_cannot_be_matched_is_refused():
    spec, a, b, inputs, _ = layers()
    with pytest.raises(UserError, match="entries, but permutation"):
        match_activations(spec, a, b | {"bias": np.zeros(6, np.float32)}, layer, inputs)
    with pytest.raises(UserError, match="activations of P are not finite"):
        match_activations(spec, a, b | {"bias": np.full(5, np.nan, np.float32)}, layer, inputs)
