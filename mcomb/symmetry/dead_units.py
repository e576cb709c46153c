"""Detect dead units, whose activations are constant."""

from jaxtyping import Bool, Float

from mcomb.trees import Array

ROUNDING = 1e-10  # a variance below this fraction of the mean square is a rounding error


def varies(mean: Float[Array, "..."], variance: Float[Array, "..."]) -> Bool[Array, "..."]:
    """Return whether each unit varies over the data; a dead ReLU does not."""
    return variance > ROUNDING * (variance + mean**2)
