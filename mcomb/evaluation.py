"""Evaluation: loss, accuracy and label agreement of many combinations on a whole dataset, in compiled calls."""

from collections.abc import Callable
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
from mcomb.devices import (
    BATCH,
    COMBINATIONS,
    IMAGES,
    Sizes,
    compile_to_fit,
    in_batches,
    is_out_of_memory,
    on_each_device,
    share_out,
    two_axis_mesh,
)
from mcomb.objectives import check_labels, classify
from mcomb.processes import are_several
from mcomb.progress import say

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
    report: Callable[[Metrics], None] = lambda metrics: None,
) -> Metrics:
    """The metrics of the k combinations `draw(keys[i], parameters[i], *networks)`.

    Each combination is drawn inside a compiled call and is never stored. They are shared out over all devices, and so
    are the inputs where there are fewer combinations than devices. A device takes `vmap_size` of its combinations at
    once (None: one on CPU, else all), on `batch_size` inputs each; if these do not fit into its memory, fewer.
    `references` are the labels that A and B predict; without them `agreement` has all inputs under "neither".
    `report` is given the metrics of the combinations of each compiled call, as they are measured.
    """
    k, count = len(keys), count_examples(inputs, labels)
    require_positive(combinations=k, batch_size=batch_size, vmap_size=vmap_size)
    _check_temperatures(temperatures)
    for leaf in jax.tree.leaves(parameters):
        if jnp.shape(leaf)[:1] != (k,):
            raise UserError(f"there are {k} keys and parameters of shape {jnp.shape(leaf)}: give as many of both")
    require_finite("the parameters", parameters)
    combination = output_shapes(draw, keys[0], jax.tree.map(lambda x: jnp.asarray(x)[0], parameters), *networks)
    check_labels(output_shapes(apply, combination, jax.tree.map(lambda x: x[:batch_size], inputs)), labels)
    mesh = two_axis_mesh(k)
    rows, columns = mesh.devices.shape
    if references is None:
        references = np.full((2, count), -1, np.int32)
    shared = share_out((networks, inputs, labels, references), mesh, P())
    if vmap_size is None:  # on CPU, XLA turns a convolution that is mapped over its kernels into a slow, grouped one
        vmap_size = 1 if jax.default_backend() == "cpu" else k
    sizes = Sizes(min(vmap_size, -(-k // rows)), min(batch_size, -(-count // columns)))
    done, program, measured = 0, None, list[Metrics]()

    def arguments(sizes: Sizes) -> tuple[Any, ...]:
        """Those of the next call, which repeats the last combination until devices divide them."""
        these = np.minimum(np.arange(done, done + rows * sizes.combinations), k - 1)
        of_these = jax.tree.map(lambda x: jnp.asarray(x)[these], (parameters, keys))
        return *shared, *share_out(of_these, mesh, P(COMBINATIONS))

    def lower(sizes: Sizes) -> jax.stages.Lowered:
        return _evaluate.lower(apply, draw, sizes.images, mesh, temperatures, *arguments(sizes))

    while done < k:
        if program is None:
            sizes, program = compile_to_fit(lower, sizes)
        try:
            sums = jax.device_get(program(*arguments(sizes)))
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error) or sizes.smaller() == sizes or are_several():
                raise
            sizes, program = sizes.smaller(), None
            say(f"memory ran out: going on with {sizes}")
            continue
        loss, correct, agreement, tempered = (values[: k - done] for values in sums)
        measured.append(Metrics(loss / count, correct / count, agreement, tempered / count))
        report(measured[-1])
        done += rows * sizes.combinations
    return Metrics(*map(np.concatenate, zip(*measured, strict=True)))


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
    """The score of one network on a whole dataset, whose inputs are shared out over all devices."""
    count, mesh = count_examples(inputs, labels), two_axis_mesh(1)
    require_positive(batch_size=batch_size)
    _check_temperatures(temperatures)
    check_labels(output_shapes(apply, params, jax.tree.map(lambda x: x[:batch_size], inputs)), labels)
    sizes = Sizes(1, min(batch_size, -(-count // mesh.size)))
    args = share_out((params, inputs, labels), mesh, P())
    _, program = compile_to_fit(lambda sizes: _score.lower(apply, sizes.images, mesh, temperatures, *args), sizes)
    losses, predicted, tempered = jax.device_get(program(*args))
    accuracy = float(np.mean(predicted == np.asarray(labels)))
    return Score(float(losses.mean()), accuracy, predicted, tempered.mean(0, dtype=np.float64))


@partial(jax.jit, static_argnums=range(5))
def _evaluate(
    apply: Apply,
    draw: Draw,
    batch_size: int,
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
        one = partial(evaluate_one, batches, networks)
        if len(keys) == 1:  # not mapped at all: convolutions stay as they are
            sums = jax.tree.map(lambda x: x[None], one(*jax.tree.map(lambda x: x[0], (parameters, keys))))
        else:
            sums = jax.vmap(one)(parameters, keys)
        return jax.lax.psum(sums, IMAGES)

    everything = [inputs, labels, references.T, jnp.ones(len(labels), bool)]
    batches = in_batches(batch_size * mesh.shape[IMAGES], everything)
    specs = (P(None, IMAGES), P(), P(COMBINATIONS), P(COMBINATIONS))
    one_batch = jax.tree.map(lambda x: x[:batch_size], inputs)
    sharded = on_each_device(on_device, mesh, specs, P(COMBINATIONS), jax.make_jaxpr(apply)(networks[0], one_batch))
    return jax.lax.with_sharding_constraint(sharded(batches, networks, parameters, keys), NamedSharding(mesh, P()))


@partial(jax.jit, static_argnums=range(4))
def _score(
    apply: Apply,
    batch_size: int,
    mesh: Mesh,
    temperatures: tuple[float, ...],
    params: Params,
    inputs: Inputs,
    labels: Array,
) -> list[Array]:
    """The loss, the predicted label and the tempered losses of each input."""

    def score_batch(params: Params, batch: list[Any]) -> tuple[Array, Array, Array]:
        logits = apply(params, batch[0])
        outcome = classify(logits, batch[1])
        return outcome.loss, outcome.predicted, _tempered(logits, batch[1], temperatures)

    batches = in_batches(batch_size * mesh.shape[IMAGES], [inputs, labels])
    on_device = lambda params, batches: jax.lax.map(partial(score_batch, params), batches)  # noqa: E731
    one_batch = jax.tree.map(lambda x: x[:batch_size], inputs)
    shares = P(None, IMAGES)
    sharded = on_each_device(on_device, mesh, (P(), shares), shares, jax.make_jaxpr(apply)(params, one_batch))
    flat = [values.reshape(-1, *values.shape[2:])[: len(labels)] for values in sharded(params, batches)]
    return jax.lax.with_sharding_constraint(flat, NamedSharding(mesh, P()))


def _check_temperatures(temperatures: tuple[float, ...]) -> None:
    require_positive(**{"the number of temperatures": len(temperatures)})
    require_positive(**{f"temperature {i}": temperature for i, temperature in enumerate(temperatures)})


def _tempered(logits: Array, labels: Array, temperatures: tuple[float, ...]) -> Float[Array, "n t"]:
    """The losses with the logits divided by each temperature."""
    return jax.vmap(lambda temperature: classify(logits / temperature, labels).loss, out_axes=1)(
        jnp.array(temperatures)
    )
