"""Evaluation: the loss and the metrics of many combinations on a whole dataset, in compiled calls."""

from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
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
    Diverged,
    Inputs,
    Labels,
    Params,
    UserError,
    all_equations,
    brief,
    count_examples,
    from_lists,
    list_some,
    named_leaves,
    output_shapes,
    require_finite,
    require_positive,
    require_whole,
)
from mcomb.combination import Draw, check_draw
from mcomb.devices import (
    BATCH,
    COMBINATIONS,
    IMAGES,
    Sizes,
    compile_to_fit,
    equal_batches,
    in_batches,
    is_out_of_memory,
    on_each_device,
    share_out,
    two_axis_mesh,
)
from mcomb.objectives import Objective, add_up, check_objectives, classify, cross_entropy
from mcomb.processes import are_several
from mcomb.progress import say
from mcomb.running_statistics import draw_with_statistics, statistics_of

CACHE = 2**20  # bytes of a combination's weights and activations that a core has fast access to
MOST_AT_ONCE = 256  # combinations on a CPU: more gain little, and few would be padded to as many
SLOW_TOGETHER = ("conv_general_dilated", "cond", "while", "shard_map", "custom_vmap_call", "pure_callback")
AGREES_WITH = ("A only", "B only", "both", "neither")


class Metrics(NamedTuple):
    """The mean loss of each of k combinations, and by name the other metrics of each.

    Those of classifiers, whose loss is `cross_entropy`, are
    - accuracy;
    - agreement, a number of inputs for each kind. Its second axis says which network predicts the same label as the
      combination (AGREES_WITH), its last one whether that label is correct or wrong: agreement[i, 2, 0] is the number
      of inputs on which combination i, A and B all predict the correct label;
    - tempered: the mean loss with the logits divided by each of t temperatures.
    """

    loss: Float[np.ndarray, "k"]
    values: dict[str, np.ndarray]

    @property
    def accuracy(self) -> Float[np.ndarray, "k"]:
        """The share of correct labels."""
        return _find("accuracy", self.values)

    @property
    def agreement(self) -> Int[np.ndarray, "k 4 2"]:
        """With whom each combination agrees how often, of a classifier."""
        return _find("agreement", self.values)

    @property
    def tempered(self) -> Float[np.ndarray, "k t"]:
        """The mean loss at each temperature, of a classifier."""
        return _find("tempered", self.values)


