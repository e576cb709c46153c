"""Evaluation: loss, accuracy and label agreement of many combinations on a whole dataset, in one compiled call."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int, Key

from mcomb.base import (
    Apply,
    Array,
    Inputs,
    Params,
    UserError,
    count_examples,
    output_shapes,
    require_finite,
    require_positive,
)
from mcomb.combination import Draw
from mcomb.devices import AXIS, BATCH, choose_vmap_size, device_mesh, in_batches, replicate, share_out
from mcomb.objectives import check_labels, classify

AGREES_WITH = ("A only", "B only", "both", "neither")


class Metrics(NamedTuple):
    """The mean loss and the accuracy of each of k combinations, and how its predictions agree with A's and B's.

    `agreement` counts the inputs. Its second axis says which network predicts the same label as the combination
    (AGREES_WITH), its last one whether that label is correct or wrong: agreement[i, 2, 0] is the number of inputs
    on which combination i, A and B all predict the correct label.
    """

    loss: Float[np.ndarray, "k"]
    accuracy: Float[np.ndarray, "k"]
    agreement: Int[np.ndarray, "k 4 2"]
    tempered: Float[np.ndarray, "k t"]  # the mean loss with the logits divided by each of t temperatures


def evaluate(
    apply: Apply,
    draw: Draw,
    networks: tuple[Params, ...],
    parameters: Any,
    keys: Key[Array, "k"],
    inputs: Inputs,
    labels: Array,
    *,
    references: Int[Array, "2 n"] | None = None,
    temperatures: tuple[float, ...] = (1.0,),
    batch_size: int = BATCH,
    vmap_size: int | None = None,
) -> Metrics:
    """The metrics of the k combinations `draw(keys[i], parameters[i], *networks)`.

    Each combination is drawn inside the compiled call and is never stored. The combinations are sharded over all
    devices, and each device evaluates `vmap_size` of them at a time (None: as `choose_vmap_size` says). `references`
    are the labels that A and B predict; without them `agreement` has all inputs under "neither".
    """
    k, mesh, count = len(keys), device_mesh(), count_examples(inputs, labels)
    require_positive(combinations=k, batch_size=batch_size, vmap_size=vmap_size)
    _check_temperatures(temperatures)
    for leaf in jax.tree.leaves(parameters):
        if jnp.shape(leaf)[:1] != (k,):
            raise UserError(f"there are {k} keys and parameters of shape {jnp.shape(leaf)}: give as many of both")
    require_finite("the parameters", parameters)
    combination = output_shapes(draw, keys[0], jax.tree.map(lambda x: jnp.asarray(x)[0], parameters), *networks)
    check_labels(output_shapes(apply, combination, jax.tree.map(lambda x: x[:batch_size], inputs)), labels)
    padded = np.pad(np.arange(k), (0, -k % mesh.size), mode="edge")  # repeats the last one until devices divide them
    each = share_out((jax.tree.map(lambda x: jnp.asarray(x)[padded], parameters), keys[padded]), mesh, P(AXIS))
    if references is None:
        references = np.full((2, count), -1, np.int32)
    shared = replicate((networks, inputs, labels, references))
    if vmap_size is None:
        vmap_size = choose_vmap_size(apply, networks[0], jax.tree.map(lambda x: x[:batch_size], shared[1]))
    static = (apply, draw, min(batch_size, count), vmap_size, mesh, temperatures)
    loss, correct, agreement, tempered = (np.asarray(sum)[:k] for sum in _evaluate(*static, *shared, *each))
    return Metrics(loss / count, correct / count, agreement, tempered / count)


class Score(NamedTuple):
    """The mean loss and the accuracy of one network, and the label that it predicts for each input."""

    loss: float
    accuracy: float
    predicted: Int[np.ndarray, "n"]
    tempered: Float[np.ndarray, "t"]  # the mean loss with the logits divided by each of t temperatures


def score(
    apply: Apply,
    params: Params,
    inputs: Inputs,
    labels: Int[Array, "n"],
    *,
    temperatures: tuple[float, ...] = (1.0,),
    batch_size: int = BATCH,
) -> Score:
    """The score of one network on a whole dataset."""
    count = count_examples(inputs, labels)
    require_positive(batch_size=batch_size)
    _check_temperatures(temperatures)
    check_labels(output_shapes(apply, params, jax.tree.map(lambda x: x[:batch_size], inputs)), labels)
    static = (apply, min(batch_size, count), temperatures)
    losses, predicted, tempered = map(np.asarray, _score(*static, *replicate((params, inputs, labels))))
    accuracy = float(np.mean(predicted == np.asarray(labels)))
    return Score(float(losses.mean()), accuracy, predicted, tempered.mean(0, dtype=np.float64))


@partial(jax.jit, static_argnums=range(6))
def _evaluate(
    apply: Apply,
    draw: Draw,
    batch_size: int,
    vmap_size: int,
    mesh: Mesh,
    temperatures: tuple[float, ...],
    networks: tuple[Params, ...],
    inputs: Inputs,
    labels: Array,
    references: Array,
    parameters: Any,
    keys: Array,
) -> tuple[Array, Array, Array, Array]:
    """For each combination its summed loss, number of correct predictions, agreement counts and tempered losses."""

    def evaluate_one(batches: list[Any], networks: tuple[Params, ...], parameter: Any, key: Array) -> Any:
        params = draw(key, parameter, *networks)

        def add(totals: Any, batch: list[Any]) -> tuple[Any, None]:
            x, y, reference, is_real = batch  # the last batch is padded
            logits = apply(params, x)
            losses, predicted, correct = classify(logits, y)
            is_a, is_b = (predicted == reference[:, i] for i in (0, 1))
            agrees_with = jnp.where(is_a, jnp.where(is_b, 2, 0), jnp.where(is_b, 1, 3))
            cell = jax.nn.one_hot(2 * agrees_with + ~correct, 8, dtype=jnp.int32)
            new = (
                jnp.sum(losses, where=is_real),
                jnp.sum(correct, where=is_real),
                jnp.sum(cell, axis=0, where=is_real[:, None]).reshape(4, 2),
                jnp.sum(_tempered(logits, y, temperatures), axis=0, where=is_real[:, None]),
            )
            return jax.tree.map(jnp.add, totals, new), None

        counts = (jnp.zeros((), jnp.int32), jnp.zeros((4, 2), jnp.int32))
        return jax.lax.scan(add, (jnp.zeros(()), *counts, jnp.zeros(len(temperatures))), batches)[0]

    def on_device(batches: list[Any], networks: tuple[Params, ...], parameters: Any, keys: Array) -> Any:
        one = lambda xs: evaluate_one(batches, networks, *xs)  # noqa: E731
        return jax.lax.map(one, (parameters, keys), batch_size=vmap_size if vmap_size > 1 else None)

    batches = in_batches(batch_size, [inputs, labels, references.T, jnp.ones(len(labels), bool)])
    specs = (P(), P(), P(AXIS), P(AXIS))
    sharded = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P(AXIS), check_vma=False)
    return jax.lax.with_sharding_constraint(sharded(batches, networks, parameters, keys), NamedSharding(mesh, P()))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _score(
    apply: Apply, batch_size: int, temperatures: tuple[float, ...], params: Params, inputs: Inputs, labels: Array
) -> list[Array]:
    """The loss, the predicted label and the tempered losses of each input."""

    def score_batch(batch: list[Any]) -> tuple[Array, Array, Array]:
        logits = apply(params, batch[0])
        outcome = classify(logits, batch[1])
        return outcome.loss, outcome.predicted, _tempered(logits, batch[1], temperatures)

    batched = jax.lax.map(score_batch, in_batches(batch_size, [inputs, labels]))
    return [values.reshape(-1, *values.shape[2:])[: len(labels)] for values in batched]


def _check_temperatures(temperatures: tuple[float, ...]) -> None:
    require_positive(**{"the number of temperatures": len(temperatures)})
    require_positive(**{f"temperature {i}": temperature for i, temperature in enumerate(temperatures)})


def _tempered(logits: Array, labels: Array, temperatures: tuple[float, ...]) -> Float[Array, "n t"]:
    """The losses with the logits divided by each temperature."""
    return jax.vmap(lambda temperature: classify(logits / temperature, labels).loss, out_axes=1)(
        jnp.array(temperatures)
    )
