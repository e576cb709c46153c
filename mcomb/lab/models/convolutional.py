"""The paper's two convolutional networks."""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
from jaxtyping import Float

from mcomb.lab.models.base import Model, numbered_layer
from mcomb.trees import Array


def layers_of(dtype: str) -> tuple[Callable[..., nn.Module], Callable[..., nn.Module]]:
    """Return constructors of a convolution without bias and of a norm, both computing in a dtype."""
    return partial(nn.Conv, use_bias=False, dtype=dtype), partial(nn.LayerNorm, dtype=dtype)


class Tiny10(Model):
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
        return Tiny10.depth if leaf.startswith("logits") else numbered_layer(leaf)

    @nn.compact
    def __call__(self, x: Float[Array, "n h w c"]) -> Float[Array, "n classes"]:
        """Return the logits of normalized images."""
        conv, norm = layers_of(self.dtype)
        for i, (channels, size, stride, padding) in enumerate(self.LAYERS, 1):
            x = conv(channels * self.width, (size, size), stride, padding, name=f"conv{i}")(x)
            x = nn.relu(norm(name=f"norm{i}")(x))
        return nn.Dense(self.classes, dtype=self.dtype, name="logits")(x.mean(axis=(1, 2)))


class ResidualBlock(nn.Module):
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


class ResNet20(Model):
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
                x = ResidualBlock(channels * self.width, stride, self.dtype, name=f"block{group}_{block}")(x)
        return nn.Dense(self.classes, dtype=self.dtype, name="logits")(x.mean(axis=(1, 2)))
