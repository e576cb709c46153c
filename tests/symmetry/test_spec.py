"""The group algebra of permutations, batched ones included; specs written by hand; the check; matching."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import assert_close, assert_equal, inner_product, inner_product_scale
from zoo import CASES, random_arrays, spec_of

from mcomb import Blocks, PermutationSpec, Segments, derive_spec
from mcomb.errors import UserError
from mcomb.matching.weights import match_weights
from mcomb.trees import named_leaves

# Three layers of attention in a stack, as a scan has them: each has its order of heads, each head of dimensions.
ATTENTION = PermutationSpec(
    axes={
        "query": ("layer", "stream", "heads", "dims"),
        "fused": ("layer", "stream", Blocks(("heads", "dims"))),
        "both": (Segments(("stream", 2, Blocks((2, "stream")))), None),
        "loop": ("stream", "stream"),
        "still": (None,),
    },
    sizes={"dims": 4, "stream": 5, "heads": 2},
    batched_over={"heads": ("layer",), "dims": ("layer", "heads")},
    fixed={"layer": 3},
)
SHAPES = {"query": (3, 5, 2, 4), "fused": (3, 5, 8), "both": (17, 3), "loop": (5, 5), "still": (7,)}
KEYS = st.integers(0, 2**31).map(jax.random.key)


def leaves(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


@settings(deadline=None, max_examples=30)
@given(KEYS, KEYS)
def test_compose_equals_applying_in_turn(first, second):
    p, q = ATTENTION.random(first), ATTENTION.random(second)
    assert_equal(ATTENTION.apply(ATTENTION.compose(p, q), leaves()), ATTENTION.apply(p, ATTENTION.apply(q, leaves())))


@settings(deadline=None, max_examples=30)
@given(KEYS, KEYS, KEYS)
def test_invert_and_compose_form_a_group(a, b, c):
    p, q, r = (ATTENTION.random(key) for key in (a, b, c))
    compose, invert, identity = ATTENTION.compose, ATTENTION.invert, ATTENTION.identity()
    assert_equal(compose(p, compose(q, r)), compose(compose(p, q), r))
    assert_equal(compose(p, identity), p)
    assert_equal(compose(identity, p), p)
    assert_equal(compose(p, invert(p)), identity)
    assert_equal(compose(invert(p), p), identity)


def test_sum_weights_is_the_transpose_of_add_units():
    rng, weights = np.random.default_rng(0), leaves()
    units = {name: rng.normal(size=ATTENTION.shape(name)) for name in ATTENTION.sizes}
    spread = {name: ATTENTION.add_units(units, name, shape) for name, shape in SHAPES.items()}
    sums = ATTENTION.sum_weights(weights)
    size = sum(leaf.size for leaf in weights.values())
    assert_close(inner_product(sums, units), inner_product(weights, spread), roundings=8, scale=size)
    assert {name: values.shape for name, values in sums.items()} == {n: ATTENTION.shape(n) for n in ATTENTION.sizes}
    ones = ATTENTION.sum_weights({name: np.ones_like(leaf) for name, leaf in weights.items()})
    assert (ones["dims"] == 5 + 5).all()  # of each dimension of each head: a row of the query and one that is fused
    assert (ones["stream"] == 3 * 8 + 3 * 8 + 3 * 3 + 2 * 5).all()  # of the loop a row and a column


def test_apply_moves_batched_permutations_with_their_axes():
    x, perms = leaves(), ATTENTION.random(jax.random.key(3))
    moved = ATTENTION.apply(perms, x)
    for layer, head, dim in np.ndindex(3, 2, 4):
        old = perms["heads"][layer, head], perms["dims"][layer, head, dim]
        np.testing.assert_array_equal(moved["query"][layer, :, head, dim], x["query"][layer, perms["stream"], *old])
        assert_equal(moved["fused"][layer, :, 4 * head + dim], x["fused"][layer, perms["stream"], 4 * old[0] + old[1]])


def test_apply_moves_segments_independently():
    x, perms = leaves(), ATTENTION.random(jax.random.key(3))
    moved, stream = ATTENTION.apply(perms, x)["both"], perms["stream"]
    assert_equal(
        moved,
        np.concatenate([x["both"][:5][stream], x["both"][5:7], x["both"][7:12][stream], x["both"][12:][stream]]),
    )


def test_apply_is_equal_on_host_device_and_compiled():
    x, perms = leaves(), ATTENTION.random(jax.random.key(3))
    host = ATTENTION.apply(perms, x)
    assert all(isinstance(leaf, np.ndarray) for leaf in host.values())
    assert_equal(ATTENTION.apply(perms, jax.tree.map(jnp.asarray, x)), host)
    assert_equal(jax.jit(ATTENTION.apply)(perms, x), host)


def test_apply_does_not_copy_unpermuted_leaves():
    x = leaves()
    assert ATTENTION.apply(ATTENTION.identity(), x)["still"] is x["still"]


def test_validate_requires_batch_axes_once():
    axes = {"query": ("stream", "heads", "dims"), "bias": ("dims",)}
    spec = PermutationSpec(axes, {"stream": 5, "heads": 2, "dims": 4}, {"dims": ("heads",)})
    with pytest.raises(UserError, match="dims differs along heads, but bias has 0 such axes"):
        spec.validate({"query": np.zeros((5, 2, 4)), "bias": np.zeros(4)})


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"kernel": (None, "P")}, "no entry for bias"),
        ({"kernel": (None, "P"), "bias": ("P",), "scale": ("P",)}, "has an entry for scale, but"),
        ({"kernel": ("P",), "bias": (None,)}, r"The spec has 1 axes for kernel, but its shape is \(3, 4\)"),
        ({"kernel": ("P", "P"), "bias": ("P",)}, "Axis 0 of bias has 4 entries, but permutation P has 3"),
        ({"kernel": (Blocks((2, "P")), "P"), "bias": ("P",)}, "Axis 0 of kernel has 3 entries, but its layout"),
        ({"kernel": (Segments((2, "Q")), None), "bias": (None,)}, "Axis 0 of kernel has permutation Q: add its size"),
    ],
)
def test_validate_names_the_leaf(axes, message):
    with pytest.raises(UserError, match=message):
        PermutationSpec.from_axes({"kernel": np.zeros((3, 4)), "bias": np.zeros(4)}, axes)


def test_from_axes_takes_plain_names():
    params = {"kernel": np.zeros((3, 4)), "bias": np.zeros(4)}
    spec = PermutationSpec.from_axes(params, {"kernel": (None, "P"), "bias": ("P",)})
    assert spec.sizes == {"P": 4}
    assert spec.axes_of("P") == [("kernel", 1), ("bias", 0)]


PLAIN_SHAPES = {"a": (4, 3), "b": (3,), "c": (3, 5, 4), "d": (5, 5)}
PLAIN_AXES = {"a": ("X", "Y"), "b": ("Y",), "c": ("Y", "Z", "X"), "d": ("Z", "Z")}
PARAMS = {name: np.random.default_rng(0).standard_normal(shape) for name, shape in PLAIN_SHAPES.items()}
PLAIN = PermutationSpec.from_axes(PARAMS, PLAIN_AXES)


def test_apply_takes_named_units_on_every_axis():
    p = PLAIN.identity() | {"Y": np.array([2, 0, 1])}
    moved = PLAIN.apply(p, PARAMS)
    assert_equal(moved["a"], PARAMS["a"][:, [2, 0, 1]])
    assert_equal(moved["b"], PARAMS["b"][[2, 0, 1]])
    assert_equal(moved["c"], PARAMS["c"][[2, 0, 1]])
    assert_equal(moved["d"], PARAMS["d"])


@pytest.mark.parametrize(("spec", "params"), [(PLAIN, PARAMS), (ATTENTION, leaves())])
def test_identity_changes_nothing(spec, params):
    assert_equal(spec.apply(spec.identity(), params), params)


@settings(max_examples=20, deadline=None)
@given(KEYS)
def test_random_returns_permutations(key):
    for spec in (PLAIN, ATTENTION):
        assert_equal({name: np.sort(perm, axis=-1) for name, perm in spec.random(key).items()}, spec.identity())


def test_apply_validates_parameters():
    with pytest.raises(UserError, match="Axis 0 of b has 4 entries"):
        PLAIN.validate(PARAMS | {"b": np.zeros(4)})


def test_apply_moves_all_units_and_keeps_the_function(network):
    _, model, params, images = network
    spec = spec_of(model, params, images)
    permuted = spec.apply(spec.random(jax.random.key(3)), params)
    apply = jax.jit(model.apply)
    before, after = (apply({"params": tree}, images) for tree in (params, permuted))
    assert_close(after, before, roundings=64)
    moved = named_leaves(jax.tree.map(lambda x, y: not np.array_equal(x, y), params, permuted))
    assert all(move for name, move in moved.items() if name != "logits/bias")


def mlp(params, x):
    hidden = jnp.tanh(x @ params["up"] + params["bias"][None])
    return {"logits": hidden @ params["down"], "sum": hidden.sum(1)}


MLP = {
    "up": np.eye(3, 6, dtype=np.float32),
    "bias": np.arange(6, dtype=np.float32),
    "down": np.ones((6, 2), np.float32),
}


def test_check_names_the_changed_output():
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    spec = derive_spec(mlp, MLP, x)
    assert spec.sizes
    spec.check(mlp, MLP, x)
    wrong = PermutationSpec.from_axes(MLP, {"up": (None, "P"), "bias": (None,), "down": ("P", None)})
    with pytest.raises(UserError, match=r"output logits differs by .* where its largest entry is"):
        wrong.check(mlp, MLP, x)


def test_check_compares_infinities_and_random_keys():
    def fn(params, x):
        hidden = x @ params
        return {"infinite": jnp.where(hidden.sum(-1) > 0, -jnp.inf, hidden.sum(-1)), "key": jax.random.key(1)}

    def order_decides(params, x):
        return jnp.where((x @ params)[:, 0] > 0, jnp.inf, 0.0), jax.random.key(params[0, 0].astype(int))

    params, x = np.arange(12, dtype=np.float32).reshape(3, 4), np.array([[1, 1, 1], [-1, -1, -1]], np.float32)
    derive_spec(fn, params, x).check(fn, params, x)
    spec = PermutationSpec.from_axes(params, {"": (None, "P")})
    swapped = {"P": np.array([1, 0, 2, 3])}
    with pytest.raises(UserError, match="output 1 differs"):
        spec.check(order_decides, params, x, perms=swapped, draws=0)
    with pytest.raises(UserError, match="output 0 differs where it is not finite"):
        spec.check(order_decides, params - 5.5, x, perms={"P": np.array([3, 1, 2, 0])}, draws=0)


def test_validate_rejects_leaves_of_equal_name():
    params = {"a/b": np.ones(2, np.float32), "a": {"b": np.ones(2, np.float32)}}
    with pytest.raises(UserError, match="Two leaves of the tree have the name a/b"):
        derive_spec(lambda p, x: x * p["a"]["b"].sum(), params, np.ones(2, np.float32))


def test_check_includes_given_permutations():
    x = np.ones((4, 3), np.float32)
    wrong = PermutationSpec.from_axes(MLP, {"up": (None, "P"), "bias": (None,), "down": ("P", None)})
    with pytest.raises(UserError, match="another function"):
        wrong.check(mlp, MLP, x, perms={"P": np.arange(6)[::-1]}, draws=0)
    wrong.check(mlp, MLP, x, perms=wrong.identity(), draws=0)


@pytest.mark.parametrize("name", ["NNX", "Equinox", "decoder with tied embeddings"])
def test_check_accepts_trees_of_every_library(name):
    with jax.numpy_rank_promotion("allow"):
        case = CASES[name]()
        spec = derive_spec(case.fn, case.params, case.input)
        spec.check(case.fn, random_arrays(case.params), random_arrays(case.input))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_check_allows_for_precision_of_parameters(dtype):
    params = {name: jnp.asarray(leaf, dtype) for name, leaf in MLP.items()}
    x = jax.random.normal(jax.random.key(0), (4, 3), dtype)
    spec = derive_spec(mlp, params, x)
    assert spec.sizes
    spec.check(mlp, params, x)


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit])
def test_check_allows_for_precision_inside(wrap):
    def fn(params, x):
        hidden = wrap(lambda p, x: x.astype(jnp.bfloat16) @ p.astype(jnp.bfloat16))(params["up"], x)
        return (hidden @ params["down"].astype(jnp.bfloat16)).astype(jnp.float32)

    rng = np.random.default_rng(0)
    params = {
        name: rng.standard_normal(shape, np.float32) for name, shape in {"up": (9, 300), "down": (300, 2)}.items()
    }
    x = rng.standard_normal((4, 9), np.float32)
    spec = derive_spec(fn, params, x)
    assert spec.sizes
    spec.check(fn, params, x)


def test_spec_table_shows_permutations_and_frozen_axes():
    case = CASES["VGG"]()
    spec = derive_spec(case.fn, case.params, case.input)
    assert str(spec).splitlines() == [
        "permutation   size  arrangements  acts on",
        "params/conv0  4     24            params/conv0/bias[0] params/conv0/kernel[3] params/conv1/kernel[2]",
        "params/conv1  5     120           params/conv1/bias[0] params/conv1/kernel[3] params/dense/kernel[0: 4×·]",
        "params/dense  7     5,040         params/dense/bias[0] params/dense/kernel[1] params/head/kernel[0]",
        "in all              10^7",
        "",
        "frozen by                                                  axes",
        "conv_general_dilated (positions of a window) in VGG/conv0  params/conv0/kernel[0,1]",
        "input 0                                                    params/conv0/kernel[2]",
        "conv_general_dilated (positions of a window) in VGG/conv1  params/conv1/kernel[0,1]",
        "reduce_window_max (positions of a window) in VGG           params/dense/kernel[0]",
        "the output                                                 params/head/bias[0] params/head/kernel[1]",
    ]


@pytest.mark.parametrize(
    "name",
    [
        "decoder with tied embeddings",
        "query, key and value in one",
        "VGG",
        "DenseNet",
        "grouped convolution",
        "scanned transformer",
        "LSTM",
        "NNX",
    ],
)
def test_matching_undoes_permutations_of_every_kind(name):
    with jax.numpy_rank_promotion("allow"):
        case = CASES[name]()
        a = random_arrays(case.params)
        spec = derive_spec(case.fn, a, case.input)
    b = spec.apply(spec.random(jax.random.key(1)), a)
    matching = match_weights(spec, a, b)
    assert_equal(spec.compose(matching.perms, spec.random(jax.random.key(1))), spec.identity())


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**31), st.integers(0, 2**31))
def test_matching_never_lowers_the_inner_product(seed_a, seed_b):
    a, b = leaves(seed_a), leaves(seed_b)
    matching = match_weights(ATTENTION, a, b)
    assert list(matching.trace) == sorted(matching.trace)
    moved = ATTENTION.apply(matching.perms, b)
    assert_close(matching.objective, inner_product(a, moved), roundings=4, scale=inner_product_scale(a, moved))


def attention(params, x):
    heads = jnp.einsum("td,dhk->thk", jnp.tanh(x @ params["embed"]), params["value"])
    return jnp.einsum("thk,hkd->td", heads, params["out"]) @ params["logits"]


def attention_params(seed):
    shapes = {"embed": (3, 6), "value": (6, 2, 4), "out": (2, 4, 5), "logits": (5, 2)}
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def test_without_keeps_only_named_permutations_in_place():
    a, b, x = attention_params(0), attention_params(1), jnp.ones((7, 3))
    whole = derive_spec(attention, a, x)
    for name in whole.sizes:
        spec = whole.without(name)
        assert {*spec.sizes} == {*whole.sizes} - {name}
        assert [(it.leaf, it.axis) for it in spec.frozen[len(whole.frozen) :]] == whole.axes_of(name)
        assert "kept in place" in str(spec)
        spec.validate(b)
        perms = spec.random(jax.random.key(2))
        spec.check(attention, b, x, perms=perms)
        whole_perms = perms | {name: whole.identity()[name]}
        assert_equal(spec.apply(perms, b), whole.apply(whole_perms, b))
        assert match_weights(spec, a, b).objective <= match_weights(whole, a, b, restarts=8).objective
    assert whole.without() == whole
    assert whole.without(*whole.sizes).sizes == {}


def test_without_rejects_unknown_permutation():
    with pytest.raises(UserError, match="There is no permutation units: use one of"):
        derive_spec(attention, attention_params(0), jnp.ones((7, 3))).without("units")
