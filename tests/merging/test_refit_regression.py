import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_close, assert_equal
from zoo import random_arrays

import mcomb
from mcomb import merge
from mcomb.errors import UserError
from mcomb.merging.refit_regression import find_places, list_fittable, refit_maps
from mcomb.symmetry.intermediates import list_intermediates
from mcomb.trees import map_named, named_leaves

RNG = np.random.default_rng(0)


class Everything(nn.Module):
    """Convolutions, strided and dilated, norms, attention, dense layers.

    It takes no mean over positions, which would vary so little that rounding hides the weights of the last maps.
    """

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, (3, 3), strides=2, name="strided")(x)
        x = nn.Conv(5, (3, 2), kernel_dilation=(1, 2), padding="VALID", use_bias=False, name="dilated")(nn.tanh(x))
        x = nn.LayerNorm(name="norm")(nn.tanh(x))
        x = x.reshape(len(x), -1, 5)
        x = x + nn.MultiHeadDotProductAttention(2, qkv_features=6, name="attention")(x)
        return nn.Dense(3, name="logits")(nn.tanh(nn.Dense(7, name="dense")(x[:, 0])))


def apply(params, x):
    return Everything().apply({"params": params}, x)


X = RNG.normal(size=(60, 9, 8, 3)).astype(np.float32)
SHAPES = jax.eval_shape(Everything().init, jax.random.key(0), X)["params"]


def network(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: (0.5 * rng.normal(size=leaf.shape)).astype(np.float32), SHAPES)


A = network(1)
SPEC = mcomb.derive_spec(apply, A, X)
MAPS = ["strided", "dilated", *(f"attention/{part}" for part in ("query", "key", "value", "out")), "dense", "logits"]


def maps_of(fn, params, x):
    spec = mcomb.derive_spec(fn, params, x)
    return list_fittable(list_intermediates(spec, fn, params, x), params)


def test_refit_keeps_average_of_complex_maps():
    fn = lambda params, x: jnp.imag(x.astype(np.complex64) @ params["complex"]) @ params["real"]  # noqa: E731
    x = RNG.normal(size=(40, 5)).astype(np.float32)
    a, b = ({name: RNG.normal(size=(5, 5)).astype(np.float32) for name in ("complex", "real")} for _ in range(2))
    a, b = (own | {"complex": own["complex"] + 1j * own["real"]} for own in (a, b))
    merged = merge(fn, (a, b), x, method="refit").params
    average = mcomb.combine(a, b, 0.5)
    assert_close(merged["complex"], average["complex"], roundings=4)
    assert np.abs(merged["real"] - average["real"]).max() > 0.01


def test_refit_finds_all_linear_maps():
    found = maps_of(apply, A, X)
    assert sorted(own.kernel.leaf for own in found) == sorted(f"{name}/kernel" for name in MAPS)
    assert {own.kernel.leaf for own in found if own.bias is None} == {"dilated/kernel"}
    for own in found:
        kernel = named_leaves(A)[own.kernel.leaf]
        assert sorted(own.kernel.positions.ravel()) == list(range(kernel.size))


def test_refit_of_network_with_itself_changes_nothing():
    assert_equal(merge(apply, (A, A), X, method="refit", spec=SPEC).params, A)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in MAPS[:-2] else ()) for name in MAPS]
)
def test_refit_recovers_changed_weights(name):
    """Least squares are exact if each kind of map sees its inputs in the order of its weights."""
    noise = np.random.default_rng(2)
    changed = map_named(
        lambda leaf, own: own + noise.normal(size=own.shape).astype(np.float32) if leaf.startswith(name) else own, A
    )
    found = refit_maps(SPEC, (A, A), changed, apply, X, ridge=1e-7)
    assert_close(apply(found, X), apply(A, X), roundings=2**14)
    # The inputs of these maps have condition numbers up to 13,500.
    if name not in MAPS[2:5]:  # the outputs of a norm are dependent, so several maps are equivalent
        assert_close(named_leaves(found)[f"{name}/kernel"], named_leaves(A)[f"{name}/kernel"], roundings=2**16)


def test_refit_is_closer_to_mean_output_than_average():
    def dense(params, x):
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"][None])
        return x @ params[-1]["w"]

    def some(seed):
        rng = np.random.default_rng(seed)
        sizes = [(6, 16), (16, 16), (16, 4)]
        return [{"w": rng.normal(size=s) / s[0] ** 0.5, "b": rng.normal(size=s[1])} for s in sizes]

    a, b = (jax.tree.map(np.float32, some(seed)) for seed in (1, 2))
    x = np.random.default_rng(3).normal(size=(450, 6)).astype(np.float32)
    aligned = mcomb.align(dense, a, b, x)
    goal = (dense(a, x) + dense(aligned.params, x)) / 2
    merged = [merge(dense, (a, aligned.params), x, method=method, spec=aligned.spec) for method in ("average", "refit")]
    far, near = (np.square(dense(found.params, x) - goal).mean() for found in merged)
    assert near < far / 2


