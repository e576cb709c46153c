"""An MLP."""

import flax.linen as nn
from jaxtyping import Float

from mcomb.lab.models.base import Model, numbered_layer
from mcomb.trees import Array


class MLP(Model):
    """MLP with three hidden layers of 16·width units."""

    depth = 4

    @staticmethod
    def layer_of(leaf: str) -> int:
        """Return the layer of a leaf, counted from 1: the hidden layers, then the logits."""
        return MLP.depth if leaf.startswith("logits") else numbered_layer(leaf)

    @nn.compact
    def __call__(self, x: Float[Array, "n h w c"]) -> Float[Array, "n classes"]:
        """Return the logits of normalized images."""
        x = x.reshape(len(x), -1)
        for i in (1, 2, 3):
            x = nn.relu(nn.Dense(16 * self.width, dtype=self.dtype, name=f"dense{i}")(x))
        return nn.Dense(self.classes, dtype=self.dtype, name="logits")(x)
