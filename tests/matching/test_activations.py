"""Activation matching: planted permutations are recovered, scores equal NumPy's, batches and devices do not matter."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from handwritten import mlp_spec
from inputs import model_inputs
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from numerics import assert_close, assert_equal, inner_product, inner_product_scale
from zoo import CASES, FEATURES, Shape, random_arrays, spec_of

from mcomb import PermutationSpec, derive_spec
from mcomb.errors import UserError
from mcomb.lab.models import MLP
from mcomb.matching.activations import _compare, correlations, match_activations, variances
from mcomb.matching.weights import match_weights


def add_noise(params, amount, seed=5):
    """Add noise of `amount` times each leaf's standard deviation."""
    rng = np.random.default_rng(seed)

    def add(leaf):
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf + (amount * np.std(leaf) * rng.normal(size=leaf.shape)).astype(leaf.dtype) if floating else leaf

    return jax.tree.map(add, params)


def apply_of(model):
    return lambda params, x: model.apply({"params": params}, x)


def check_recovered(spec, params, fn, inputs, **options):
    """Check that a planted permutation is recovered, up to the order of dead units."""
    planted = spec.random(jax.random.key(7))
    expected = spec.invert(planted)
    permuted = add_noise(spec.apply(planted, params), 1e-3)
    matching = match_activations(spec, params, permuted, fn, inputs, **options)
    undone = correlations(spec, params, spec.apply(expected, permuted), fn, inputs, **options)
    for name, values in undone.items():
        alive = values > 0.2  # the mean is below 1 for units that are dead in some arrays
        assert alive.mean() > 0.4
        np.testing.assert_array_equal(matching.perms[name][alive], expected[name][alive])
        np.testing.assert_array_equal(np.sort(matching.perms[name]), spec.identity()[name])
    assert matching.objective == matching.trace[-1] > matching.trace[0]


OTHERS = ("scanned transformer", "decoder with tied embeddings", "mixer")


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_activations_recover_all_kinds_of_units(name):
    with jax.numpy_rank_promotion("allow"):
        case = CASES[name]()
        spec = derive_spec(case.fn, case.params, case.input)
        inputs = random_arrays(Shape((40, *case.input.shape[1:]), case.input.dtype))
        check_recovered(spec, random_arrays(case.params), case.fn, inputs, batch_size=16)


def test_activations_recover_units_of_lab_networks(network):
    setup, model, params, some = network
    check_recovered(spec_of(model, params, some), params, apply_of(model), model_inputs(setup.dataset, 40))


def test_activations_take_handwritten_spec():
    inputs = np.random.default_rng(0).random((40, 8, 8, 1), np.float32)
    params = random_arrays(jax.eval_shape(MLP(1, 10).init, jax.random.key(0), inputs)["params"])
    check_recovered(mlp_spec(params), params, apply_of(MLP(1, 10)), inputs)


def planted(spec, params):
    """Return a network with permuted units, and the permutation that undoes it."""
    order = spec.random(jax.random.key(7))
    return add_noise(spec.apply(order, params), 1e-3), spec.invert(order)


def test_activations_leave_unseen_units_to_weights():
    def fn(params, x):
        x = x @ (params["u"] @ params["v"])
        return jax.lax.cond(x.sum() > 0, lambda x: jnp.tanh(x @ params["w"]) @ params["out"], lambda x: x[..., :2], x)

    shapes = {"u": (8, 5), "v": (5, 4), "w": (4, 6), "out": (6, 2)}
    params = random_arrays({name: Shape(shape, jnp.float32) for name, shape in shapes.items()})
    x = random_arrays(FEATURES)
    spec = derive_spec(fn, params, x)
    permuted, expected = planted(spec, params)
    with pytest.warns(UserWarning, match="Units of u, w are only inside branches"):
        matching = match_activations(spec, params, permuted, fn, x)
    assert matching.by_weights == ("u", "w")
    assert_equal(matching.perms, expected)
    assert not correlations(spec, params, permuted, fn, x)["w"].any()


