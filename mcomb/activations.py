"""The activations of a network's units: where they are, and how those of two networks correlate."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from mcomb.base import Array, Params
from mcomb.evaluate import BATCH
from mcomb.models import Classifier
from mcomb.permute import PermutationSpec


def modules_of(model: Classifier, spec: PermutationSpec) -> dict[str, str]:
    """For each permutation the last module, in the order of layers, whose output has its units on the last axis."""
    found = {}
    for perm in spec.sizes:
        biases = [leaf for leaf, _ in spec.places(perm) if leaf.endswith("/bias")]
        module = max(biases, key=lambda leaf: (model.layer_of(leaf), leaf)).removesuffix("/bias")
        # What flows along a residual stream is the block's output, after the sum.
        found[perm] = module.partition("/")[0] if module.endswith(("norm2", "shortcut_norm")) else module
    return found


def correlations(
    model: Classifier, a: Params, b: Params, pixels: Float[Array, "n h w c"], modules: dict[str, str]
) -> dict[str, Float[np.ndarray, "_"]]:
    """Pearson's correlation of each unit of A with the same unit of B, over all images and positions.

    Pixels are normalised already; the images beyond the last whole batch are left out.
    """
    size = min(BATCH, len(pixels))
    batches = jnp.asarray(pixels)[: len(pixels) // size * size].reshape(-1, size, *pixels.shape[1:])
    sums = jax.device_get(_sums(model, tuple(modules.items()), a, b, batches))
    found = {}
    for name, (x, y, xx, yy, xy) in sums.items():
        var_x, var_y = xx - x * x, yy - y * y
        alive = (var_x > 1e-6 * xx) & (var_y > 1e-6 * yy)  # a unit that never changes correlates with nothing
        found[name] = np.where(alive, (xy - x * y) / np.sqrt(np.where(alive, var_x * var_y, 1.0)), 0.0)
    return found


@partial(jax.jit, static_argnums=(0, 1))
def _sums(model: Classifier, modules: tuple[tuple[str, str], ...], a: Params, b: Params, batches: Array) -> Any:
    """The means of x, y, x², y² and xy for each unit, one batch at a time."""

    def activations(params: Params, x: Array) -> dict[str, Array]:
        _, state = model.apply({"params": params}, x, capture_intermediates=True, mutable=["intermediates"])
        found: dict[str, Array] = {}
        for perm, path in modules:
            node: Any = state["intermediates"]
            for part in path.split("/"):
                node = node[part]
            output = nn.relu(node["__call__"][0])
            found[perm] = output.reshape(-1, output.shape[-1])
        return found

    def moments(x: Array, y: Array) -> tuple[Array, ...]:
        return tuple(values.mean(0) for values in (x, y, x * x, y * y, x * y))

    def one(pixels: Array) -> Any:
        return jax.tree.map(moments, activations(a, pixels), activations(b, pixels))

    return jax.tree.map(lambda values: values.mean(0), jax.lax.map(one, batches))
