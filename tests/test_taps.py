"""Taps: every permutation has a place, what is there moves as it should, and a function re-evaluated is itself."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from handwritten import mlp_spec, resnet20_spec, tiny10_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from programs import Program
from zoo import CASES, FEATURES, Shape, drawn, spec_of

from mcomb import PermutationSpec, permutation_spec
from mcomb.models import ResNet20
from mcomb.taps import Place, activations, survey, tapped


def outputs(fn, taps, params, x):
    """The function's result and what is at the taps, in order."""
    result, found = jax.jit(tapped(fn, {tap.place for tap in taps}))(params, x)
    return result, [found[tap.place] for tap in taps]


def check(fn, spec, params, x):
    """Every permutation has taps; a permuted network's arrays are the permuted arrays; the result stays."""
    found = survey(spec, fn, params, x)
    named = activations(spec, found)
    assert list(named) == list(spec.sizes)
    assert all(name in tap.perms for name, taps in named.items() for tap in taps)
    taps = [tap for site in found.sites for tap in site.results if tap.perms]
    perms = spec.random(jax.random.key(1))
    again = tapped(fn, {tap.place for tap in taps})
    run = jax.jit(lambda params: (fn(params, x), *again(params, x)))  # compiled once for both
    with jax.default_matmul_precision("highest"):
        (expected, result, before), (_, _, after) = map(run, (params, spec.apply(perms, params)))
    np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())
    for tap in taps:
        old, new = before[tap.place], after[tap.place]
        moved = replace(spec, axes={"": tap.layouts}).apply(perms, np.asarray(old))
        if np.isfinite(old).all():
            np.testing.assert_allclose(new, moved, rtol=1e-2, atol=1e-3 * np.abs(old).max())
    return named


@pytest.mark.parametrize("name", CASES)
def test_in_every_family_of_models_each_permutation_has_a_place_where_its_units_move(name):
    with jax.numpy_rank_promotion("allow"):
        case = CASES[name]()
        spec = permutation_spec(case.fn, case.params, case.input)
        named = check(case.fn, spec, drawn(case.params), drawn(case.input))
        assert all(tap.inputs for taps in named.values() for tap in taps)


@settings(deadline=None, max_examples=10, derandomize=True)
@given(st.integers(0, 2**32), st.integers(3, 9))
def test_in_random_programs_each_permutation_has_a_place_where_its_units_move(seed, steps):
    program = Program(seed, steps)
    spec = permutation_spec(program, program.params(), program.input)
    check(program, spec, program.params(), drawn(program.input, seed))


def test_a_written_spec_gets_the_places_of_the_derived_one_under_its_own_names(network):
    _, model, params, images = network
    written = {"MLP": mlp_spec, "Tiny10": tiny10_spec, "ResNet20": resnet20_spec}[type(model).__name__](params)
    derived = spec_of(model, params, images)
    names = {
        theirs: ours
        for leaf, layouts in written.axes.items()
        for ours, theirs in zip(layouts, derived.axes[leaf], strict=True)
    }

    def fn(params, x):
        return model.apply({"params": params}, x)

    ours, theirs = (activations(spec, survey(spec, fn, params, images)) for spec in (written, derived))
    for name, taps in theirs.items():
        assert [tap.place for tap in ours[names[name]]] == [tap.place for tap in taps]


def test_the_streams_of_a_residual_network_are_active_after_every_block():
    images = Shape((1, 32, 32, 3), jnp.float32)
    params = jax.eval_shape(ResNet20(1).init, jax.random.key(0), images)["params"]
    spec = resnet20_spec(params)
    named = activations(spec, survey(spec, lambda params, x: ResNet20(1).apply({"params": params}, x), params, images))
    # The stem and three blocks; three blocks; two blocks and the pooled features.
    assert {name: len(taps) for name, taps in named.items()} == dict.fromkeys(named, 1) | {"P1": 4, "P2": 3, "P3": 3}
    assert [len(tap.layouts) for tap in named["P3"]] == [4, 4, 2]


def mlp(params, x):
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"].reshape(1, -1))
    return jax.nn.relu(hidden @ params["w2"]) @ params["w3"]


MLP_PARAMS = {"w1": Shape((5, 4), jnp.float32), "b1": Shape((4,), jnp.float32)}
MLP_PARAMS |= {"w2": Shape((4, 4), jnp.float32), "w3": Shape((4, 2), jnp.float32)}
MLP_INPUT = Shape((6, 5), jnp.float32)


def test_a_coarser_spec_ties_units_and_leaves_others_unnamed():
    axes = {"w1": (None, "P"), "b1": ("P",), "w2": ("P", "P"), "w3": ("P", None)}
    tied = PermutationSpec.of(MLP_PARAMS, axes)
    assert len(activations(tied, survey(tied, mlp, MLP_PARAMS, MLP_INPUT))["P"]) == 2
    partial = PermutationSpec.of(MLP_PARAMS, axes | {"w2": ("P", None), "w3": (None, None)})
    assert len(activations(partial, survey(partial, mlp, MLP_PARAMS, MLP_INPUT))["P"]) == 1


def test_the_activations_of_an_mlp_are_what_its_weights_see():
    params, x = drawn(MLP_PARAMS), drawn(MLP_INPUT)
    spec = permutation_spec(mlp, params, x)
    first, second = (
        outputs(mlp, taps, params, x)[1] for taps in activations(spec, survey(spec, mlp, params, x)).values()
    )
    hidden = np.maximum(x @ params["w1"] + params["b1"], 0)
    np.testing.assert_allclose(first, [hidden], rtol=1e-5)
    np.testing.assert_allclose(second, [np.maximum(hidden @ params["w2"], 0)], rtol=1e-5, atol=1e-6)