def test_activations_break_ties_by_weights():
    def fn(params, x):
        hidden = jnp.tanh(x @ params["in"])[:, :1] @ params["multiples"]  # of one another
        dead = jax.nn.relu(hidden @ params["up"] - 100) + params["constants"].reshape(1, -1)
        return hidden @ params["out"] + dead @ params["down"]

    shapes = {"in": (3, 2), "multiples": (1, 5), "up": (5, 6), "constants": (6,), "out": (5, 2), "down": (6, 2)}
    params = random_arrays({name: Shape(shape, jnp.float32) for name, shape in shapes.items()})
    x = np.random.default_rng(0).standard_normal((40, 3), np.float32)
    spec = derive_spec(fn, params, x)
    assert sorted(spec.sizes.values()) == [5, 6]
    permuted, expected = planted(spec, params)
    with pytest.warns(UserWarning, match="Units of up are constant"):
        matching = match_activations(spec, params, permuted, fn, x)
    assert matching.by_weights == ("up",)
    assert_equal(matching.perms, expected)


def test_activations_exclude_argmax_positions():
    """An argmax changes when the codes are permuted, so its values say nothing about the units."""

    def fn(params, x):
        largest = jnp.argmax(jnp.einsum("nd,due->nue", x, params["a"]), -1)
        return jax.vmap(lambda index: jnp.zeros(5).at[index].add(1.0))(largest) @ params["w"]

    params = random_arrays({"a": Shape((4, 7, 5), jnp.float32), "w": Shape((5, 3), jnp.float32)})
    x = np.random.default_rng(0).standard_normal((64, 4), np.float32)
    spec = derive_spec(fn, params, x)
    permuted, expected = planted(spec, params)
    assert_equal(match_activations(spec, params, permuted, fn, x).perms, expected)


def test_activations_leave_while_loops_to_weights():
    def fn(params, x):
        step = lambda carry: (carry[0] + 1, carry[1] + jnp.tanh(carry[1] @ params["up"]) @ params["down"])  # noqa: E731
        return jax.lax.while_loop(lambda carry: carry[0] < 2, step, (0, x))[1]

    params = random_arrays({"up": Shape((8, 6), jnp.float32), "down": Shape((6, 8), jnp.float32)})
    x = random_arrays(FEATURES)
    spec = derive_spec(fn, params, x)
    permuted, expected = planted(spec, params)
    with pytest.warns(UserWarning, match="Units of up are only inside branches, while loops"):
        assert_equal(match_activations(spec, params, permuted, fn, x).perms, expected)


@pytest.mark.parametrize("flat", [False, True])
def test_activations_leave_sorted_experts_to_weights(flat):
    """The two networks sort rows differently, unless both choose the same experts."""
    rng = np.random.default_rng(0)
    params = {"router": (4, 3), "in": (3, 4, 6), "out": (3, 6, 6), "last": (6, 2)}
    params = {name: np.float32(rng.normal(size=shape)) for name, shape in params.items()}

    def apply(params, x):
        rows = x.reshape(-1, 4)
        index = jnp.argmax(rows @ params["router"], axis=-1)
        order, sizes = jnp.argsort(index), jnp.bincount(index, length=3)
        hidden = jnp.tanh(jax.lax.ragged_dot(rows[order], params["in"], sizes))
        if flat:
            hidden = hidden.reshape(-1) * 2
            hidden = hidden.reshape(-1, 6)
        hidden = jax.lax.ragged_dot(hidden, params["out"], sizes)[jnp.argsort(order)]
        return jnp.tanh(hidden).reshape(len(x), -1, 6).mean(1) @ params["last"]

    inputs = np.float32(rng.normal(size=(40, 5, 4)))
    spec = derive_spec(apply, params, inputs)
    assert sorted(spec.sizes.values()) == [3, 6, 6]
    permuted, expected = planted(spec, params)
    with pytest.warns(UserWarning, match="Units of in are only .* rows that are sorted by group"):
        matching = match_activations(spec, params, permuted, apply, inputs)
    assert matching.by_weights == ("in",)
    assert_equal(matching.perms, expected)


def test_activations_leave_constant_units_to_weights():
    """There is only one example, or each example is normalised over a batch of one."""

    def fn(params, x):
        hidden = jnp.tanh(x @ params["one"])
        return jnp.tanh((hidden - hidden.mean(0, keepdims=True)) @ params["two"]) @ params["three"]

    params, x = random_arrays(DEEP), np.random.default_rng(0).standard_normal((40, 3), np.float32)
    spec = derive_spec(fn, params, x)
    permuted, _ = planted(spec, params)
    for inputs in (x, x[:1]):
        with pytest.warns(UserWarning, match="Units of one, two are constant"):
            matching = match_activations(spec, params, permuted, fn, inputs)
        assert matching.by_weights == ("one", "two")
        assert_equal(matching.perms, match_weights(spec, params, permuted).perms)


