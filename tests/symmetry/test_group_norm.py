"""Group norms after a concatenation, as in every diffusion U-Net: the channels of each group and part may move."""

import math

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import Shape, random_arrays

from mcomb import derive_spec

GROUPS = 32
IMAGES = Shape((2, 4, 4, 3), jnp.float32)


class FlaxNorm(nn.Module):
    """Computes the statistics of groups and normalises channels."""

    @nn.compact
    def __call__(self, x):
        return nn.GroupNorm(GROUPS)(x)


class GroupedNorm(nn.Module):
    """Normalises groups of channels, and scales channels, as Haiku and Keras do."""

    @nn.compact
    def __call__(self, x):
        groups = x.reshape(*x.shape[:3], GROUPS, -1)
        axes = (1, 2, 4)
        groups = (groups - groups.mean(axes, keepdims=True)) * jax.lax.rsqrt(groups.var(axes, keepdims=True) + 1e-5)
        return groups.reshape(x.shape) * self.param("scale", nn.initializers.ones, (1, 1, 1, x.shape[-1]))


class EquinoxNorm(nn.Module):
    """Normalises each image, channels first."""

    @nn.compact
    def __call__(self, x):
        channels = x.shape[-1]
        weight, bias = (self.param(name, nn.initializers.ones, (channels,)) for name in ("weight", "bias"))
        norm = eqx.nn.GroupNorm(GROUPS, channels)
        norm = eqx.tree_at(lambda norm: (norm.weight, norm.bias), norm, (weight, bias))
        return jax.vmap(lambda image: norm(image.transpose(2, 0, 1)).transpose(1, 2, 0))(x)


class UpBlock(nn.Module):
    """The start of a decoder's block: the skip connection is concatenated, normalised, and convolved."""

    channels: int
    skipped: int
    norm: type[nn.Module] = FlaxNorm

    @nn.compact
    def __call__(self, x):
        parts = [nn.Conv(self.channels, (3, 3), name="up")(x), nn.Conv(self.skipped, (1, 1), name="skip")(x)]
        return nn.Conv(2, (1, 1), name="out")(nn.silu(self.norm(name="norm")(jnp.concatenate(parts, -1))))


def free_cells(channels: int, skipped: int) -> list[tuple[int, ...]]:
    """Return the shapes that a person counts: whole groups, their channels, and those of the group of both parts."""
    size = (channels + skipped) // GROUPS
    whole = [(channels // size,), (channels // size, size), (skipped // size,), (skipped // size, size)]
    return sorted([*whole, *((rest % size,) for rest in (channels, skipped) if rest % size)])


@pytest.mark.parametrize("norm", [FlaxNorm, GroupedNorm, EquinoxNorm])
@pytest.mark.parametrize(
    ("channels", "skipped", "exponent"),
    [(64, 64, 71), (128, 64, 117), pytest.param(1280, 640, 2632, marks=pytest.mark.slow)],
)
def test_group_norm_after_concatenation_frees_cells(norm, channels, skipped, exponent):
    with jax.numpy_rank_promotion("allow"):
        model = UpBlock(channels, skipped, norm)
        shapes = jax.eval_shape(model.init, jax.random.key(0), IMAGES)
        spec = derive_spec(model.apply, shapes, IMAGES)
        assert sorted(map(spec.shape, spec.sizes)) == free_cells(channels, skipped), str(spec)
        assert round(spec.log10_arrangements()) == exponent
        assert f"10^{exponent}" in str(spec)
        with jax.enable_x64(True):
            params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), random_arrays(shapes))
            images = np.asarray(random_arrays(IMAGES), np.float64)
            before = model.apply(params, images)
            permuted = spec.apply(spec.random(jax.random.key(1)), params)
            after = model.apply(permuted, images)
    assert before.dtype == jnp.float64
    assert not np.array_equal(permuted["params"]["up"]["kernel"], params["params"]["up"]["kernel"])
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-12 * np.abs(before).max())


