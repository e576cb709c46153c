"""The paper's two networks and an MLP. Every submodule has an explicit name, and every model returns logits.

Parameters are float32. With the dtype bfloat16, products, activations and outputs of norms are bfloat16. Flax computes
the statistics of norms in float32, and `classifier` converts logits to float32.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import ClassVar, cast

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Float

from mcomb.trees import Apply, Array, Params


class Classifier(nn.Module):
    """Base class of networks with ordered layers; the first layer has 16·width units."""

    width: int
    classes: int
    dtype: str = "float32"  # of computations
    depth: ClassVar[int]  # number of layers

    @staticmethod
    def layer_of(leaf: str) -> int:
        """Return the layer of a leaf, counted from 1."""
        raise NotImplementedError


def _numbered_layer(leaf: str) -> int:
    """Return the number in the first component of a leaf's name."""
    return int("".join(filter(str.isdigit, leaf.partition("/")[0])))


def layers_of(dtype: str) -> tuple[Callable[..., nn.Module], Callable[..., nn.Module]]:
    """Return constructors of a convolution without bias and of a norm, both computing in a dtype."""
    return partial(nn.Conv, use_bias=False, dtype=dtype), partial(nn.LayerNorm, dtype=dtype)


class MLP(Classifier):
    """MLP with three hidden layers of 16·width units."""

    depth = 4

    @staticmethod
    def layer_of(leaf: str) -> int:
        """Return the layer of a leaf, counted from 1: the hidden layers, then the logits."""
        return MLP.depth if leaf.startswith("logits") else _numbered_layer(leaf)

    @nn.compact
    def __call__(self, x: Float[Array, "n h w c"]) -> Float[Array, "n classes"]:
        """Return the logits of normalized images."""
        x = x.reshape(len(x), -1)
        for i in (1, 2, 3):
            x = nn.relu(nn.Dense(16 * self.width, dtype=self.dtype, name=f"dense{i}")(x))
        return nn.Dense(self.classes, dtype=self.dtype, name="logits")(x)


class Tiny10(Classifier):
    """Eight conv–LayerNorm–ReLU layers, global average pooling and a dense layer (Kornblith et al. 2019)."""

    # channels, kernel size, stride, padding of each layer
    LAYERS = (
        (16, 3, 1, "SAME"),
        (16, 3, 1, "SAME"),
        (32, 3, 2, "SAME"),
        (32, 3, 1, "SAME"),
        (32, 3, 1, "SAME"),
        (64, 3, 2, "SAME"),
        (64, 3, 1, "VALID"),
        (64, 1, 1, "SAME"),
    )
    depth = 9

    @staticmethod
    def layer_of(leaf: str) -> int:
        """Return the layer of a leaf, counted from 1: the convolutions with their norms, then the logits."""
        return Tiny10.depth if leaf.startswith("logits") else _numbered_layer(leaf)

    @nn.compact
    def __call__(self, x: Float[Array, "n h w c"]) -> Float[Array, "n classes"]:
        """Return the logits of normalized images."""
        conv, norm = layers_of(self.dtype)
        for i, (channels, size, stride, padding) in enumerate(self.LAYERS, 1):
            x = conv(channels * self.width, (size, size), stride, padding, name=f"conv{i}")(x)
            x = nn.relu(norm(name=f"norm{i}")(x))
        return nn.Dense(self.classes, dtype=self.dtype, name="logits")(x.mean(axis=(1, 2)))


class Block(nn.Module):
    """Residual block: conv–norm–ReLU–conv–norm plus a shortcut, with a strided conv and a norm if shapes differ."""

    channels: int
    stride: int
    dtype: str

    @nn.compact
    def __call__(self, x: Float[Array, "n h w c"]) -> Float[Array, "n h2 w2 c2"]:
        """Return the block's output for a batch of feature maps."""
        conv, norm = layers_of(self.dtype)
        y = conv(self.channels, (3, 3), self.stride, name="conv1")(x)
        y = nn.relu(norm(name="norm1")(y))
        y = conv(self.channels, (3, 3), name="conv2")(y)
        y = norm(name="norm2")(y)
        if self.stride > 1:
            x = conv(self.channels, (3, 3), self.stride, name="shortcut_conv")(x)
            x = norm(name="shortcut_norm")(x)
        return nn.relu(x + y)


class ResNet20(Classifier):
    """He et al.'s ResNet-20 for CIFAR, with LayerNorm over channels instead of BatchNorm."""

    depth = 20

    @staticmethod
    def layer_of(leaf: str) -> int:
        """Return the layer of a leaf, counted from 1: the stem, two layers for each block, then the logits.

        A norm belongs to the layer of its convolution. A shortcut belongs to the second layer of its block, because
        their outputs are added.
        """
        if leaf.startswith("logits"):
            return ResNet20.depth
        if not leaf.startswith("block"):
            return 1
        block, _, part = leaf.partition("/")
        group, number = map(int, block.removeprefix("block").split("_"))
        return 6 * (group - 1) + 2 * number + (0 if part.startswith(("conv1", "norm1")) else 1)

    @nn.compact
    def __call__(self, x: Float[Array, "n h w c"]) -> Float[Array, "n classes"]:
        """Return the logits of normalized images."""
        conv, norm = layers_of(self.dtype)
        x = conv(16 * self.width, (3, 3), name="conv0")(x)
        x = nn.relu(norm(name="norm0")(x))
        for group, channels in enumerate((16, 32, 64), 1):
            for block in (1, 2, 3):
                stride = 2 if group > 1 and block == 1 else 1
                x = Block(channels * self.width, stride, self.dtype, name=f"block{group}_{block}")(x)
        return nn.Dense(self.classes, dtype=self.dtype, name="logits")(x.mean(axis=(1, 2)))


@cache  # equal models share one function, so that all experiments reuse its compiled code
def classifier(model: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]) -> Apply:
    """Return the function from parameters and raw pixels to logits."""
    per_channel = lambda values: jnp.array(values, jnp.float32).reshape(1, 1, 1, -1)  # noqa: E731

    def apply(params: Params, images: Array) -> Array:
        pixels = (images.astype(jnp.float32) - per_channel(mean)) / per_channel(std)
        return cast(Array, model.apply({"params": params}, pixels)).astype(jnp.float32)

    return apply