def test_activations_prevail_over_weights():
    """Two units are swapped but their outgoing weights are not, which correlations ignore."""
    spec, a, _, inputs, _ = layers()
    a["bias"] += 3  # alive
    order = np.array([1, 0, 2, 3, 4])
    b = {"in": a["in"][:, order], "bias": a["bias"][order], "out": 1000 * a["out"]}
    assert match_weights(spec, a, b).perms["P"].tolist() != order.tolist()
    assert match_activations(spec, a, b, layer, inputs).perms["P"].tolist() == order.tolist()


def test_activations_match_layers_of_a_stack_in_one_order():
    def fn(params, x):
        x = x @ params["in"]
        for i in range(3):
            x = x + jnp.tanh(x @ params["up"][i]) @ params["down"][i]
        return x

    shapes = {"in": (8, 5), "up": (3, 5, 6), "down": (3, 6, 5)}
    params = random_arrays({name: Shape(shape, jnp.float32) for name, shape in shapes.items()})
    spec = derive_spec(fn, params, random_arrays(FEATURES))
    permuted, expected = planted(spec, params)
    matching = match_activations(spec, params, permuted, fn, random_arrays(FEATURES))
    assert matching.perms["up"].shape == (6,)
    assert_equal(matching.perms, expected)


def deep(params, x):
    """Return two hidden layers and their gradient with respect to the inputs, as forces are."""

    def energy(x):
        return (jnp.tanh(jnp.tanh(x @ params["one"]) @ params["two"]) @ params["three"]).sum()

    return jax.grad(energy)(x)


DEEP = {"one": Shape((3, 6), jnp.float32), "two": Shape((6, 7), jnp.float32), "three": Shape((7, 1), jnp.float32)}


@pytest.mark.parametrize("fn", [deep, lambda params, x: jax.jvp(lambda x: deep(params, x), (x,), (x,))[1]])
def test_activations_of_functions_with_gradients(fn):
    params, x = random_arrays(DEEP), np.random.default_rng(0).standard_normal((40, 3), np.float32)
    spec = derive_spec(fn, params, x)
    permuted, expected = planted(spec, params)
    assert_equal(match_activations(spec, params, permuted, fn, x).perms, expected)


def test_activations_of_networks_in_two_dtypes():
    def fn(params, x):
        hidden = jnp.tanh(x @ params["one"].astype(jnp.float32))
        return jnp.tanh(hidden.astype(params["two"].dtype) @ params["two"]) @ params["three"]

    params, x = random_arrays(DEEP), np.random.default_rng(0).standard_normal((40, 3), np.float32)
    spec = derive_spec(fn, params, x)
    permuted, expected = planted(spec, params)
    halves = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), permuted)
    assert_equal(match_activations(spec, params, halves, fn, x).perms, expected)
    assert_equal(match_activations(spec, halves, params, fn, x).perms, spec.invert(expected))


def test_activations_reject_dtype_that_changes_program():
    def fn(params, x):
        hidden = jnp.tanh(x @ params["one"])
        return hidden @ params["two"] if hidden.dtype == jnp.float32 else hidden.sum(-1, keepdims=True) * params["two"]

    params = {"one": np.ones((3, 6), np.float32), "two": np.ones((6, 1), np.float32)}
    spec = PermutationSpec.from_axes(params, {"one": (None, "P"), "two": ("P", None)})
    x, halves = np.ones((4, 3), np.float32), jax.tree.map(lambda leaf: leaf.astype(np.float16), params)
    both = jnp.concatenate([x, x])

    def twice(params, x):
        return fn(params, x.astype(params["one"].dtype))[:1]

    with pytest.raises(UserError, match="use one dtype for both networks"):
        match_activations(spec, params, halves, twice, both)


def test_activations_reject_dtype_that_changes_order():
    def fn(params, x):
        hidden = x @ params["one"].astype(jnp.float32)
        parts = [lambda: jnp.tanh(hidden) @ params["two"], lambda: jnp.cos(hidden) @ params["three"]]
        order = (0, 1) if params["one"].dtype == jnp.float32 else (1, 0)
        done = {i: parts[i]() for i in order}
        return done[0] + done[1]

    shapes = {"one": (3, 6), "two": (6, 2), "three": (6, 2)}
    params = random_arrays({name: Shape(shape, jnp.float32) for name, shape in shapes.items()})
    x, halves = random_arrays(Shape((4, 3), jnp.float32)), params | {"one": params["one"].astype(jnp.bfloat16)}
    with pytest.raises(UserError, match="use one dtype for both networks"):
        match_activations(derive_spec(fn, params, x), params, halves, fn, x)