def test_equations_say_what_they_depend_on():
    found = survey(permutation_spec(mlp, MLP_PARAMS, MLP_INPUT), mlp, MLP_PARAMS, MLP_INPUT)
    made = {site.eqn.primitive.name: (tap.inputs, tap.params) for site in found.sites for tap in site.results}
    assert made == {
        "dot_general": (True, True),
        "reshape": (False, True),
        "add": (True, True),
        "max": (True, True),
    } | {name: (False, True) for name in made if name == "broadcast_in_dim"}


def test_units_between_parameters_are_found_in_the_parameters():
    def low_rank(params, x):
        return x @ (params["u"] @ params["v"])

    params = {"u": Shape((8, 3), jnp.float32), "v": Shape((3, 2), jnp.float32)}
    spec = permutation_spec(low_rank, params, FEATURES)
    found = survey(spec, low_rank, params, FEATURES)
    (taps,) = activations(spec, found).values()
    assert taps == [found.leaves["u"], found.leaves["v"]]
    check(low_rank, spec, drawn(params), drawn(FEATURES))


def test_units_that_are_only_summed_are_found_before_the_sum():
    def summed(params, x):
        return jnp.tanh(x @ params).sum(-1)

    params = Shape((8, 3), jnp.float32)
    spec = permutation_spec(summed, params, FEATURES)
    (taps,) = activations(spec, survey(spec, summed, params, FEATURES)).values()
    _, (hidden,) = outputs(summed, taps, drawn(params), drawn(FEATURES))
    np.testing.assert_allclose(hidden, np.tanh(drawn(FEATURES) @ drawn(params)), rtol=1e-5)


def test_what_is_inside_scans_comes_with_all_their_steps():
    def nested(params, x):
        def outer(carry, kernels):
            def inner(carry, _):
                hidden = jnp.tanh(carry @ kernels["up"])
                return carry + hidden @ kernels["down"], None

            return jax.lax.scan(inner, carry, length=2)[0], None

        return jax.lax.scan(outer, x, params, reverse=True)[0]

    params = drawn({"up": Shape((3, 8, 4), jnp.float32), "down": Shape((3, 4, 8), jnp.float32)})
    x = drawn(FEATURES)
    spec = permutation_spec(nested, params, x)
    (taps,) = activations(spec, survey(spec, nested, params, x)).values()
    result, (hidden,) = outputs(nested, taps, params, x)
    expected = np.zeros((3, 2, 2, 5, 4), np.float32)
    for layer in (2, 1, 0):
        for i in range(2):
            expected[layer, i] = np.tanh(x @ params["up"][layer])
            x = x + expected[layer, i] @ params["down"][layer]
    np.testing.assert_allclose(hidden, expected, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(result, x, rtol=1e-3, atol=1e-5)


def test_edits_are_seen_by_everything_after_them():
    params, x = drawn(MLP_PARAMS), drawn(MLP_INPUT)
    found = survey(permutation_spec(mlp, params, x), mlp, params, x)
    sums = [site.results[0].place for site in found.sites if site.eqn.primitive.name == "add"]
    scale = np.array([[1.0, -2.0, 0.5, 3.0]], np.float32)
    result, handed = jax.jit(tapped(mlp, sums, {sums[0]: lambda value: value * scale}))(params, x)
    scaled = params | {"w1": params["w1"] * scale, "b1": params["b1"] * scale[0]}
    np.testing.assert_allclose(result, mlp(scaled, x), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(handed[sums[0]], x @ scaled["w1"] + scaled["b1"], rtol=1e-4, atol=1e-5)
    doubled, _ = tapped(mlp, [], {found.leaves["w3"].place: lambda value: 2 * value})(params, x)
    np.testing.assert_allclose(doubled, 2 * mlp(params, x), rtol=1e-5)


def test_a_tapped_function_can_be_mapped_sharded_and_differentiated():
    params, x = drawn(MLP_PARAMS), drawn(Shape((4, 6, 5), jnp.float32))
    spec = permutation_spec(mlp, params, x[0])
    (tap,) = next(iter(activations(spec, survey(spec, mlp, params, x[0])).values()))
    fn = tapped(mlp, [tap.place])
    expected = [fn(params, one) for one in x]
    expected = jax.tree.map(lambda *all: np.stack(all), *expected)
    mesh = Mesh(np.array(jax.local_devices()), "device")
    mapped = {
        "vmap": jax.vmap(fn, (None, 0)),
        "lax.map": lambda params, x: jax.lax.map(lambda one: fn(params, one), x),
    }
    mapped["shard_map"] = jax.shard_map(
        mapped["lax.map"], mesh=mesh, in_specs=(P(), P("device")), out_specs=P("device"), check_vma=False
    )
    for way in mapped.values():
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), jax.jit(way)(params, x), expected)
    gradient = jax.grad(lambda params: fn(params, x[0])[0].sum())(params)
    plain = jax.grad(lambda params: mlp(params, x[0]).sum())(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), gradient, plain)


def test_a_place_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="survey it with arguments of these shapes"):
        tapped(mlp, [Place((99,), 0)])(drawn(MLP_PARAMS), drawn(MLP_INPUT))
