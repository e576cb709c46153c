"""The paper's two networks and the embedded one. Every submodule has an explicit name; all return logits.

Parameters are float32. With the dtype bfloat16, products, activations and what leaves a norm are bfloat16; the
statistics of norms stay float32, as Flax has them, and logits become float32 again.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import ClassVar, cast

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Float

from mcomb.trees import Apply, Array, Params


class Classifier(nn.Module):
    """A network whose layers are in an order; the first has 16·width units."""

    width: int
    classes: int
    dtype: str = "float32"  # what is computed in
    depth: ClassVar[int]  # how many layers

    @staticmethod
    def layer_of(leaf: str) -> int:
        """The layer that a leaf belongs to, from 1."""
        raise NotImplementedError


def _numbered_layer(leaf: str) -> int:
    """The number in a leaf's first name."""
    return int("".join(filter(str.isdigit, leaf.partition("/")[0])))


def layers_of(dtype: str) -> tuple[Callable[..., nn.Module], Callable[..., nn.Module]]:
    """The convolution, without a bias, and the norm that compute in a dtype."""
    return partial(nn.Conv, use_bias=False, dtype=dtype), partial(nn.LayerNorm, dtype=dtype)


class MLP(Classifier):
    """Three hidden layers of 16·width units."""

    depth = 4

    @staticmethod
    def layer_of(leaf: str) -> int:
        """The layer a leaf belongs to, from 1: the hidden layers, then the logits."""
        return MLP.depth if leaf.startswith("logits") else _numbered_layer(leaf)

    @nn.compact
    def __call__(self, x: Float[Array, "n h w c"]) -> Float[Array, "n classes"]:
        x = x.reshape(len(x), -1)
        for i in (1, 2, 3):
            x = nn.relu(nn.Dense(16 * self.width, dtype=self.dtype, name=f"dense{i}")(x))
        return nn.Dense(self.classes, dtype=self.dtype, name="logits")(x)


class Tiny10(Classifier):
    """Eight conv–LayerNorm–ReLU layers, global average pooling, a dense layer (Kornblith et al. 2019)."""

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
        """The layer a leaf belongs to, from 1: the convolutions, each with its norm, then the logits."""
        return Tiny10.depth if leaf.startswith("logits") else _numbered_layer(leaf)

    @nn.compact
    def __call__(self, x: Float[Array, "n h w c"]) -> Float[Array, "n classes"]:
        conv, norm = layers_of(self.dtype)
        for i, (channels, size, stride, padding) in enumerate(self.LAYERS, 1):
            x = conv(channels * self.width, (size, size), stride, padding, name=f"conv{i}")(x)
            x = nn.relu(norm(name=f"norm{i}")(x))
        return nn.Dense(self.classes, dtype=self.dtype, name="logits")(x.mean(axis=(1, 2)))


class Block(nn.Module):
    """conv–norm–relu–conv–norm plus the shortcut, which is a strided conv and a norm where the shape changes."""

    channels: int
    stride: int
    dtype: str

    @nn.compact
    def __call__(self, x: Float[Array, "n h w c"]) -> Float[Array, "n h2 w2 c2"]:
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
    """He et al.'s CIFAR ResNet of depth 20 with LayerNorm over channels in place of BatchNorm."""

    depth = 20

    @staticmethod
    def layer_of(leaf: str) -> int:
        """The layer a leaf belongs to, from 1: the stem, two for each block, the logits.

        A norm goes with its convolution, a shortcut with the second layer of its block, whose output it joins.
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
        conv, norm = layers_of(self.dtype)
        x = conv(16 * self.width, (3, 3), name="conv0")(x)
        x = nn.relu(norm(name="norm0")(x))
        for group, channels in enumerate((16, 32, 64), 1):
            for block in (1, 2, 3):
                stride = 2 if group > 1 and block == 1 else 1
                x = Block(channels * self.width, stride, self.dtype, name=f"block{group}_{block}")(x)
        return nn.Dense(self.classes, dtype=self.dtype, name="logits")(x.mean(axis=(1, 2)))


@cache  # the same function for the same model, so that what is compiled for it serves every experiment
def classifier(model: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]) -> Apply:
    """The function from parameters and raw pixels to logits."""
    per_channel = lambda values: jnp.array(values, jnp.float32).reshape(1, 1, 1, -1)  # noqa: E731

    def apply(params: Params, images: Array) -> Array:
        pixels = (images.astype(jnp.float32) - per_channel(mean)) / per_channel(std)
        return cast(Array, model.apply({"params": params}, pixels)).astype(jnp.float32)

    return apply