def test_group_norm_of_several_parts_frees_cells():
    """Parts of 5, 2 and 5 channels in groups of 6: both groups hold channels of two parts."""

    def fn(params, x):
        h = jnp.concatenate([x @ params[name] for name in "abc"], -1).reshape(-1, 2, 6)
        h = h - h.mean(-1, keepdims=True)
        return jnp.tanh(h.reshape(-1, 12)) @ params["out"]

    params = {name: Shape((3, size), jnp.float32) for name, size in zip("abc", (5, 2, 5), strict=True)}
    params["out"] = Shape((12, 2), jnp.float32)
    spec = derive_spec(fn, params, Shape((4, 3), jnp.float32))
    assert sorted(map(spec.shape, spec.sizes)) == [(5,), (5,)]


@pytest.mark.parametrize("whole", [True, False])
def test_group_norm_groups_with_shared_weights_share_order(whole):
    """Each group is multiplied by the same weights, so that no group may have an order of its own."""

    def fn(params, x):
        h = jnp.concatenate([x @ params["a"], x @ params["b"]], -1).reshape(-1, 3, 4)
        return jnp.tanh(jnp.einsum("ngi,i->ng", h, params["shared"])) @ params["out"]

    first = 8 if whole else 6
    shapes = {"a": (3, first), "b": (3, 12 - first), "shared": (4,), "out": (3, 2)}
    params = {name: Shape(shape, jnp.float32) for name, shape in shapes.items()}
    spec = derive_spec(fn, params, Shape((4, 3), jnp.float32))
    assert sorted(map(spec.shape, spec.sizes)) == ([(2,), (4,)] if whole else [(2,), (2,)])


def test_group_norm_arrangements_count_batch_axes():
    params = {"w": Shape((3, 2, 4), jnp.float32), "v": Shape((2, 4), jnp.float32)}
    spec = derive_spec(
        lambda p, x: (jnp.einsum("ni,ihd->nhd", x, p["w"]) * p["v"][None]).max(-1).sum(-1),
        params,
        Shape((5, 3), jnp.float32),
    )
    assert sorted(map(spec.shape, spec.sizes)) == [(2,), (2, 4)]
    assert spec.log10_arrangements() == pytest.approx(math.log10(2 * 24**2))
    assert "1,152" in str(spec)


def test_group_norm_groups_that_meet_a_part_share_order():
    """Attention to neighbouring blocks concatenates blocks and multiplies the result with each of them (BigBird)."""

    def fn(params, x):
        a, b = x @ params["a"], x @ params["b"]
        both = jnp.concatenate([a, b], -1).reshape(-1, 2, 6)
        return jnp.tanh(jnp.einsum("ngi,ni->ng", both, a)) @ params["out"]

    params = {"a": Shape((3, 6), jnp.float32), "b": Shape((3, 6), jnp.float32), "out": Shape((2, 2), jnp.float32)}
    spec = derive_spec(fn, params, Shape((4, 3), jnp.float32))
    assert sorted(map(spec.shape, spec.sizes)) == [(6,)]


def test_group_norm_square_cut_into_segments_is_frozen():
    """Rows and columns of a symmetric matrix are one axis, which cannot have cells of its own groups."""

    def fn(params, x):
        pairs = (params["w"] + params["w"].T).reshape(9)
        return (pairs * jnp.concatenate([jnp.tanh(params["a"]), params["b"]])).sum() * x

    shapes = {"w": (3, 3), "a": (4,), "b": (5,)}
    params = {name: Shape(shape, jnp.float32) for name, shape in shapes.items()}
    assert not derive_spec(fn, params, Shape((2,), jnp.float32)).sizes


def test_group_norm_parts_may_be_concatenated_again():
    """A dense block of group norms: cells keep their freedom inside of another concatenation."""

    def fn(params, x):
        h = jnp.concatenate([x @ params["a"], x @ params["b"]], -1)
        groups = h.reshape(-1, 2, 6)
        normed = jnp.tanh((groups - groups.mean(-1, keepdims=True)).reshape(-1, 12))
        return jnp.concatenate([normed, x @ params["c"]], -1) @ params["out"]

    shapes = {"a": (3, 8), "b": (3, 4), "c": (3, 5), "out": (17, 2)}
    params = {name: Shape(shape, jnp.float32) for name, shape in shapes.items()}
    x = Shape((4, 3), jnp.float32)
    spec = derive_spec(fn, params, x)
    assert sorted(map(spec.shape, spec.sizes)) == [(2,), (4,), (5,), (6,)]
    spec.check(fn, random_arrays(params), random_arrays(x))