def test_activations_of_tree_inputs():
    def fn(params, x):
        return jnp.tanh(x["image"] @ params["one"] + x["more"][0][:, None]) @ params["two"] @ params["three"]

    rng = np.random.default_rng(0)
    x = {"image": rng.standard_normal((40, 3), np.float32), "more": [rng.standard_normal(40, np.float32)]}
    spec = derive_spec(fn, DEEP, x)
    params = random_arrays(DEEP)
    permuted, expected = planted(spec, params)
    assert match_activations(spec, params, permuted, fn, x).perms["one"].tolist() == expected["one"].tolist()
    with pytest.raises(UserError, match="image 40, more/0 39"):
        match_activations(spec, params, permuted, fn, x | {"more": [x["more"][0][:39]]})


def between_shards(params, x, *names):
    """Compute two hidden layers: the first after a shard_map, the second inside another."""
    mesh, by = Mesh(np.array(jax.devices()), "device"), P(*names)
    last = jax.shard_map(
        lambda x, two, three: jnp.tanh(x @ two) @ three, mesh=mesh, in_specs=(by, P(), P()), out_specs=by
    )
    doubled = jax.shard_map(lambda x: 2 * x, mesh=mesh, in_specs=by, out_specs=by)(x)
    return last(jnp.tanh(doubled @ params["one"]), params["two"], params["three"])


def test_activations_of_function_with_shard_map_inside():
    params, x = random_arrays(DEEP), np.random.default_rng(0).standard_normal((40, 3), np.float32)
    spec = derive_spec(between_shards, params, x)
    permuted, expected = planted(spec, params)
    with pytest.warns(UserWarning, match="Units of two are only inside branches, while loops or a shard_map"):
        assert_equal(match_activations(spec, params, permuted, between_shards, x).perms, expected)


def test_activations_of_shard_map_with_any_axis_name():
    def fn(params, x):
        def inner(x, one):
            hidden = jnp.tanh(x @ one)
            return hidden * jax.lax.psum(hidden.sum(), "device")

        mesh, by = Mesh(np.array(jax.devices()), "device"), P("device")
        hidden = jax.shard_map(inner, mesh=mesh, in_specs=(P(), P()), out_specs=by)(x, params["one"])
        return jnp.tanh(hidden[: len(x)] @ params["two"]) @ params["three"]

    params, x = random_arrays(DEEP), np.random.default_rng(0).standard_normal((40, 3), np.float32)
    spec = derive_spec(fn, params, x)
    permuted, expected = planted(spec, params)
    assert_equal(match_activations(spec, params, permuted, fn, x).perms["two"], expected["two"])


def test_activations_reject_shard_map_of_many_examples():
    def fn(params, x):
        return between_shards(params, x, "device")

    count = len(jax.devices())
    if count == 1:
        pytest.skip("there is one device only")
    params, x = random_arrays(DEEP), np.ones((4 * count, 3), np.float32)
    spec = derive_spec(fn, params, x)
    with pytest.raises(UserError, match="cannot split a single example between devices"):
        match_activations(spec, params, params, fn, x)


def layer(params, x):
    return jax.nn.relu(x @ params["in"] + params["bias"].reshape(1, -1)) @ params["out"]


AXES = {"in": (None, "P"), "bias": ("P",), "out": ("P", None)}


def layers(units=5, rows=37):
    """Return two networks of one hidden layer, their spec, inputs, and their hidden units in float64."""
    shapes = {"in": (3, units), "bias": (units,), "out": (units, 2)}
    a, b = (random_arrays({name: Shape(shape, jnp.float32) for name, shape in shapes.items()}, seed) for seed in (0, 1))
    inputs = np.random.default_rng(0).standard_normal((rows, 3), np.float32)

    def hidden(params):
        return np.maximum(inputs.astype(np.float64) @ params["in"] + params["bias"], 0)

    return PermutationSpec.from_axes(a, AXES), a, b, inputs, hidden


def all_correlations(spec, a, b, inputs, batch_size):
    """Return the correlations of all pairs of units, from those of equal units for each shift."""
    units = np.arange(spec.sizes["P"])
    matrix = np.zeros((len(units), len(units)))
    for shift in units:
        order = np.roll(units, shift)
        permuted = spec.apply({"P": order}, b)
        matrix[units, order] = correlations(spec, a, permuted, layer, inputs, batch_size=batch_size)["P"]
    return matrix


