"""Permuted networks compute the same, also inside; intermediates are found, returned and edited as they should be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from handwritten import mlp_spec, resnet20_spec, tiny10_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from numerics import EPS, assert_close
from programs import Program
from zoo import CASES, FEATURES, Shape, random_arrays, spec_of

from mcomb import PermutationSpec, derive_spec
from mcomb.lab.models import ResNet20
from mcomb.symmetry.intermediates import list_intermediates, unit_activations

HALF_THE_DIGITS = EPS**-0.5  # in roundings: what `check_spec` allows


def activations(spec, fn, params, x):
    """For each permutation the arrays in which its units are active."""
    return unit_activations(spec, list_intermediates(spec, fn, params, x))


def evaluate(spec, fn, arrays, params, x):
    """The function's result and the values of these intermediates."""
    tapped = list_intermediates(spec, fn, params, x).tap({array.id for array in arrays})
    result, values = jax.jit(tapped)(params, x)
    return result, [values[array.id] for array in arrays]


def check(fn, spec, params, x):
    """A permuted network computes the same, its arrays are the permuted arrays, and every permutation has some."""
    intermediates = list_intermediates(spec, fn, params, x)
    active = unit_activations(spec, intermediates)
    assert active.keys() <= spec.sizes.keys()
    assert all(name in array.names for name, arrays in active.items() for array in arrays)
    permuted = [array for equation in intermediates.equations for array in equation.results if array.names]
    with_arrays = intermediates.tap({array.id for array in permuted})
    run = jax.jit(lambda params: (fn(params, x), *with_arrays(params, x)))
    with jax.default_matmul_precision("highest"):
        expected, result, before = run(params)
        assert_close(result, expected, roundings=16)
        for seed in range(3):
            perms = spec.random(jax.random.key(seed))
            same, _, after = run(spec.apply(perms, params))
            assert_close(same, expected, roundings=HALF_THE_DIGITS)
            for array in permuted:
                old, new = np.asarray(before[array.id]), after[array.id]
                if np.isfinite(old).all():
                    assert_close(new, spec.permute_array(perms, array.layouts, old), roundings=HALF_THE_DIGITS)
    return active


OF_EVERY_DAY = ("query, key and value in one", "DenseNet", "grouped convolution", "LSTM", "NNX", "tied autoencoder")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OF_EVERY_DAY else pytest.mark.slow) for name in CASES]
)
def test_intermediates_of_permuted_networks_are_permuted(name):
    with jax.numpy_rank_promotion("allow"):
        case = CASES[name]()
        spec = derive_spec(case.fn, case.params, case.input)
        active = check(case.fn, spec, random_arrays(case.params), random_arrays(case.input))
        assert list(active) == list(spec.sizes)
        assert all(array.depends_on_inputs for arrays in active.values() for array in arrays)


@pytest.mark.slow
@settings(deadline=None, max_examples=6, derandomize=True)
@given(st.integers(0, 2**32), st.integers(3, 9))
def test_intermediates_of_random_programs_are_permuted(seed, steps):
    program = Program(seed, steps)
    spec = derive_spec(program, program.params(), program.input)
    check(program, spec, program.params(), random_arrays(program.input, seed))


def test_intermediates_of_handwritten_spec_keep_its_names(network):
    _, model, params, images = network
    handwritten = {"MLP": mlp_spec, "Tiny10": tiny10_spec, "ResNet20": resnet20_spec}
    if type(model).__name__ not in handwritten:
        pytest.skip("There is no handwritten spec of this model.")
    written = handwritten[type(model).__name__](params)
    derived = spec_of(model, params, images)
    names = {
        name: own_name
        for leaf, layouts in written.axes.items()
        for own_name, name in zip(layouts, derived.axes[leaf], strict=True)
    }

    def fn(params, x):
        return model.apply({"params": params}, x)

    own, expected = (activations(spec, fn, params, images) for spec in (written, derived))
    for name, arrays in expected.items():
        assert [array.id for array in own[names[name]]] == [array.id for array in arrays]


