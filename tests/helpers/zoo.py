"""Small models of many architectures, each with its permutations counted by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mcomb import PermutationSpec, derive_spec

Shape = jax.ShapeDtypeStruct
IMAGES = Shape((2, 8, 8, 3), jnp.float32)
TOKENS = Shape((2, 5), jnp.int32)
FEATURES = Shape((2, 5, 8), jnp.float32)


@dataclass(frozen=True)
class Case:
    """A function, the shapes of its parameters and input, and the shapes of its permutations' index arrays."""

    fn: Callable[..., Any]
    params: Any
    input: Shape
    perm_shapes: list[tuple[int, ...]]


def linen(model: nn.Module, input: Shape, perm_shapes: list[tuple[int, ...]]) -> Case:
    variables = jax.eval_shape(model.init, jax.random.key(0), input)
    return Case(model.apply, variables, input, perm_shapes)


class Attention(nn.Module):
    heads: int
    causal: bool = False

    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2])) if self.causal else None
        return nn.MultiHeadDotProductAttention(num_heads=self.heads, qkv_features=6 * self.heads, name="attention")(
            x, mask=mask
        )


class TransformerBlock(nn.Module):
    heads: int = 2
    causal: bool = False

    @nn.compact
    def __call__(self, x):
        x = x + Attention(self.heads, self.causal, name="mix")(nn.LayerNorm(name="norm1")(x))
        inner = nn.gelu(nn.Dense(16, name="up")(nn.LayerNorm(name="norm2")(x)))
        return x + nn.Dense(x.shape[-1], name="down")(inner)


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(11, 8, name="embed")(tokens) + self.param("position", nn.initializers.normal(), (1, 5, 8))
        for i in range(2):
            x = TransformerBlock(name=f"block{i}")(x)
        return nn.Dense(3, name="head")(x.mean(axis=1))


class Decoder(nn.Module):
    """A decoder with fused query, key and value, a gated MLP, and embeddings tied to the output."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(11, 8, name="embed")
        x = embed(tokens)
        fused = nn.Dense(24, name="qkv")(nn.RMSNorm(name="norm1")(x))
        q, k, v = (part.reshape(*part.shape[:2], 2, 4) for part in jnp.split(fused, 3, axis=-1))
        mixed = nn.dot_product_attention(q, k, v, mask=nn.make_causal_mask(tokens))
        x = x + nn.Dense(8, name="out")(mixed.reshape(*mixed.shape[:2], 8))
        gate, up = jnp.split(nn.Dense(32, name="gate_up")(nn.RMSNorm(name="norm2")(x)), 2, axis=-1)
        x = x + nn.Dense(8, name="down")(nn.silu(gate) * up)
        return embed.attend(nn.RMSNorm(name="norm3")(x))


class FusedHeads(nn.Module):
    """Attention with fused query, key and value, sliced after a reshape and a transpose."""

    through_unit_axis: bool = False  # transpose like PyTorch's MultiheadAttention

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, name="stem")(x)
        fused = nn.Dense(24, name="qkv")(x).reshape(*x.shape[:2], 3, 2, 4)
        fused = fused[None].swapaxes(0, 3).squeeze(3) if self.through_unit_axis else fused.transpose(2, 0, 1, 3, 4)
        mixed = nn.dot_product_attention(fused[0], fused[1], fused[2])
        return nn.Dense(3, name="head")(x + nn.Dense(8, name="out")(mixed.reshape(x.shape)))


def norm(name: str) -> nn.Module:
    return nn.BatchNorm(use_running_average=True, name=name)


class ResNet(nn.Module):
    """A BatchNorm ResNet with basic blocks and a 1×1 projection where the width changes."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(norm("norm0")(nn.Conv(4, (3, 3), name="conv0")(x)))
        for i, (channels, stride) in enumerate(((4, 1), (6, 2))):
            y = nn.relu(norm(f"norm{i}a")(nn.Conv(channels, (3, 3), stride, name=f"conv{i}a")(x)))
            y = norm(f"norm{i}b")(nn.Conv(channels, (3, 3), name=f"conv{i}b")(y))
            if stride > 1:
                x = norm("normp")(nn.Conv(channels, (1, 1), stride, name="projection")(x))
            x = nn.relu(x + y)
        return nn.Dense(3, name="head")(x.mean(axis=(1, 2)))