def evaluate(
    apply: Apply,
    draw: Draw,
    networks: tuple[Params, ...],
    parameters: Any,
    keys: Key[Array, "k"],
    inputs: Inputs,
    labels: Labels,
    *,
    loss: Objective = cross_entropy,
    metrics: Mapping[str, Objective] | None = None,
    references: Int[Array, "2 n"] | None = None,
    temperatures: tuple[float, ...] | None = None,
    statistics_from: Inputs | None = None,
    batch_size: int = BATCH,
    vmap_size: int | None = None,
    report: Callable[[Metrics], None] = lambda metrics: None,
) -> Metrics:
    """The metrics of the k combinations `draw(keys[i], parameters[i], *networks)`.

    Each combination is drawn inside a compiled call and is never stored. They are shared out over all devices, and so
    are the inputs where there are fewer combinations than devices. A device takes `vmap_size` of its combinations at
    once, on `batch_size` inputs each; if these do not fit into its memory, fewer. By default an accelerator takes all,
    and a CPU as many as fit into its cache: several of a small dense network, and one of any other.

    `loss` and `metrics` are functions of the output and the label of one example that return a sum and a count, as
    those in `mcomb.objectives`; of a metric that counts nothing the mean is not a number. A combination may overflow:
    then its loss is not finite, and where its logits are not finite no label is right. The default is for
    classifiers, and with it `references` are the labels that A and B predict (without them `agreement` has all inputs
    under "neither"), and `temperatures` those of `tempered` (by default 1).

    Running statistics, as those of a BatchNorm, have no average: where the function has some, `statistics_from` are the
    inputs on which each combination's are estimated anew (`estimate_statistics`), those of A and B themselves as well.

    `report` is given the metrics of the combinations of each compiled call, as they are measured.
    """
    parameters, labels, references = map(from_lists, (parameters, labels, references))
    k, count = _count_combinations(networks, parameters, keys), count_examples(inputs, labels)
    require_whole(batch_size=batch_size, vmap_size=1 if vmap_size is None else vmap_size)
    task = _task(loss, metrics, temperatures, references)
    _check_references(references, count)
    check_draw(draw, networks)
    combination = output_shapes(draw, keys[0], _rows(parameters, 0), *networks)
    _check_fit(task, apply, combination, inputs, labels, min(batch_size, count))
    if names := statistics_of(apply, combination, _first(inputs, min(batch_size, count))):
        if statistics_from is not None:
            draw = draw_with_statistics(apply, draw)
            networks = (*networks, equal_batches(statistics_from, batch_size))
        elif len(networks) > 1:
            raise UserError(
                f"the networks have running statistics, as {names[0]}, of which combinations need their own: give "
                "inputs to estimate them on as statistics_from"
            )
    mesh = two_axis_mesh(k)
    rows, columns = mesh.devices.shape
    if references is None and task.temperatures:
        references = np.full((2, count), -1, np.int32)
    shared = share_out((networks, inputs, labels, references), mesh, P())
    sizes = Sizes(-(-k // rows), min(batch_size, -(-count // columns)))
    if vmap_size is None:
        sizes = _choose_sizes(apply, draw, networks, _rows((parameters, keys), slice(1)), inputs, sizes)
    else:
        sizes = sizes._replace(combinations=min(vmap_size, sizes.combinations))
    done, program, measured = 0, None, list[Metrics]()

    def arguments(sizes: Sizes) -> tuple[Any, ...]:
        """Those of the next call, which repeats the last combination until devices divide them."""
        these = np.minimum(np.arange(done, done + rows * sizes.combinations), k - 1)
        return *shared, *share_out(_rows((parameters, keys), these), mesh, P(COMBINATIONS))

    def lower(sizes: Sizes) -> jax.stages.Lowered:
        return _evaluate.lower(apply, draw, sizes.images, mesh, task, *arguments(sizes))

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
        classified, own = jax.tree.map(itemgetter(slice(k - done)), sums)
        means = {name: _mean(name, *of_batches) for name, of_batches in own.items()}
        if classified:
            loss_sum, correct, agreement, tempered = classified
            means |= {"loss": loss_sum / count, "accuracy": correct / count}
            means |= {"agreement": agreement, "tempered": tempered / count}
        measured.append(Metrics(means.pop("loss"), means))
        report(measured[-1])
        done += rows * sizes.combinations
    return jax.tree.map(lambda *values: np.concatenate(values), *measured)


def _choose_sizes(
    apply: Apply, draw: Draw, networks: tuple[Params, ...], one: tuple[Any, Array], inputs: Inputs, most: Sizes
) -> Sizes:
    """Return how many combinations a device should take at once.

    On CPU, small dense networks are faster together as long as they fit into the cache. A large network keeps the cores
    busy by itself, a convolution that is mapped over its kernels becomes a slow, grouped one, and a branch that is
    mapped over its condition computes both sides. The number does not depend on that of all combinations: so those
    that are left of an interrupted run are computed by the same program.
    """
    if jax.default_backend() != "cpu":
        return most
    alone, weights = (
        most._replace(combinations=1),
        sum(_bytes(jax.typeof(leaf)) for leaf in jax.tree.leaves(networks[:1])),
    )
    if weights > CACHE:
        return alone

    def run(one: tuple[Any, Array], networks: tuple[Params, ...], inputs: Inputs) -> Any:
        return apply(draw(*reversed(one), *networks), inputs)

    args = networks, _first(inputs, most.images)
    traced = jax.make_jaxpr(run)(_rows(one, 0), *args)
    equations = list(all_equations(traced))
    if traced.effects or any(eqn.primitive.name in SLOW_TOGETHER for eqn in equations):
        return alone
    try:
        jax.eval_shape(jax.vmap(run, (0, None, None)), one, *args)
    except NotImplementedError:  # JAX cannot batch every operation
        return alone
    largest = max((_bytes(var.aval) for eqn in equations for var in eqn.outvars), default=0)
    return most._replace(combinations=min(max(1, CACHE // max(1, weights + largest)), MOST_AT_ONCE))


def _bytes(array: Any) -> int:
    return int(np.prod(array.shape)) * array.dtype.itemsize


def _first(tree: Any, count: int) -> Any:
    """Return the first rows of each array."""
    return jax.tree.map(lambda x: x[:count], tree)


def _rows(tree: Any, rows: Any) -> Any:
    """The tree with these rows of each array, or one; what is not on a device is not put there for it."""
    return jax.tree.map(lambda x: (x if isinstance(x, jax.Array) else np.asarray(x))[rows], tree)


class Score(NamedTuple):
    """The mean loss of one network, and by name its other metrics.

    Those of classifiers, whose loss is `cross_entropy`, are accuracy; predicted, the label that it predicts for each
    input; and tempered, the mean loss with the logits divided by each of t temperatures.
    """

    loss: float
    values: dict[str, Any]

    @property
    def accuracy(self) -> float:
        """The share of correct labels."""
        return _find("accuracy", self.values)

    @property
    def predicted(self) -> Int[np.ndarray, "n"]:
        """The label that a classifier predicts for each input."""
        return _find("predicted", self.values)

    @property
    def tempered(self) -> Float[np.ndarray, "t"]:
        """The mean loss at each temperature, of a classifier."""
        return _find("tempered", self.values)


def score(
    apply: Apply,
    params: Params,
    inputs: Inputs,
    labels: Labels,
    *,
    loss: Objective = cross_entropy,
    metrics: Mapping[str, Objective] | None = None,
    temperatures: tuple[float, ...] | None = None,
    batch_size: int = BATCH,
) -> Score:
    """The score of one network on a whole dataset, whose inputs are shared out over all devices.

    `loss`, `metrics` and `temperatures` are those of `evaluate`; a loss that is not finite raises Diverged.
    """
    labels = from_lists(labels)
    count, mesh = count_examples(inputs, labels), two_axis_mesh(1)
    require_whole(batch_size=batch_size)
    task = _task(loss, metrics, temperatures)
    _check_fit(task, apply, params, inputs, labels, min(batch_size, count))
    sizes = Sizes(1, min(batch_size, -(-count // mesh.size)))
    args = share_out((params, inputs, labels), mesh, P())
    _, program = compile_to_fit(lambda sizes: _score.lower(apply, sizes.images, mesh, task, *args), sizes)
    classified, own = jax.device_get(program(*args))
    means: dict[str, Any] = {name: float(_mean(name, *of_examples)) for name, of_examples in own.items()}
    if classified:
        losses, predicted, tempered = classified
        with np.errstate(over="ignore"):
            means["loss"] = float(losses.mean())
        means["accuracy"] = float(np.mean(predicted == np.asarray(labels)))
        means |= {"predicted": predicted, "tempered": tempered.mean(0, dtype=np.float64)}
    _require_finite_loss(means["loss"], losses if classified else own["loss"][0])
    return Score(means.pop("loss"), means)


class _Task(NamedTuple):
    """What to measure: as of a classifier at these temperatures, if there are any, and objectives by name."""

    temperatures: tuple[float, ...]
    objectives: tuple[tuple[str, Objective], ...]


@partial(jax.jit, static_argnums=range(5))
def _evaluate(
    apply: Apply,
    draw: Draw,
    batch_size: int,
    mesh: Mesh,
    task: _Task,
    networks: tuple[Params, ...],
    inputs: Inputs,
    labels: Labels,
    references: Array | None,
    parameters: Any,
    keys: Array,
) -> tuple[tuple[Array, ...], dict[str, tuple[Array, Array]]]:
    """What each combination has of everything that is to be measured, not yet divided by a count.

    Of a classifier the summed loss, number of correct predictions, agreement counts and tempered losses; and by name
    the sum and the count of each objective on each batch. (One int32 or float32 might not hold those of all batches.)
    """

    def evaluate_one(batches: list[Any], networks: tuple[Params, ...], parameter: Any, key: Array) -> Any:
        params = draw(key, parameter, *networks)

        def add(totals: Any, batch: list[Any]) -> tuple[Any, Any]:
            x, y, reference, is_real = batch  # the last batch is padded
            outputs = apply(params, x)
            own = {name: add_up(objective, outputs, y, is_real) for name, objective in task.objectives}
            if not task.temperatures:
                return totals, own
            losses, predicted, correct = classify(outputs, y)
            is_a, is_b = ((predicted == reference[:, i]) & (predicted >= 0) for i in (0, 1))
            agrees_with = jnp.where(is_a, jnp.where(is_b, 2, 0), jnp.where(is_b, 1, 3))
            cell = jax.nn.one_hot(2 * agrees_with + ~correct, 8, dtype=jnp.int32)
            new = (
                jnp.sum(losses, where=is_real),
                jnp.sum(correct, where=is_real),
                jnp.sum(cell, axis=0, where=is_real[:, None]).reshape(4, 2),
                jnp.sum(_tempered(outputs, y, task.temperatures), axis=0, where=is_real[:, None]),
            )
            return jax.tree.map(jnp.add, totals, new), own

        counts = (jnp.zeros((), jnp.int32), jnp.zeros((4, 2), jnp.int32))
        start = (jnp.zeros(()), *counts, jnp.zeros(len(task.temperatures)))
        return jax.lax.scan(add, start if task.temperatures else (), batches)

    def on_device(batches: list[Any], networks: tuple[Params, ...], parameters: Any, keys: Array) -> Any:
        one = partial(evaluate_one, batches, networks)
        if len(keys) == 1:  # not mapped at all: convolutions stay as they are
            sums = jax.tree.map(lambda x: x[None], one(*jax.tree.map(lambda x: x[0], (parameters, keys))))
        else:
            sums = jax.vmap(one)(parameters, keys)
        return jax.lax.psum(sums, IMAGES)

    of_labels = [labels, None if references is None else references.T]
    everything = [inputs, *of_labels, jnp.ones(len(jax.tree.leaves(inputs)[0]), bool)]
    batches = in_batches(batch_size * mesh.shape[IMAGES], everything)
    specs = (P(None, IMAGES), P(), P(COMBINATIONS), P(COMBINATIONS))
    one_batch = jax.tree.map(lambda x: x[:batch_size], inputs)
    combination = jax.eval_shape(draw, *jax.tree.map(lambda x: x[0], (keys, parameters)), *networks)
    sharded = on_each_device(on_device, mesh, specs, P(COMBINATIONS), jax.make_jaxpr(apply)(combination, one_batch))
    return jax.lax.with_sharding_constraint(sharded(batches, networks, parameters, keys), NamedSharding(mesh, P()))


@partial(jax.jit, static_argnums=range(4))
def _score(
    apply: Apply,
    batch_size: int,
    mesh: Mesh,
    task: _Task,
    params: Params,
    inputs: Inputs,
    labels: Labels,
) -> tuple[tuple[Array, ...], dict[str, tuple[Array, Array]]]:
    """Of a classifier the loss, predicted label and tempered losses of each input; of each objective sum and count."""

    def score_batch(params: Params, batch: list[Any]) -> Any:
        x, y = batch
        outputs = apply(params, x)
        own = {name: jax.vmap(objective)(outputs, y) for name, objective in task.objectives}
        if not task.temperatures:
            return (), own
        outcome = classify(outputs, y)
        return (outcome.loss, outcome.predicted, _tempered(outputs, y, task.temperatures)), own

    count = len(jax.tree.leaves(inputs)[0])
    batches = in_batches(batch_size * mesh.shape[IMAGES], [inputs, labels])
    on_device = lambda params, batches: jax.lax.map(partial(score_batch, params), batches)  # noqa: E731
    one_batch = jax.tree.map(lambda x: x[:batch_size], inputs)
    shares = P(None, IMAGES)
    sharded = on_each_device(on_device, mesh, (P(), shares), shares, jax.make_jaxpr(apply)(params, one_batch))
    flat = jax.tree.map(lambda values: values.reshape(-1, *values.shape[2:])[:count], sharded(params, batches))
    return jax.lax.with_sharding_constraint(flat, NamedSharding(mesh, P()))


def _task(
    loss: Objective,
    metrics: Mapping[str, Objective] | None,
    temperatures: tuple[float, ...] | None,
    references: Any = None,
) -> _Task:
    """What to measure; an error if it is of a classifier, and the loss is not."""
    if not isinstance(metrics, Mapping | None) or not all(isinstance(name, str) for name in metrics or {}):
        raise UserError(f"the metrics are {brief(metrics)}: give functions by their names, as a dict")
    own, taken = tuple((metrics or {}).items()), {"loss"}
    if loss is cross_entropy:
        temperatures = (1.0,) if temperatures is None else temperatures
        if not isinstance(temperatures, tuple | list | np.ndarray):
            raise UserError(f"the temperatures are {brief(temperatures)}: give a tuple of numbers")
        require_positive(**{"the number of temperatures": len(temperatures)})
        require_positive(**{f"temperature {i}": temperature for i, temperature in enumerate(temperatures)})
        taken |= {"accuracy", "agreement", "predicted", "tempered"}
    else:
        for name, value in {"temperatures": temperatures, "references": references}.items():
            if value is not None:
                raise UserError(f"{name} are for classifiers, with the default loss: leave them out, or the loss")
        own, temperatures = (("loss", loss), *own), ()
    if wrong := taken.intersection(metrics or {}):
        raise UserError(f"there is a metric {brief(min(wrong))} already: give yours another name")
    return _Task(tuple(map(float, temperatures)), own)


def _count_combinations(networks: Any, parameters: Any, keys: Any) -> int:
    """How many combinations there are to draw; an error unless there are networks, and as many parameters as keys."""
    if not isinstance(networks, tuple | list):
        raise UserError(f"the networks are of type {type(networks).__name__}: give a tuple of parameter trees")
    if not getattr(keys, "ndim", 0):
        raise UserError(
            f"the keys are of type {type(keys).__name__}: give an array with one for each combination, as "
            "jax.random.split(jax.random.key(0), count)"
        )
    require_whole(combinations=len(keys))
    for leaf in named_leaves(parameters).values():
        if jnp.shape(leaf)[:1] != (len(keys),):
            raise UserError(
                f"there are {len(keys)} keys and parameters of shape {jnp.shape(leaf)}: give an array with one "
                "parameter for each key"
            )
    require_finite("the parameters", parameters)
    return len(keys)


def _check_references(references: Any, count: int) -> None:
    """Raises an error unless references, if there are any, are the labels that two networks predict for all inputs."""
    if references is not None:
        shape, dtype = np.shape(references), getattr(references, "dtype", None)
        if shape != (2, count) or dtype is None or not jnp.issubdtype(dtype, jnp.integer):
            wanted = f"the labels that A and B predict, whole numbers of shape {(2, count)}"
            raise UserError(f"the references have the shape {shape} and the dtype {dtype}: give {wanted}")


def _check_fit(task: _Task, apply: Apply, params: Params, inputs: Inputs, labels: Labels, rows: int) -> None:
    """Raises an error unless what the function returns for the first rows, and labels, are what the task is about."""
    outputs = output_shapes(apply, params, jax.tree.map(lambda x: x[:rows], inputs))
    check_objectives({"loss": cross_entropy} | dict(task.objectives), outputs, labels, rows)


def _mean(name: str, sums: Array, counts: Array) -> Float[np.ndarray, "..."]:
    """An objective's sum divided by its count, both added up along the last axis."""
    total, count = (np.asarray(values).sum(-1, dtype=np.float64) for values in (sums, counts))
    if name == "loss" and (count == 0).any():
        raise UserError("the loss counts nothing in any of the examples, as if all were padding: look at the labels")
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(total / count)


def _require_finite_loss(mean: float, of_examples: Array) -> None:
    """Raises an error that names the first example whose loss is not finite, if the mean is not."""
    if not np.isfinite(mean):
        wrong = np.flatnonzero(~np.isfinite(of_examples))
        where = f"of example {wrong[0]} is {of_examples[wrong[0]]}" if len(wrong) else f"of all examples is {mean}"
        raise Diverged(f"the loss {where}: look for weights, inputs or labels that are too large or not finite")


def _find(name: str, values: dict[str, Any]) -> Any:
    """A value by name; the error of an attribute that does not exist if there is none."""
    if name not in values:
        raise AttributeError(f"there is no {name}, only {list_some(['loss', *values])}: it is a classifier's")
    return values[name]


def _tempered(logits: Array, labels: Array, temperatures: tuple[float, ...]) -> Float[Array, "n t"]:
    """The losses with the logits divided by each temperature."""
    return jax.vmap(lambda temperature: classify(logits / temperature, labels).loss, out_axes=1)(
        jnp.array(temperatures)
    )