def test_residual_stream_is_active_after_every_block():
    images = Shape((1, 32, 32, 3), jnp.float32)
    model = ResNet20(1, 10)
    params = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
    active = activations(resnet20_spec(params), lambda params, x: model.apply({"params": params}, x), params, images)
    # The stem and three blocks; three blocks; two blocks and the pooled features.
    counts = {name: len(arrays) for name, arrays in active.items()}
    assert counts == dict.fromkeys(active, 1) | {"P1": 4, "P2": 3, "P3": 3}
    assert [len(array.layouts) for array in active["P3"]] == [4, 4, 2]


def mlp(params, x):
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"].reshape(1, -1))
    return jax.nn.relu(hidden @ params["w2"]) @ params["w3"]


MLP_PARAMS = {"w1": Shape((5, 4), jnp.float32), "b1": Shape((4,), jnp.float32)}
MLP_PARAMS |= {"w2": Shape((4, 4), jnp.float32), "w3": Shape((4, 2), jnp.float32)}
MLP_INPUT = Shape((6, 5), jnp.float32)


def test_intermediates_allow_coarser_specs():
    axes = {"w1": (None, "P"), "b1": ("P",), "w2": ("P", "P"), "w3": ("P", None)}
    tied = PermutationSpec.from_axes(MLP_PARAMS, axes)
    assert len(activations(tied, mlp, MLP_PARAMS, MLP_INPUT)["P"]) == 2
    one = PermutationSpec.from_axes(MLP_PARAMS, axes | {"w2": ("P", None), "w3": (None, None)})
    assert len(activations(one, mlp, MLP_PARAMS, MLP_INPUT)["P"]) == 1


def test_intermediates_of_mlp_are_inputs_of_its_weights():
    params, x = random_arrays(MLP_PARAMS), random_arrays(MLP_INPUT)
    spec = derive_spec(mlp, params, x)
    first, second = (evaluate(spec, mlp, arrays, params, x)[1] for arrays in activations(spec, mlp, params, x).values())
    hidden = np.maximum(x @ params["w1"] + params["b1"], 0)
    assert_close(first, [hidden], roundings=8)
    assert_close(second, [np.maximum(hidden @ params["w2"], 0)], roundings=8)


def test_intermediates_list_their_dependencies():
    spec = derive_spec(mlp, MLP_PARAMS, MLP_INPUT)
    depends = {
        equation.eqn.primitive.name: (result.depends_on_inputs, result.depends_on_params)
        for equation in list_intermediates(spec, mlp, MLP_PARAMS, MLP_INPUT).equations
        for result in equation.results
    }
    params_only = {name: (False, True) for name in depends if name in ("reshape", "broadcast_in_dim")}
    assert depends == params_only | dict.fromkeys(("dot_general", "add", "max"), (True, True))
    assert "reshape" in depends


def test_intermediates_omit_units_in_branches():
    def low_rank(params, x):
        x = x @ (params["u"] @ params["v"])
        return jax.lax.cond(x.sum() > 0, lambda x: jnp.tanh(x @ params["w"]).sum(-1), lambda x: x.sum(-1), x)

    params = {"u": Shape((8, 3), jnp.float32), "v": Shape((3, 2), jnp.float32), "w": Shape((2, 4), jnp.float32)}
    spec = derive_spec(low_rank, params, FEATURES)
    assert set(spec.sizes.values()) == {2, 3, 4}
    active = activations(spec, low_rank, params, FEATURES)
    assert [spec.sizes[name] for name in active] == [2]
    check(low_rank, spec, random_arrays(params), random_arrays(FEATURES))


def test_intermediates_include_units_before_their_sum():
    def summed(params, x):
        return jnp.tanh(x @ params).sum(-1)

    params = Shape((8, 3), jnp.float32)
    spec = derive_spec(summed, params, FEATURES)
    (arrays,) = activations(spec, summed, params, FEATURES).values()
    _, (hidden,) = evaluate(spec, summed, arrays, random_arrays(params), random_arrays(FEATURES))
    assert_close(hidden, np.tanh(random_arrays(FEATURES) @ random_arrays(params)), roundings=8)


