"""Statistics of units' activations."""

from jaxtyping import Bool, Float

from mcomb.trees import Array

ROUNDING = 1e-10  # a variance below this part of the mean square is a rounding error


def varies(mean: Float[Array, "..."], variance: Float[Array, "..."]) -> Bool[Array, "..."]:
    """Whether units vary at all, by their means and variances: a dead ReLU does not."""
    return variance > ROUNDING * (variance + mean**2)
