"""Loss, accuracy and agreement of many combinations over a whole split, in one compiled call."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int, Key

from mcomb.base import Apply, Array, Params
from mcomb.combine import Draw

MATCHES = ("A only", "B only", "both", "neither")
BATCH = 200  # images at a time: small enough for the paper's widths


class Metrics(NamedTuple):
    """For each combination its mean loss, its accuracy, and how its labels agree with A's and B's.

    `agreement` counts images by whose label was predicted (MATCHES) and by whether that is right (correct, wrong).
    """

    loss: Float[np.ndarray, "k"]
    accuracy: Float[np.ndarray, "k"]
    agreement: Int[np.ndarray, "k 4 2"]


def evaluate(
    apply: Apply,
    draw: Draw,
    networks: tuple[Params, ...],
    parameters: Any,
    keys: Key[Array, "k"],
    inputs: Array,
    labels: Array,
    *,
    references: Int[Array, "2 n"] | None = None,
    batch_size: int = BATCH,
    at_once: int | None = None,
) -> Metrics:
    """The metrics of the networks `draw(key, parameter, *networks)`, for each of k keys and parameters.

    Each network is made inside the compiled call and never leaves it. The combinations are shared out among all
    local devices; on each, `at_once` of them run side by side. `references` are the labels that A and B predict;
    without them nothing agrees.
    """
    k, mesh = len(keys), local_mesh()
    padded = np.pad(np.arange(k), (0, -k % mesh.size), mode="edge")
    parameters, keys = jax.tree.map(lambda x: jnp.asarray(x)[padded], parameters), keys[padded]
    if references is None:
        references = np.full((2, len(labels)), -1, np.int32)
    shared = replicate((networks, inputs, labels, references))
    if at_once is None:
        at_once = choose_at_once(apply, networks[0], shared[1][:batch_size])
    totals = _evaluate(apply, draw, min(batch_size, len(labels)), at_once, mesh, *shared, parameters, keys)
    loss, correct, agreement = (np.asarray(total)[:k] for total in totals)
    return Metrics(loss / len(labels), correct / len(labels), agreement)


def replicate(tree: Any) -> Any:
    """The tree's arrays on every local device; where they are there already, the same arrays."""
    return jax.device_put(tree, NamedSharding(local_mesh(), P()))


def local_mesh() -> Mesh:
    """All local devices in a row."""
    return Mesh(np.array(jax.local_devices()), "device")


class Score(NamedTuple):
    """One network's mean loss, its accuracy, and the label it gives to each input."""

    loss: float
    accuracy: float
    predicted: Int[np.ndarray, "n"]


def score(apply: Apply, params: Params, inputs: Array, labels: Int[Array, "n"], *, batch_size: int = BATCH) -> Score:
    """The score of one network as it is."""
    size = min(batch_size, len(labels))
    losses, predicted = map(np.asarray, _score(apply, size, *replicate((params, inputs, labels))))
    return Score(float(losses.mean()), float(np.mean(predicted == np.asarray(labels))), predicted)


def choose_at_once(apply: Apply, params: Params, inputs: Array) -> int:
    """How many combinations run side by side on a device: one on CPU, as many as fit in its memory elsewhere.

    XLA's CPU backend turns convolutions mapped over their kernels into slow grouped ones.
    """
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if not stats or "bytes_limit" not in stats:
        return 1
    free = stats["bytes_limit"] - stats["bytes_in_use"]
    return max(1, int(0.8 * free) // footprint(apply, params, inputs))


def footprint(apply: Apply, params: Params, inputs: Array) -> int:
    """About how many bytes one combination takes: weights, coefficients, and its largest operation twice."""
    size = lambda avals: sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)  # noqa: E731
    jaxpr = jax.make_jaxpr(apply)(params, inputs).jaxpr
    largest = max(size([var.aval for var in (*eqn.invars, *eqn.outvars)]) for eqn in jaxpr.eqns)
    return 2 * size(jax.tree.leaves(params)) + 2 * largest


def in_batches(batch_size: int, *arrays: Array) -> list[Array]:
    """Arrays of n rows as arrays of batches of rows, the last one padded with zeros."""
    pad = -len(arrays[0]) % batch_size
    return [jnp.pad(x, ((0, pad), *((0, 0),) * (x.ndim - 1))).reshape(-1, batch_size, *x.shape[1:]) for x in arrays]


@partial(jax.jit, static_argnums=range(5))
def _evaluate(
    apply: Apply,
    draw: Draw,
    batch_size: int,
    at_once: int,
    mesh: Mesh,
    networks: tuple[Params, ...],
    inputs: Array,
    labels: Array,
    references: Array,
    parameters: Any,
    keys: Array,
) -> tuple[Array, Array, Array]:
    def measure(batches: list[Array], networks: tuple[Params, ...], parameter: Any, key: Array) -> Any:
        params = draw(key, parameter, *networks)

        def add(totals: Any, batch: list[Array]) -> tuple[Any, None]:
            x, y, reference, real = batch
            logits = apply(params, x)
            predicted = logits.argmax(axis=-1)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
            is_a, is_b = (predicted == reference[:, i] for i in (0, 1))
            match = jnp.where(is_a, jnp.where(is_b, 2, 0), jnp.where(is_b, 1, 3))
            cell = jax.nn.one_hot(2 * match + (predicted != y), 8, dtype=jnp.int32)
            new = (
                jnp.sum(losses, where=real),
                jnp.sum(predicted == y, where=real),
                jnp.sum(cell, axis=0, where=real[:, None]).reshape(4, 2),
            )
            return jax.tree.map(jnp.add, totals, new), None

        zeros = (jnp.zeros(()), jnp.zeros((), jnp.int32), jnp.zeros((4, 2), jnp.int32))
        return jax.lax.scan(add, zeros, batches)[0]

    def on_device(batches: list[Array], networks: tuple[Params, ...], parameters: Any, keys: Array) -> Any:
        one = lambda xs: measure(batches, networks, *xs)  # noqa: E731
        return jax.lax.map(one, (parameters, keys), batch_size=at_once if at_once > 1 else None)

    real = jnp.ones(len(labels), bool)
    batches = in_batches(batch_size, inputs, labels, references.T, real)
    specs = (P(), P(), P("device"), P("device"))
    sharded = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P("device"), check_vma=False)
    return sharded(batches, networks, parameters, keys)


@partial(jax.jit, static_argnums=(0, 1))
def _score(apply: Apply, batch_size: int, params: Params, inputs: Array, labels: Array) -> list[Array]:
    def one(batch: list[Array]) -> tuple[Array, Array]:
        logits = apply(params, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]), logits.argmax(axis=-1)

    batched = jax.lax.map(one, in_batches(batch_size, inputs, labels))
    return [values.reshape(-1)[: len(inputs)] for values in batched]
