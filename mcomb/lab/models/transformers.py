"""Transformers: a decoder for text and a vision transformer, with options for every part that changes symmetries."""

from typing import ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Integer

from mcomb.lab.models.base import Model, numbered_layer
from mcomb.trees import Array

HEAD = 32  # dimensions of a head
MLP_RATIO = 4  # units of a feed-forward layer for each dimension
LONGEST_WAVE = 10_000.0  # of rotary positions


class Transformer(Model):
    """Base class of pre-norm transformers with 16·width dimensions and one head for each 32 of them.

    Attributes:
        norm: LayerNorm with gain and bias, or RMSNorm with gain.
        positions: Learned vectors added to the embeddings, or rotations of queries and keys.
        gated: Whether the feed-forward layers are gated (SwiGLU) instead of plain (GELU).
        bias: Whether linear maps have biases.
    """

    norm: Literal["layer", "rms"] = "layer"
    positions: Literal["learned", "rotary"] = "learned"
    gated: bool = False
    bias: bool = True
    layers: ClassVar[int] = 3
    depth = layers + 2  # the embedding, the blocks, and the logits with their norm
    variants = {  # noqa: RUF012 (Flax would take an annotated name for a field)
        "layernorm": ("norm", "layer"),
        "rmsnorm": ("norm", "rms"),
        "rotary": ("positions", "rotary"),
        "gated": ("gated", True),
    }

    @staticmethod
    def layer_of(leaf: str) -> int:
        """Return the layer of a leaf, counted from 1: the embedding, the blocks, then the logits with their norm."""
        if leaf.startswith("block"):
            return 1 + numbered_layer(leaf)
        return Transformer.depth if leaf.startswith(("norm", "logits")) else 1

    def embed_positions(self, x: Float[Array, "n t d"]) -> Float[Array, "n t d"]:
        """Add learned positions, if the model has them."""
        if self.positions == "rotary":
            return x
        return x + self.param("positions", nn.initializers.normal(0.02), x.shape[1:]).astype(x.dtype)[None]

    def run_blocks(self, x: Float[Array, "n t d"], causal: bool) -> Float[Array, "n t d"]:
        """Return the normalized output of all blocks."""
        rotary = self.positions == "rotary"
        for i in range(1, self.layers + 1):
            x = TransformerBlock(self.norm, rotary, self.gated, self.bias, causal, self.dtype, name=f"block{i}")(x)
        return make_norm(self.norm, self.dtype, "norm")(x)


class Decoder(Transformer):
    """Decoder that predicts the next token at every position.

    Attributes:
        tied: Whether the output matrix is the transposed embedding.
    """

    norm: Literal["layer", "rms"] = "rms"
    bias: bool = False
    tied: bool = False
    variants = Transformer.variants | {"tied": ("tied", True)}

    @nn.compact
    def __call__(self, tokens: Integer[Array, "n t"]) -> Float[Array, "n t classes"]:
        """Return the logits of the token after each position."""
        embed = nn.Embed(self.classes, 16 * self.width, dtype=self.dtype, name="embedding")
        x = self.run_blocks(self.embed_positions(embed(tokens)), causal=True)
        if self.tied:
            return embed.attend(x)
        return nn.Dense(self.classes, use_bias=self.bias, dtype=self.dtype, name="logits")(x)


class ViT(Transformer):
    """Vision transformer with a class token (Dosovitskiy et al. 2021).

    Attributes:
        patch: The height and width of a patch.
    """

    patch: int = 2

    @nn.compact
    def __call__(self, images: Float[Array, "n h w c"]) -> Float[Array, "n classes"]:
        """Return the logits of normalized images."""
        n, height, width, channels = images.shape
        rows, columns, size = height // self.patch, width // self.patch, 16 * self.width
        patches = images.reshape(n, rows, self.patch, columns, self.patch, channels).swapaxes(2, 3)
        x = nn.Dense(size, dtype=self.dtype, name="patches")(patches.reshape(n, rows * columns, -1))
        first = self.param("class_token", nn.initializers.normal(0.02), (size,)).astype(x.dtype)
        x = jnp.concatenate([jnp.tile(first.reshape(1, 1, size), (n, 1, 1)), x], axis=1)
        x = self.run_blocks(self.embed_positions(x), causal=False)
        return nn.Dense(self.classes, dtype=self.dtype, name="logits")(x[:, 0])


class TransformerBlock(nn.Module):
    """Pre-norm transformer block: attention and a feed-forward layer, each added to its input."""

    norm: str
    rotary: bool
    gated: bool
    bias: bool
    causal: bool
    dtype: str

    @nn.compact
    def __call__(self, x: Float[Array, "n t d"]) -> Float[Array, "n t d"]:
        """Return the block's output."""
        normalized = make_norm(self.norm, self.dtype, "norm1")(x)
        x = x + Attention(self.rotary, self.bias, self.causal, self.dtype, name="attention")(normalized)
        y, size = make_norm(self.norm, self.dtype, "norm2")(x), MLP_RATIO * x.shape[-1]
        dense = lambda size, name: nn.Dense(size, use_bias=self.bias, dtype=self.dtype, name=name)  # noqa: E731
        y = nn.silu(dense(size, "gate")(y)) * dense(size, "up")(y) if self.gated else nn.gelu(dense(size, "up")(y))
        return x + dense(x.shape[-1], "down")(y)


class Attention(nn.Module):
    """Multi-head attention with one head for each 32 dimensions, and at least one head."""

    rotary: bool
    bias: bool
    causal: bool
    dtype: str

    @nn.compact
    def __call__(self, x: Float[Array, "n t d"]) -> Float[Array, "n t d"]:
        """Return the attention's output."""
        length, size = x.shape[-2:]
        heads = max(1, size // HEAD)
        project = lambda name: nn.DenseGeneral(  # noqa: E731
            (heads, size // heads), use_bias=self.bias, dtype=self.dtype, name=name
        )
        query, key, value = (project(name)(x) for name in ("query", "key", "value"))
        if self.rotary:
            query, key = rotate(query), rotate(key)
        scores = jnp.einsum("nqhd,nkhd->nhqk", query, key).astype(jnp.float32) / jnp.sqrt(size / heads)
        if self.causal:
            scores = jnp.where(jnp.tril(jnp.ones((1, 1, length, length), bool)), scores, -jnp.inf)
        mixed = jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(scores).astype(value.dtype), value)
        return nn.DenseGeneral(size, axis=(-2, -1), use_bias=self.bias, dtype=self.dtype, name="out")(mixed)


def rotate(x: Float[Array, "n t h d"]) -> Float[Array, "n t h d"]:
    """Rotate pairs of dimensions by angles proportional to the position (rotary embeddings, Su et al. 2021)."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] / LONGEST_WAVE ** (np.arange(half) / half)
    sin, cos = (jnp.asarray(f(angles), x.dtype)[None, :, None] for f in (np.sin, np.cos))
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def make_norm(kind: str, dtype: str, name: str) -> nn.Module:
    """Return a LayerNorm or an RMSNorm over dimensions."""
    return (nn.LayerNorm if kind == "layer" else nn.RMSNorm)(dtype=dtype, name=name)
