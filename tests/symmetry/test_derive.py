"""Derived permutation specs: the permutations that a person would count, and the reasons for what is frozen.

That they leave the function as it is, in all architectures and in random programs, is tested in `test_intermediates`.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from handwritten import mlp_spec, resnet20_spec, tiny10_spec
from numerics import assert_close
from zoo import CASES, FEATURES, Shape, random_arrays

from mcomb import PermutationSpec, combine, derive_spec
from mcomb.lab.data.cifar10 import CIFAR10
from mcomb.lab.models import MLP, ResNet20, Tiny10, network_function
from mcomb.matching.weights import match_weights
from mcomb.symmetry.derive import spec_of_trace


def index_shapes(spec: PermutationSpec) -> list[tuple[int, ...]]:
    return sorted(perm.shape for perm in spec.identity().values())


def up_to_names(spec: PermutationSpec) -> dict[str, tuple[int | None, ...]]:
    """The axes of a spec of whole axes, its permutations numbered in the order in which they are met."""
    numbers: dict[str, int] = {}
    return {
        leaf: tuple(None if perm is None else numbers.setdefault(perm, len(numbers)) for perm in spec.axes[leaf])
        for leaf in sorted(spec.axes)
    }


@pytest.mark.parametrize("name", CASES)
def test_derived_spec_has_counted_permutations(name):
    with jax.numpy_rank_promotion("allow"):
        case = CASES[name]()
        spec = derive_spec(case.fn, case.params, case.input)
        assert index_shapes(spec) == sorted(case.perm_shapes)


def test_symmetries_page_lists_every_architecture():
    page = (Path(__file__).parents[2] / "docs" / "symmetries.md").read_text()
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ")]
    assert not [name for name in CASES if not any(name in row for row in rows)]


@pytest.mark.parametrize(
    ("model", "handwritten", "count"),
    [(MLP, mlp_spec, 3), (Tiny10, tiny10_spec, 8), (ResNet20, resnet20_spec, 12)],
)
def test_derived_spec_equals_handwritten_spec(model, handwritten, count):
    images = Shape((1, 32, 32, 3), jnp.float32)
    params = jax.eval_shape(model(1, 10).init, jax.random.key(0), images)["params"]
    spec = derive_spec(network_function(model(1, 10), CIFAR10), params, images)
    assert len(spec.sizes) == count
    assert up_to_names(spec) == up_to_names(handwritten(params))


def test_derive_spec_needs_only_shapes():
    images = Shape((1, 32, 32, 3), jnp.float32)
    params = jax.eval_shape(ResNet20(32, 10).init, jax.random.key(0), images)["params"]
    fn = network_function(ResNet20(32, 10), CIFAR10)
    arrays = len(jax.live_arrays())
    spec = derive_spec(fn, params, images)
    assert len(jax.live_arrays()) - arrays <= 2  # the mean and the deviation of the pixels
    assert max(spec.sizes.values()) == 2048


# What is between two dense layers, and freezes the hidden units.
POSITIONAL = {
    "cumsum": lambda h, p: jnp.cumsum(h, -1),
    "sort": lambda h, p: jax.lax.sort((h, jnp.tanh(h)), num_keys=1)[1],
    "rev": lambda h, p: h[..., ::-1],
    "a constant": lambda h, p: h * (jnp.arange(6) + 1).reshape(1, 1, 6),
    "fft": lambda h, p: jnp.fft.fft(h).real,
    "argmax": lambda h, p: h + h.argmax(-1, keepdims=True),
    "gather": lambda h, p: jnp.take(h, np.array([0, 2, 1, 3, 5, 4]), -1),
    "dynamic_slice": lambda h, p: jnp.tile(jax.lax.dynamic_slice_in_dim(h, p["i"], 2, 2), (1, 1, 3)),
    "scatter": lambda h, p: h.at[..., p["i"]].set(0),
    "slice": lambda h, p: jnp.tile(jax.lax.slice_in_dim(h, 0, None, 4, axis=2), 3),
    "reduce_window_max": lambda h, p: jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 1, 3), (1, 1, 1), "SAME"),
    "top_k": lambda h, p: h + jax.lax.top_k(h, 6)[1],
    "conv_general_dilated": lambda h, p: jax.lax.conv(h.reshape(10, 1, 6), p["k"], (1,), "SAME").reshape(2, 5, 6),
    "random_bits": lambda h, p: h * jax.random.bernoulli(jax.random.key(0), 0.5, h.shape),
}


@pytest.mark.parametrize("primitive", POSITIONAL)
def test_derive_spec_freezes_distinguished_units_with_reason(primitive):
    def fn(params, x):
        hidden = POSITIONAL[primitive](jnp.tanh(x @ params["up"]), params)
        return hidden @ params["down"]

    params = {"up": Shape((8, 6), jnp.float32), "down": Shape((6, 2), jnp.float32)}
    params |= {"i": Shape((), jnp.int32), "k": Shape((1, 1, 3), jnp.float32)}
    spec = derive_spec(fn, params, FEATURES)
    assert spec.axes["up"] == (None, None)
    reasons = {frozen.reason for frozen in spec.frozen if (frozen.leaf, frozen.axis) == ("up", 1)}
    assert {reason.split(" in ")[0].split(" (")[0] for reason in reasons} == {primitive}


SIGNED = np.array([0.0, -0.0, 0.0, -0.0, 0.0, -0.0], np.float32).reshape(1, 1, 6)


@pytest.mark.parametrize(
    "constant", [SIGNED, SIGNED.astype(jnp.bfloat16), 1j * SIGNED, np.copysign(np.float32(np.nan), SIGNED)]
)
@pytest.mark.parametrize("equal", [True, False])
def test_derive_spec_keeps_units_of_other_signs_apart(constant, equal):
    """Zero and minus zero are equal, but copysign, arctan2 and division tell them apart."""
    constant = np.full_like(constant, constant[0, 0, 1]) if equal else constant

    def fn(params, x):
        hidden = jnp.copysign(x @ params, jnp.imag(constant) if np.iscomplexobj(constant) else constant)
        return (hidden**3).sum(-1)

    spec = derive_spec(fn, Shape((8, 6), jnp.float32), FEATURES)
    assert [spec.shape(name) for name in spec.sizes] == [(6,) if equal else (2, 3)]


def test_derive_spec_freezes_values_in_mutable_arrays():
    def fn(params, x):
        written = jax.new_ref(jnp.zeros((2, 5, 6)))
        written[...] = jnp.tanh(x @ params["up"])
        return written[...] @ params["down"]

    params = {"up": Shape((8, 6), jnp.float32), "down": Shape((6, 2), jnp.float32)}
    spec = derive_spec(fn, params, FEATURES)
    assert not spec.sizes
    assert {frozen.reason.split()[0] for frozen in spec.frozen if frozen.axis == 1} >= {"swap"}


def test_debug_print_freezes_nothing():
    def fn(params, x):
        hidden = x @ params
        jax.debug.print("{}", hidden)
        return (hidden**3).sum(-1)

    assert len(derive_spec(fn, Shape((8, 6), jnp.float32), FEATURES).sizes) == 1


def test_frozen_axes_name_their_module():
    case = CASES["VGG"]()
    spec = derive_spec(case.fn, case.params, case.input)
    reasons = {(frozen.leaf, frozen.axis): frozen.reason for frozen in spec.frozen}
    assert reasons["params/conv1/kernel", 0] == "conv_general_dilated (positions of a window) in VGG/conv1"
    assert reasons["params/conv0/kernel", 2] == "input 0"
    assert reasons["params/head/bias", 0] == "the output"


def test_frozen_axes_outside_modules_name_their_line():
    spec = derive_spec(lambda p, x: jnp.fft.fft(x @ p).real.sum(), Shape((8, 6), jnp.float32), FEATURES)
    assert "test_derive.py" in {frozen.reason for frozen in spec.frozen if frozen.axis == 1}.pop()


def test_derive_spec_freezes_unused_parameters():
    params = {"used": Shape((8, 6), jnp.float32), "unused": Shape((6, 7), jnp.float32)}
    spec = derive_spec(lambda p, x: jnp.tanh(x @ p["used"]).sum(-1), params, FEATURES)
    assert spec.axes == {"unused": (None, None), "used": (None, "used")}


def test_units_of_heads_share_order_where_parameters_do():
    def fn(params, x):
        q, k = (jnp.einsum("btc,chd->bthd", x, params[name]) * params["scale"][None, None, None] for name in "qk")
        return jnp.einsum("bqhd,bkhd,h->bqk", q, k, params["mix"])

    kernel = Shape((8, 2, 4), jnp.float32)
    params = {"q": kernel, "k": kernel, "scale": Shape((4,), jnp.float32), "mix": Shape((2,), jnp.float32)}
    spec = derive_spec(fn, params, FEATURES)
    assert index_shapes(spec) == [(2,), (4,)]
    spec.check(fn, random_arrays(params), random_arrays(FEATURES))


def test_heads_multiplied_with_all_heads_share_unit_order():
    def fn(params, x):
        q = jnp.einsum("btc,chd->bthd", x, params)
        return jnp.exp(jnp.einsum("bthd,btgd->bthg", q, q)).sum((-2, -1))

    spec = derive_spec(fn, Shape((8, 2, 4), jnp.float32), FEATURES)
    assert index_shapes(spec) == [(2,), (4,)]
    spec.check(fn, random_arrays(Shape((8, 2, 4), jnp.float32)), random_arrays(FEATURES))


def test_scan_carry_has_one_order_at_all_steps():
    def fn(params, x):
        def step(carry, layer):
            carry = jnp.tanh(x.sum((0, 1)) @ layer + carry)
            return carry, (carry**3).sum()

        return jax.lax.scan(step, jnp.zeros(4), params)[1]

    params = Shape((3, 8, 4), jnp.float32)
    spec = derive_spec(fn, params, FEATURES)
    assert index_shapes(spec) == [(4,)]
    spec.check(fn, random_arrays(params), random_arrays(FEATURES))


def test_scan_constants_have_one_order_at_all_steps():
    def fn(params, x):
        def step(carry, scale):
            return carry + jnp.tanh(carry * scale @ params["up"]) @ params["down"], None

        return jax.lax.scan(step, x, params["scales"])[0]

    shapes = {"up": (8, 4), "down": (4, 8), "scales": (3, 1, 1, 8)}
    params = {name: Shape(shape, jnp.float32) for name, shape in shapes.items()}
    spec = derive_spec(fn, params, FEATURES)
    assert index_shapes(spec) == [(4,)]
    spec.check(fn, random_arrays(params), random_arrays(FEATURES))


def test_mapped_layers_may_be_reordered():
    def fn(params, x):
        hidden = jax.lax.map(lambda layer: jnp.tanh(x @ layer).sum(-1), params)
        return hidden.sum(0)

    spec = derive_spec(fn, Shape((3, 8, 4), jnp.float32), FEATURES)
    assert index_shapes(spec) == [(3,), (3, 4)]
    spec.check(fn, random_arrays(Shape((3, 8, 4), jnp.float32)), random_arrays(FEATURES))


def test_batch_axes_cover_their_permutation():
    def fn(params, x):
        return (jnp.tanh(jnp.einsum("btc,chd->bthd", x, params)[:, :, :2]).sum(-1) ** 3).sum(-1)

    params = Shape((8, 5, 4), jnp.float32)
    spec = derive_spec(fn, params, FEATURES)
    assert index_shapes(spec) == [(2,), (4,), (4, 3)]  # the last are not used: each position has an order of its own
    spec.check(fn, random_arrays(params), random_arrays(FEATURES))


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


@pytest.mark.parametrize(
    "transform",
    [
        jax.jit,
        jax.checkpoint,
        lambda layer: jax.jit(jax.vmap(layer, (None, 0))),
        lambda layer: lambda p, x: jax.lax.cond(x.sum() > 0, layer, lambda p, x: -layer(p, x), p, x),
        lambda layer: lambda p, x: jax.lax.fori_loop(0, 3, lambda i, v: v + layer(p, v), x),
        lambda layer: lambda p, x: doubled(jax.nn.relu(jax.nn.softplus(layer(p, x)))),
    ],
)
def test_nested_jaxprs_are_interpreted(transform):
    @transform
    def layer(params, x):
        return doubled(jax.nn.relu(x @ params["up"])) @ params["down"]

    def fn(params, x):
        return layer(params, x @ params["stem"]) @ params["head"]

    shapes = {"stem": (8, 6), "up": (6, 4), "down": (4, 6), "head": (6, 2)}
    params = {name: Shape(shape, jnp.float32) for name, shape in shapes.items()}
    spec = derive_spec(fn, params, FEATURES)
    assert len(spec.sizes) in (2, 3)
    assert spec.axes["up"][0] == "stem"
    spec.check(fn, random_arrays(params), random_arrays(FEATURES))


def test_custom_network_is_aligned_and_combined():
    case = CASES["transformer encoder"]()
    a = random_arrays(case.params)
    spec = derive_spec(case.fn, a, case.input)
    b = spec.apply(spec.random(jax.random.key(1)), a)
    aligned = spec.apply(match_weights(spec, a, b).perms, b)
    assert_close(combine(a, aligned, 0.5), a, roundings=1)


def test_batch_axes_occur_once_in_a_leaf():
    def fn(params, x):
        hidden = jnp.tanh(jnp.einsum("bc,chd->bhd", x[:, 0], params["in"]))
        scores = jnp.concatenate([hidden.sum(-1), jnp.ones((2, 1))], 1)
        return ((hidden * (scores @ params["mix"]).reshape(hidden.shape)) ** 3).sum((1, 2))

    params = {"in": Shape((8, 2, 3), jnp.float32), "mix": Shape((3, 6), jnp.float32)}
    spec = derive_spec(fn, params, FEATURES)
    spec.validate(params)
    assert index_shapes(spec) == [(2,), (3,)]
    spec.check(fn, random_arrays(params), random_arrays(FEATURES))


def growing_concatenation(steps):
    def fn(params, x):
        hidden = x @ params
        for _ in range(steps):
            hidden = jnp.concatenate([hidden, jnp.tanh(x @ params)], 1)
        return hidden.sum(1)

    return fn, Shape((3, 4), jnp.float32), Shape((2, 3), jnp.float32)


def recurrence(steps):
    def fn(params, x):
        hidden = jnp.zeros((2, 4))
        for i in range(steps):
            hidden = jnp.tanh(jnp.concatenate([x[:, i], hidden], 1) @ params["in"])
        return hidden @ params["out"]

    params = {"in": Shape((7, 4), jnp.float32), "out": Shape((4, 2), jnp.float32)}
    return fn, params, Shape((2, steps, 3), jnp.float32)


def layers_of_a_stack(steps):
    def fn(params, x):
        for i in range(steps):
            x = x + jnp.tanh(x @ params["up"][i]) @ params["down"][i]
        return x

    params = {"up": Shape((steps, 3, 4), jnp.float32), "down": Shape((steps, 4, 3), jnp.float32)}
    return fn, params, Shape((2, 3), jnp.float32)


def dense_block(steps):
    def fn(params, x):
        hidden = x
        for kernel in params:
            hidden = jnp.concatenate([hidden, jnp.tanh(hidden @ kernel)], 1)
        return hidden.sum(1)

    return fn, [Shape((3 + 2 * i, 2), jnp.float32) for i in range(steps)], Shape((2, 3), jnp.float32)


def count_calls(problem):
    """How many functions of this package are called to derive a spec."""
    fn, params, x = problem
    traced = jax.make_jaxpr(fn)(params, x)
    count = 0

    def profile(frame, event, _):
        nonlocal count
        count += event == "call" and "symmetry" in frame.f_code.co_filename

    sys.setprofile(profile)
    try:
        spec_of_trace(traced, params, x)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    "problem",
    [
        growing_concatenation,
        *(pytest.param(other, marks=pytest.mark.slow) for other in (recurrence, layers_of_a_stack)),
    ],
)
def test_derivation_cost_grows_with_the_number_of_steps(problem):
    few, many = (count_calls(problem(steps)) for steps in (40, 80))
    assert 1.5 * few < many < 2.3 * few


@pytest.mark.slow
def test_derivation_cost_of_dense_block_grows_with_spec():
    few, many = (count_calls(dense_block(layers)) for layers in (20, 40))
    assert 1.5 * few < many < 4.2 * few  # twice as many leaves of twice the parts


@pytest.mark.slow
def test_derivation_of_long_recurrence_needs_no_recursion():
    assert len(derive_spec(*recurrence(600)).sizes) == 1
    assert index_shapes(derive_spec(*layers_of_a_stack(100))) == [(4,)]
