"""Average networks."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mcomb.errors import UserError
from mcomb.evaluation.batch_statistics import estimate_statistics
from mcomb.trees import (
    Apply,
    Inputs,
    Params,
    at_least_float32,
    is_inexact,
    require_alike,
    require_finite,
)


def weighted_sum(leaves: Sequence[Any], weights: Sequence[Any]) -> Any:
    """Return the weighted sum of a leaf over networks, or the first network's leaf if it is not a float."""
    if not is_inexact(leaves[0]):
        return leaves[0]
    total = sum(weight * at_least_float32(leaf) for weight, leaf in zip(weights, leaves, strict=True))
    return jnp.asarray(total, jnp.result_type(leaves[0]))


def require_networks(networks: Sequence[Params]) -> None:
    """Raise an error unless there are two or more finite networks with the same names and shapes."""
    count = len(networks) if isinstance(networks, Sequence) else 1
    if count < 2:
        raise UserError(f"Cannot merge fewer than two networks (got {count}): pass a tuple of parameter trees.")
    for i, network in enumerate(networks):
        require_alike("The networks to merge", networks[0], network, ("network 0", f"network {i}"))
        require_finite(f"network {i}", network)


def average_networks(apply: Apply, networks: Sequence[Params], inputs: Inputs) -> Params:
    """Return the mean of all weights, with running statistics re-estimated on the inputs."""
    here = jax.device_get(tuple(networks))  # they may be on different devices
    mean = jax.tree.map(lambda *leaves: weighted_sum(leaves, [1 / len(leaves)] * len(leaves)), *here)
    return estimate_statistics(apply, mean, inputs)