def test_refit_skips_tied_and_computed_weights():
    def odd(params, x):
        x = jnp.tanh(x @ params["tied"])
        x = jnp.tanh(x @ params["tied"].T)
        x = jnp.tanh(x @ jnp.abs(params["positive"]))
        x = jnp.tanh(x @ (params["scaled"] * 2))
        return params["left"] @ x.T

    params = {
        name: RNG.normal(size=shape).astype(np.float32)
        for name, shape in {"tied": (4, 6), "positive": (4, 5), "scaled": (5, 5), "left": (3, 5)}.items()
    }
    x = RNG.normal(size=(20, 4)).astype(np.float32)
    assert [own.kernel.leaf for own in maps_of(odd, params, x)] == ["left"]


def test_refit_of_weights_left_of_product():
    def left(params, x):
        return jnp.einsum("ok,nk->no", params["w"], x) + params["b"][None]

    right = {"w": RNG.normal(size=(3, 5)).astype(np.float32), "b": RNG.normal(size=3).astype(np.float32)}
    wrong = jax.tree.map(np.zeros_like, right)
    x = RNG.normal(size=(40, 5)).astype(np.float32)
    spec = mcomb.derive_spec(left, right, x)
    assert_close(refit_maps(spec, (right, right), wrong, left, x, ridge=1e-7), right, roundings=2**10)


def test_refit_of_bfloat16_rounds_once():
    def single(params, x):
        return x @ params.astype(jnp.float32)

    rng = np.random.default_rng(5)
    right, wrong = (scale * rng.normal(size=(5, 30)) for scale in (1, 10))
    right, wrong = (weights.astype(jnp.bfloat16) for weights in (right, wrong))
    x = rng.normal(size=(40, 5)).astype(np.float32)
    spec = mcomb.derive_spec(single, right, x)
    found = refit_maps(spec, (right, right), wrong, single, x, ridge=1e-7)
    assert found.dtype == jnp.bfloat16
    assert_equal(found, right)


def test_refit_skips_bias_of_positions():
    def positioned(params, x):
        return x @ params["w"] + params["p"][None]

    params = {"w": RNG.normal(size=(4, 3)).astype(np.float32), "p": RNG.normal(size=(6, 3)).astype(np.float32)}
    assert maps_of(positioned, params, RNG.normal(size=(5, 6, 4)).astype(np.float32)) == []


def test_refit_places_follow_rearranged_entries():
    def arranged(params, x):
        return x @ params["w"].reshape(2, 3, 4).transpose(2, 0, 1).reshape(4, 6)[::-1]

    params = {"other": np.ones(300, np.float32), "w": RNG.normal(size=24).astype(np.float32)}
    x = np.ones((5, 4), np.float32)
    trace = list_intermediates(mcomb.derive_spec(arranged, params, x), arranged, params, x)
    (found,) = list_fittable(trace, params)
    places = find_places(trace, params, [found.map.weights.id])
    expected = np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1).reshape(4, 6)[::-1]
    assert_equal(places[found.map.weights.id].positions, expected)
    assert_equal(found.kernel.positions, expected)


def test_refit_rejects_misuse():
    scale = {"s": np.ones(3, np.float32)}
    x = np.ones((5, 3), np.float32)
    fn = lambda params, x: x * params["s"][None]  # noqa: E731
    with pytest.raises(UserError, match="has no linear map to refit"):
        merge(fn, (scale, scale), x, method="refit")
    with pytest.raises(UserError, match=r"ridge is 0\.0"):
        merge(apply, (A, A), X, method=mcomb.refit(ridge=0.0), spec=SPEC)


class Normed(nn.Module):
    """Five layers, each followed by a BatchNorm."""

    @nn.compact
    def __call__(self, x):
        for _ in range(5):
            x = nn.relu(nn.BatchNorm(use_running_average=True)(nn.Dense(12)(x)))
        self.sow("intermediates", "last", x)
        return nn.Dense(3, name="head")(x)


def test_refit_fits_maps_to_returned_statistics():
    run, x = Normed().apply, np.random.default_rng(4).normal(size=(500, 6)).astype(np.float32)
    shapes = jax.eval_shape(Normed().init, jax.random.key(0), x)
    shapes = {name: shapes[name] for name in ("params", "batch_stats")}
    a, b = (mcomb.estimate_statistics(run, random_arrays(shapes, seed), x) for seed in (1, 2))
    spec = mcomb.derive_spec(run, a, x)
    merged = merge(run, (a, b), x, method=mcomb.refit(ridge=1e-7), spec=spec).params
    assert_close(merged, mcomb.estimate_statistics(run, merged, x), roundings=2**10)
    outputs, seen = run(merged, x, mutable="intermediates")
    goal = (run(a, x) + run(b, x)) / 2
    into = np.c_[seen["intermediates"]["last"][0], np.ones(len(x))]
    best = into @ np.linalg.lstsq(into, goal)[0]
    # No head fits the outputs better, because this one sees the activations that it was fitted to.
    assert np.square(outputs - goal).sum() < 1.001 * np.square(best - goal).sum()