@pytest.mark.parametrize("batch_size", [1, 5, 200])
def test_activations_correlations_equal_numpy(batch_size):
    spec, a, b, inputs, hidden = layers()
    for params in (a, b):
        params["bias"] += 3  # alive
    expected = np.corrcoef(hidden(a).T, hidden(b).T)[:5, 5:]
    assert_close(all_correlations(spec, a, b, inputs, batch_size), expected, roundings=64, scale=1)


def test_activations_variances_equal_numpy():
    spec, a, _, inputs, hidden = layers()
    a["bias"][1] = -1000  # dead
    expected = hidden(a).var(0)
    assert_close(variances(spec, a, layer, inputs, batch_size=5)["P"], expected, roundings=64)
    assert expected[1] == 0


def test_activations_of_large_means_and_dead_units():
    spec, a, b, inputs, hidden = layers(rows=301)
    for params in (a, b):
        params["bias"] += 1000
        params["bias"][1] = -1000
        params["in"][:, 3] = 0
    expected = np.zeros((5, 5))
    alive = [0, 2, 4]
    expected[np.ix_(alive, alive)] = np.corrcoef(hidden(a).T[alive], hidden(b).T[alive])[:3, 3:]
    # A deviation is a difference of activations: so it has the roundings of the mean.
    units = [hidden(params)[:, alive] for params in (a, b)]
    scale = max((values.mean(0) / values.std(0)).max() for values in units)
    assert_close(all_correlations(spec, a, b, inputs, batch_size=20), expected, roundings=1, scale=scale)
    assert np.isfinite(match_activations(spec, a, b, layer, inputs).objective)


@pytest.mark.parametrize("inner_products", [False, True])
def test_activations_match_one_hidden_layer_optimally(inner_products):
    spec, a, b, inputs, hidden = layers()
    products = hidden(a).T @ hidden(b) if inner_products else np.corrcoef(hidden(a).T, hidden(b).T)[:5, 5:]
    best = max(itertools.permutations(range(5)), key=lambda order: np.nan_to_num(products)[range(5), order].sum())
    matching = match_activations(spec, a, b, layer, inputs, inner_products=inner_products, batch_size=8)
    assert matching.perms["P"].tolist() == list(best)
    assert matching.trace[-1] == matching.objective <= match_weights(spec, a, b).objective
    for value, matched in zip(matching.trace, (b, spec.apply(matching.perms, b)), strict=True):
        assert_close(value, inner_product(a, matched), roundings=4, scale=inner_product_scale(a, matched))


@pytest.mark.slow
def test_activations_one_device_equals_all(request):
    case = CASES["grouped convolution"]()
    a, b = random_arrays(case.params, 0), random_arrays(case.params, 1)
    inputs = random_arrays(Shape((7, *case.input.shape[1:]), case.input.dtype))
    with jax.numpy_rank_promotion("allow"):
        spec = derive_spec(case.fn, case.params, case.input)
        expected = correlations(spec, a, b, case.fn, inputs, batch_size=2)
        request.getfixturevalue("one_device")
        one = correlations(spec, a, b, case.fn, inputs, batch_size=2)
    assert_close(one, expected, roundings=64, scale=1)
    assert {name: values.shape for name, values in one.items()} == {name: spec.shape(name) for name in spec.sizes}


def test_activations_are_pure_and_compile_once():
    spec, a, b, inputs, _ = layers()
    before = jax.tree.map(np.copy, (a, b, inputs))
    first = match_activations(spec, a, b, layer, inputs)
    compiled = _compare._cache_size()
    again = match_activations(PermutationSpec.from_axes(a, AXES), a, b, layer, inputs)
    assert _compare._cache_size() == compiled
    assert_equal((a, b, inputs), before)
    assert_equal(first.perms, again.perms)
    assert first.trace == again.trace


def test_activations_reject_misfits_and_nan():
    spec, a, b, inputs, _ = layers()
    with pytest.raises(UserError, match=r"bias is \(5,\) in A and \(6,\) in B"):
        match_activations(spec, a, b | {"bias": np.zeros(6, np.float32)}, layer, inputs)
    with pytest.raises(UserError, match="of bias in network B are not finite"):
        match_activations(spec, a, b | {"bias": np.full(5, np.nan, np.float32)}, layer, inputs)