class VGG(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i, channels in enumerate((4, 5)):
            x = nn.max_pool(nn.relu(nn.Conv(channels, (3, 3), name=f"conv{i}")(x)), (2, 2), (2, 2))
        x = nn.relu(nn.Dense(7, name="dense")(x.reshape(len(x), -1)))
        return nn.Dense(3, name="head")(x)


class DenseNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, (3, 3), name="stem")(x)
        for i in range(3):
            y = nn.Conv(3, (3, 3), name=f"conv{i}")(nn.relu(norm(f"norm{i}")(x)))
            x = jnp.concatenate([x, y], axis=-1)
        return nn.Dense(3, name="head")(nn.avg_pool(x, (8, 8)).reshape(len(x), -1))


class InvertedResidual(nn.Module):
    """An inverted residual block: expansion, depthwise convolution, squeeze-and-excitation, projection."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, (3, 3), name="stem")(x)
        y = nn.relu6(norm("norm1")(nn.Conv(12, (1, 1), name="expand")(x)))
        y = nn.relu6(norm("norm2")(nn.Conv(12, (3, 3), feature_group_count=12, name="depthwise")(y)))
        squeezed = nn.relu(nn.Dense(3, name="squeeze")(y.mean(axis=(1, 2))))
        y = y * nn.sigmoid(nn.Dense(12, name="excite")(squeezed))[:, None, None, :]
        x = x + norm("norm3")(nn.Conv(4, (1, 1), name="project")(y))
        return nn.Dense(3, name="head")(x.mean(axis=(1, 2)))


class Grouped(nn.Module):
    """A network with a grouped convolution and GroupNorm, in which groups move as units."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(8, (3, 3), name="stem")(x))
        x = nn.relu(nn.Conv(12, (3, 3), feature_group_count=4, name="grouped")(x))
        x = nn.relu(nn.GroupNorm(3, name="norm")(nn.Conv(12, (1, 1), name="mix")(x)))
        return nn.Dense(3, name="head")(x.mean(axis=(1, 2)))


class Mixer(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(6, (4, 4), (4, 4), name="patch")(x).reshape(len(x), 4, 6)
        for i in range(2):
            y = nn.LayerNorm(name=f"norm{i}a")(x).swapaxes(1, 2)
            x = x + nn.Dense(4, name=f"token{i}b")(nn.gelu(nn.Dense(5, name=f"token{i}a")(y))).swapaxes(1, 2)
            y = nn.LayerNorm(name=f"norm{i}b")(x)
            x = x + nn.Dense(6, name=f"channel{i}b")(nn.gelu(nn.Dense(7, name=f"channel{i}a")(y)))
        return nn.Dense(3, name="head")(x.mean(axis=1))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return TransformerBlock(name="block")(x), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, name="stem")(x)
        layers = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return nn.Dense(3, name="head")(layers(name="layers")(x, None)[0])


class Recurrent(nn.Module):
    cell: type[nn.RNNCellBase]

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="head")(nn.RNN(self.cell(6, parent=None), name="rnn")(x)[:, -1])


class NNXModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, use_running_average=True, rngs=rngs)
        self.drop = nnx.Dropout(0.5, deterministic=True, rngs=rngs)
        self.dense = nnx.Linear(4, 6, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 6, decode=False, rngs=rngs)
        self.head = nnx.Linear(6, 2, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x))).reshape(len(x), 64, 4)
        x = self.drop(self.dense(x))
        return self.head(x + self.attention(x))


def nnx_case() -> Case:
    graph, state = nnx.split(nnx.eval_shape(lambda: NNXModel(nnx.Rngs(0))))
    return Case(lambda state, x: nnx.merge(graph, state)(x), state, IMAGES, [(2,), (2, 3), (2, 3), (4,), (6,)])


