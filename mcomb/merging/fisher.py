"""Average networks weighted by their diagonal Fisher information."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mcomb.evaluation.batch_statistics import estimate_statistics
from mcomb.evaluation.objectives import Objective, add_up, check_data, cross_entropy
from mcomb.merging.average import weighted_sum
from mcomb.runtime.devices import AXIS, device_mesh, on_each_device, replicate, share_out
from mcomb.trees import (
    Apply,
    Array,
    Inputs,
    Labels,
    Params,
    at_least_float32,
    count_examples,
    is_inexact,
    map_examples,
    require_finite_result,
)

TOGETHER = 8  # examples whose gradients are computed at once; each gradient is as large as the network


def fisher_average(
    apply: Apply,
    networks: Sequence[Params],
    inputs: Inputs,
    labels: Labels,
    *,
    loss: Objective = cross_entropy,
) -> Params:
    """Return the average of the networks, with each weight weighted by its Fisher information."""
    check_data(apply, networks[0], inputs, labels, loss)
    here = jax.device_get(tuple(networks))  # they may be on different devices
    informations = [fisher_information(apply, network, inputs, labels, loss=loss) for network in networks]
    require_finite_result("Gradients of the loss", informations, inputs, *networks)

    def weigh(*both: Any) -> Any:
        leaves, weights = both[: len(networks)], both[len(networks) :]
        total = sum(weights)
        least = jnp.finfo(jnp.result_type(total)).tiny  # where no loss depends on a weight, take the plain mean
        return weighted_sum(
            leaves, [jnp.where(total > least, w / jnp.maximum(total, least), 1 / len(leaves)) for w in weights]
        )

    return estimate_statistics(apply, jax.tree.map(weigh, *here, *informations), inputs)


def fisher_information(
    apply: Apply, params: Params, inputs: Inputs, labels: Labels, *, loss: Objective = cross_entropy
) -> Params:
    """Return the diagonal of the empirical Fisher information: the mean squared gradient of the loss over examples.

    Leaves that are not floats have zeros.
    """
    count = count_examples(inputs, labels)
    mesh, size = device_mesh(), min(TOGETHER, count)
    rows = np.pad(np.arange(count), (0, -count % (size * mesh.size)), constant_values=-1).reshape(-1, size)
    args = share_out(rows, mesh, P(AXIS)), *replicate((params, inputs, labels), mesh)
    sums = jax.device_get(_squared_gradients(apply, loss, mesh, *args))  # the networks may be on other devices
    return jax.tree.map(lambda total: total / count, sums)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _squared_gradients(
    apply: Apply, objective: Objective, mesh: Mesh, rows: Array, params: Params, inputs: Inputs, labels: Labels
) -> Params:
    """Return the sum of squared gradients of the loss over the examples in `rows`, where -1 is padding.

    The rows are split between the devices.
    """
    is_learnable = jax.tree.map(is_inexact, params)

    def on_device(rows: Array, params: Params, inputs: Inputs, labels: Labels) -> Params:
        def loss(learnable: Params, row: Array) -> Array:
            x, y = jax.tree.map(lambda leaf: leaf[row][None], (inputs, labels))
            whole = jax.tree.map(lambda own, leaf, ours: own if ours else leaf, learnable, params, is_learnable)
            total, count = add_up(objective, apply(whole, x), y, jnp.ones(1, bool))
            return total / jnp.where(count == 0, 1, count)

        start = jax.tree.map(lambda leaf, ours: leaf if ours else jnp.zeros(()), params, is_learnable)

        def add(sums: Params, rows: Any) -> tuple[Params, None]:
            gradients = map_examples(partial(jax.grad(loss), start), rows)

            def square(gradient: Array) -> Array:
                each = jnp.square(at_least_float32(jnp.abs(gradient)))
                return jnp.sum(each, axis=0, where=(rows >= 0).reshape(-1, *[1] * (each.ndim - 1)))

            return jax.tree.map(lambda total, gradient: total + square(gradient), sums, gradients), None

        zeros = jax.tree.map(lambda leaf: jnp.zeros_like(at_least_float32(jnp.abs(leaf))), start)
        return jax.lax.psum(jax.lax.scan(add, zeros, rows)[0], AXIS)

    traced = jax.make_jaxpr(apply)(params, jax.tree.map(lambda x: x[:1], inputs))
    sharded = on_each_device(on_device, mesh, (P(AXIS), P(), P(), P()), P(), traced)
    return sharded(rows, params, inputs, labels)