def test_intermediates_of_scans_have_all_steps():
    def nested(params, x):
        def outer(carry, kernels):
            def inner(carry, _):
                hidden = jnp.tanh(carry @ kernels["up"])
                return carry + hidden @ kernels["down"], None

            return jax.lax.scan(inner, carry, length=2)[0], None

        return jax.lax.scan(outer, x, params, reverse=True)[0]

    params = random_arrays({"up": Shape((3, 8, 4), jnp.float32), "down": Shape((3, 4, 8), jnp.float32)})
    x = random_arrays(FEATURES)
    spec = derive_spec(nested, params, x)
    (arrays,) = activations(spec, nested, params, x).values()
    result, (hidden,) = evaluate(spec, nested, arrays, params, x)
    expected = np.zeros((3, 2, 2, 5, 4), np.float32)
    for layer in (2, 1, 0):
        for i in range(2):
            expected[layer, i] = np.tanh(x @ params["up"][layer])
            x = x + expected[layer, i] @ params["down"][layer]
    assert_close(hidden, expected, roundings=512)  # each of the six layers may enlarge the errors of the one before
    assert_close(result, x, roundings=512)


def test_intermediates_edits_affect_later_operations():
    params, x = random_arrays(MLP_PARAMS), random_arrays(MLP_INPUT)
    intermediates = list_intermediates(derive_spec(mlp, params, x), mlp, params, x)
    (biased,) = (e.results[0].id for e in intermediates.equations if e.eqn.primitive.name == "add")
    scale = np.array([[1.0, -2.0, 0.5, 3.0]], np.float32)
    result, values = jax.jit(intermediates.tap([biased], {biased: lambda value: value * scale}))(params, x)
    scaled = params | {"w1": params["w1"] * scale, "b1": params["b1"] * scale[0]}
    assert_close(result, mlp(scaled, x), roundings=16)
    assert_close(values[biased], x @ scaled["w1"] + scaled["b1"], roundings=8)
    doubled, _ = intermediates.tap([], {intermediates.params["w3"].id: lambda value: 2 * value})(params, x)
    assert_close(doubled, 2 * mlp(params, x), roundings=8)


def test_intermediates_work_under_jax_transformations():
    mesh = Mesh(np.array(jax.local_devices()), "device")
    params, x = random_arrays(MLP_PARAMS), random_arrays(Shape((2 * mesh.size, 6, 5), jnp.float32))
    spec = derive_spec(mlp, params, x[0])
    (array,) = next(iter(activations(spec, mlp, params, x[0]).values()))
    fn = list_intermediates(spec, mlp, params, x[0]).tap([array.id])
    one_by_one = jax.jit(fn)
    expected = jax.tree.map(lambda *rows: np.stack(rows), *(one_by_one(params, row) for row in x))
    mapped = {
        "vmap": jax.vmap(fn, (None, 0)),
        "lax.map": lambda params, x: jax.lax.map(lambda row: fn(params, row), x),
    }
    mapped["shard_map"] = jax.shard_map(
        mapped["lax.map"], mesh=mesh, in_specs=(P(), P("device")), out_specs=P("device"), check_vma=False
    )
    for run in mapped.values():
        assert_close(jax.jit(run)(params, x), expected, roundings=8)
    gradient = jax.jit(jax.grad(lambda params: fn(params, x[0])[0].sum()))(params)
    expected = jax.jit(jax.grad(lambda params: mlp(params, x[0]).sum()))(params)
    assert_close(gradient, expected, roundings=8)


def test_intermediates_reject_other_shapes_and_dtypes():
    params, x = random_arrays(MLP_PARAMS), random_arrays(MLP_INPUT)
    tapped = list_intermediates(derive_spec(mlp, params, x), mlp, params, x).tap(())
    for other in (x[:3], x.astype(np.float16)):
        with pytest.raises(ValueError, match=r"but f(loat)?32\[6,5\] was traced"):
            tapped(params, other)