class EquinoxModel(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.GroupNorm
    mlp: eqx.nn.MLP
    attention: eqx.nn.MultiheadAttention
    head: eqx.nn.Linear

    def __init__(self, key):
        self.conv = eqx.nn.Conv2d(3, 4, 3, key=key)
        self.norm = eqx.nn.GroupNorm(2, 4)
        self.mlp = eqx.nn.MLP(4, 6, 5, 2, key=key)
        self.attention = eqx.nn.MultiheadAttention(2, 6, key=key)
        self.head = eqx.nn.Linear(6, 2, key=key)

    def __call__(self, image):
        x = jax.nn.relu(self.norm(self.conv(image.transpose(2, 0, 1))))
        x = jax.vmap(self.mlp)(x.reshape(4, -1).T)
        return jax.vmap(self.head)(x + self.attention(x, x, x))


def equinox_case() -> Case:
    model = eqx.filter_eval_shape(EquinoxModel, jax.random.key(0))
    params, rest = eqx.partition(model, lambda leaf: isinstance(leaf, Shape))
    perm_shapes = [(2,), (2,), (2, 2), (2, 3), (2, 3), (5,), (5,), (6,)]
    return Case(lambda params, images: jax.vmap(eqx.combine(params, rest))(images), params, IMAGES, perm_shapes)


def tied_autoencoder(params, x):
    return jnp.tanh(x @ params["w"]) @ params["w"].T


def untied_over_positions(params, x):
    hidden = jax.nn.relu(jnp.einsum("bsc,sch->bsh", x, params["up"]))
    return jnp.einsum("bsh,sho->bso", hidden, params["down"])


def plain(fn: Callable[..., Any], perm_shapes: list[tuple[int, ...]], **shapes: tuple[int, ...]) -> Case:
    return Case(fn, {name: Shape(shape, jnp.float32) for name, shape in shapes.items()}, FEATURES, perm_shapes)


CASES: dict[str, Callable[[], Case]] = {
    "transformer encoder": lambda: linen(
        Encoder(), TOKENS, [(2,), (2,), (2, 6), (2, 6), (2, 6), (2, 6), (8,), (16,), (16,)]
    ),
    "decoder with tied embeddings": lambda: linen(Decoder(), TOKENS, [(2,), (2, 4), (2, 4), (8,), (16,)]),
    "query, key and value in one": lambda: linen(FusedHeads(), FEATURES, [(2,), (2, 4), (2, 4), (8,)]),
    "query, key and value through a unit axis": lambda: linen(
        FusedHeads(through_unit_axis=True), FEATURES, [(2,), (2, 4), (2, 4), (8,)]
    ),
    "BatchNorm ResNet": lambda: linen(ResNet(), IMAGES, [(4,), (4,), (6,), (6,)]),
    "VGG": lambda: linen(VGG(), IMAGES, [(4,), (5,), (7,)]),
    "DenseNet": lambda: linen(DenseNet(), IMAGES, [(3,), (3,), (3,), (4,)]),
    "inverted residual": lambda: linen(InvertedResidual(), IMAGES, [(3,), (4,), (12,)]),
    "grouped convolution": lambda: linen(Grouped(), IMAGES, [(3,), (3, 4), (4,), (4, 2), (4, 3)]),
    "mixer": lambda: linen(Mixer(), IMAGES, [(5,), (5,), (6,), (7,), (7,)]),
    "scanned transformer": lambda: linen(Scanned(), FEATURES, [(3, 2), (3, 2, 6), (3, 2, 6), (3, 16), (8,)]),
    "simple recurrent cell": lambda: linen(Recurrent(nn.SimpleCell), FEATURES, [(6,)]),
    "LSTM": lambda: linen(Recurrent(nn.OptimizedLSTMCell), FEATURES, [(6,)]),
    "GRU": lambda: linen(Recurrent(nn.GRUCell), FEATURES, [(6,)]),
    "NNX": nnx_case,
    "Equinox": equinox_case,
    "tied autoencoder": lambda: plain(tied_autoencoder, [(4,)], w=(8, 4)),
    "untied over positions": lambda: plain(untied_over_positions, [(5, 4)], up=(5, 8, 4), down=(5, 4, 2)),
}


def random_arrays(shapes: Any, seed: int = 0) -> Any:
    """Return random arrays of the given shapes; no parameter is zero, all variances are positive."""
    rng = np.random.default_rng(seed)

    def random_array(path: Any, leaf: Shape) -> Any:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return rng.integers(0, 5, leaf.shape).astype(leaf.dtype)
        values = rng.standard_normal(leaf.shape)
        return (np.abs(values) + 0.5 if "var" in jax.tree_util.keystr(path) else values).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(random_array, shapes)


def spec_of(model: nn.Module, params: Any, images: Any) -> PermutationSpec:
    """Derive the spec of a Linen model."""
    return derive_spec(lambda params, images: model.apply({"params": params}, images), params, images)
