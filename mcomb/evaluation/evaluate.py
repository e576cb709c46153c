"""Measure the loss and metrics of many combinations on a whole dataset, in compiled calls."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Key

from mcomb.combination import Distribution, Draw, as_draw
from mcomb.errors import Diverged, UserError, brief, require_whole
from mcomb.evaluation.batch_statistics import draw_with_statistics, statistics_of
from mcomb.evaluation.objectives import (
    Objective,
    accuracy,
    add_up,
    check_objectives,
    cross_entropy,
    is_classifier,
)
from mcomb.runtime.batching import BATCH, Sizes, compile_to_fit, equal_batches, in_batches, is_out_of_memory
from mcomb.runtime.devices import COMBINATIONS, EXAMPLES, on_each_device, share_out, two_axis_mesh
from mcomb.runtime.processes import are_several
from mcomb.runtime.progress import say
from mcomb.symmetry.jaxpr_walk import all_equations
from mcomb.trees import (
    Apply,
    Array,
    Inputs,
    Labels,
    Params,
    count_examples,
    from_lists,
    named_leaves,
    output_shapes,
    require_finite,
)

CACHE = 2**20  # bytes of weights and activations that a core can access quickly
MOST_AT_ONCE = 256  # combinations on a CPU: more gain little
SLOW_TOGETHER = ("conv_general_dilated", "cond", "while", "shard_map", "custom_vmap_call", "pure_callback")

Objectives = tuple[tuple[str, Objective], ...]
"""Hashable pairs of names and objectives."""


@dataclass(frozen=True, repr=False)
class Metrics:
    """The mean loss and other metrics of one network or of many combinations.

    `metrics.accuracy` is `metrics.values["accuracy"]`. For k combinations, each value has k rows.

    Attributes:
        values: The mean of each objective, by name. `"loss"` is the first.

    Examples:
        >>> metrics = mcomb.score(apply, a, x_test, y_test)
        >>> round(metrics.loss, 2), round(metrics.accuracy, 2)
        (0.29, 0.91)
    """

    values: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self.values:
            raise AttributeError(f"There is no metric {name!r}, only {', '.join(self.values)}.")
        return self.values[name]

    def __repr__(self) -> str:
        means = {name: f"shape {np.shape(x)}" if np.ndim(x) else f"{x:.4f}" for name, x in self.values.items()}
        return f"Metrics({', '.join(f'{name}={mean}' for name, mean in means.items())})"


def score(
    apply: Apply,
    params: Params,
    inputs: Inputs,
    labels: Labels,
    *,
    loss: Objective = cross_entropy,
    metrics: Mapping[str, Objective] | None = None,
    batch_size: int = BATCH,
) -> Metrics:
    """Return the loss and the metrics of one network on a whole dataset.

    Args:
        apply: The function, called as `apply(params, inputs)`.
        params: The network's parameters.
        inputs: Inputs with examples along the first axis. They are split between all devices.
        labels: Labels with examples along the first axis.
        loss: An objective: a function of one example's output and label that returns a sum and a count.
        metrics: Further objectives by name. By default, `accuracy` if the labels are class indices.
        batch_size: Number of inputs that a device processes at once; fewer if they do not fit into memory.

    Returns:
        The mean of each objective, as `score.loss`, `score.accuracy` and so on.

    Raises:
        UserError: The function, the data or the objectives do not fit together.
        Diverged: The loss is not finite.

    Examples:
        >>> mcomb.score(apply, a, x_test, y_test)
        Metrics(loss=0.2915, accuracy=0.9146)
    """
    labels = from_lists(labels)
    objectives = list_objectives(apply, params, inputs, labels, loss, metrics, batch_size)
    found = measure_examples(apply, params, inputs, labels, objectives, batch_size=batch_size)
    means = {name: _mean(name, found[name], axis=0) for name, _ in objectives}
    if not np.isfinite(means["loss"]):
        of_examples = found["loss"][0]
        wrong = np.flatnonzero(~np.isfinite(of_examples))
        where = f"of example {wrong[0]} is {of_examples[wrong[0]]}" if len(wrong) else f"is {means['loss']}"
        raise Diverged(f"The loss {where}: check weights, inputs and labels for large or non-finite values.")
    return Metrics({name: mean.item() if mean.ndim == 0 else mean for name, mean in means.items()})


def evaluate(
    apply: Apply,
    networks: tuple[Params, ...],
    inputs: Inputs,
    labels: Labels,
    draw: Distribution | Draw,
    points: Any,
    keys: Key[Array, "k"],
    *,
    loss: Objective = cross_entropy,
    metrics: Mapping[str, Objective] | None = None,
    statistics_from: Inputs | None = None,
    batch_size: int = BATCH,
    vmap_size: int | None = None,
    report: Callable[[Metrics], None] = lambda metrics: None,
) -> Metrics:
    """Return the metrics of the k combinations `draw(keys[i], points[i], *networks)`.

    Each combination is drawn inside a compiled call and is never stored. The combinations are split between devices,
    and so are the inputs if there are fewer combinations than devices. The loss of a combination that overflows is not
    finite.

    Args:
        apply: The function, called as `apply(params, inputs)`.
        networks: Parameters of the networks to combine.
        inputs: Inputs with examples along the first axis.
        labels: Labels with examples along the first axis.
        draw: A distribution of shares, or a function `(key, point, *networks)` that returns a combination.
        points: The k values of the parameter: an array, or a tree of arrays, with k rows.
        keys: The k random keys.
        loss: The loss, as for `score`.
        metrics: Further objectives, as for `score`.
        statistics_from: Inputs on which to estimate the running statistics (BatchNorm) of each combination. Required
            if the networks have any, because an average of statistics fits no network.
        batch_size: Number of inputs that a device processes at once; fewer if they do not fit into memory.
        vmap_size: Number of combinations that a device processes at once; chosen by default.
        report: Called with the metrics of each compiled call.

    Returns:
        The metrics, each with k rows.
    """
    points, labels = from_lists(points), from_lists(labels)
    k, count = _count_combinations(networks, points, keys), count_examples(inputs, labels)
    if isinstance(draw, Distribution):
        draw.check(points)
    draw = as_draw(draw, len(networks))
    require_whole(batch_size=batch_size, vmap_size=1 if vmap_size is None else vmap_size)
    combination = output_shapes(draw, keys[0], _rows(points, 0), *networks)
    objectives = list_objectives(apply, combination, inputs, labels, loss, metrics, batch_size)
    if names := statistics_of(apply, combination, _first(inputs, min(batch_size, count))):
        if statistics_from is not None:
            draw = draw_with_statistics(apply, draw)
            networks = (*networks, equal_batches(statistics_from, batch_size))
        elif len(networks) > 1:
            raise UserError(
                f"Running statistics such as {names[0]} cannot be averaged: pass inputs as statistics_from to estimate "
                "those of each combination."
            )
    mesh = two_axis_mesh(k)
    rows, columns = mesh.devices.shape
    shared = share_out((networks, inputs, labels), mesh, P())
    sizes = Sizes(-(-k // rows), min(batch_size, -(-count // columns)))
    if vmap_size is None:
        sizes = _choose_sizes(apply, draw, networks, _rows((points, keys), slice(1)), inputs, sizes)
    else:
        sizes = sizes._replace(combinations=min(vmap_size, sizes.combinations))
    done, program, measured = 0, None, list[Metrics]()

    def arguments(sizes: Sizes) -> tuple[Any, ...]:
        """Return the arguments of the next call; repeat the last combination to fill all devices."""
        these = np.minimum(np.arange(done, done + rows * sizes.combinations), k - 1)
        return *shared, *share_out(_rows((points, keys), these), mesh, P(COMBINATIONS))

    def lower(sizes: Sizes) -> jax.stages.Lowered:
        return _evaluate.lower(apply, draw, sizes.examples, mesh, objectives, *arguments(sizes))

    while done < k:
        if program is None:
            sizes, program = compile_to_fit(lower, sizes)
        try:
            sums = jax.device_get(program(*arguments(sizes)))
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error) or sizes.smaller() == sizes or are_several():
                raise
            sizes, program = sizes.smaller(), None
            say(f"Out of memory: continuing with {sizes}.")
            continue
        these = jax.tree.map(itemgetter(slice(k - done)), sums)
        measured.append(Metrics({name: _mean(name, these[name], axis=1) for name, _ in objectives}))
        report(measured[-1])
        done += rows * sizes.combinations
    return Metrics({name: np.concatenate([one.values[name] for one in measured]) for name in measured[0].values})


def list_objectives(
    apply: Apply,
    params: Params,
    inputs: Inputs,
    labels: Labels,
    loss: Objective,
    metrics: Mapping[str, Objective] | None,
    batch_size: int = BATCH,
) -> Objectives:
    """Return the loss and the metrics by name; raise an error unless they fit the function and the data."""
    if not isinstance(metrics, Mapping | None) or not all(isinstance(name, str) for name in metrics or {}):
        raise UserError(f"The metrics are {brief(metrics)}: pass a dict of functions by name.")
    if "loss" in (metrics or {}):
        raise UserError("A metric cannot be called 'loss': rename it, or pass it as the loss.")
    require_whole(batch_size=batch_size)
    rows = min(batch_size, count_examples(inputs, labels))
    outputs = output_shapes(apply, params, _first(inputs, rows))
    if metrics is None:
        metrics = {"accuracy": accuracy} if is_classifier(outputs, labels) else {}
    objectives = {"loss": loss, **metrics}
    check_objectives(objectives, outputs, labels, rows)
    return tuple(objectives.items())


def measure_examples(
    apply: Apply, params: Params, inputs: Inputs, labels: Labels, objectives: Objectives, *, batch_size: int = BATCH
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the sum and the count of each objective for each example."""
    count, mesh = count_examples(inputs, labels), two_axis_mesh(1)
    sizes = Sizes(1, min(batch_size, -(-count // mesh.size)))
    args = share_out((params, inputs, labels), mesh, P())
    _, program = compile_to_fit(lambda sizes: _measure.lower(apply, sizes.examples, mesh, objectives, *args), sizes)
    return jax.device_get(program(*args))


@partial(jax.jit, static_argnums=range(5))
def _evaluate(
    apply: Apply,
    draw: Draw,
    batch_size: int,
    mesh: Mesh,
    objectives: Objectives,
    networks: tuple[Params, ...],
    inputs: Inputs,
    labels: Labels,
    points: Any,
    keys: Array,
) -> dict[str, tuple[Array, Array]]:
    """Return each objective's sum and count, by combination and batch.

    Batches stay separate, because one float32 might not hold the sum over all of them.
    """

    def evaluate_one(batches: list[Any], networks: tuple[Params, ...], point: Any, key: Array) -> Any:
        params = draw(key, point, *networks)

        def measure(batch: list[Any]) -> dict[str, tuple[Array, Array]]:
            x, y, is_real = batch  # the last batch is padded
            outputs = apply(params, x)
            return {name: add_up(objective, outputs, y, is_real) for name, objective in objectives}

        return jax.lax.map(measure, batches)

    def on_device(batches: list[Any], networks: tuple[Params, ...], points: Any, keys: Array) -> Any:
        one = partial(evaluate_one, batches, networks)
        if len(keys) == 1:  # without vmap, because it would turn convolutions into grouped ones
            sums = jax.tree.map(lambda x: x[None], one(*jax.tree.map(lambda x: x[0], (points, keys))))
        else:
            sums = jax.vmap(one)(points, keys)
        return jax.lax.psum(sums, EXAMPLES)

    everything = [inputs, labels, jnp.ones(len(jax.tree.leaves(inputs)[0]), bool)]
    batches = in_batches(batch_size * mesh.shape[EXAMPLES], everything)
    specs = (P(None, EXAMPLES), P(), P(COMBINATIONS), P(COMBINATIONS))
    one_batch = jax.tree.map(lambda x: x[:batch_size], inputs)
    combination = jax.eval_shape(draw, *jax.tree.map(lambda x: x[0], (keys, points)), *networks)
    sharded = on_each_device(on_device, mesh, specs, P(COMBINATIONS), jax.make_jaxpr(apply)(combination, one_batch))
    return jax.lax.with_sharding_constraint(sharded(batches, networks, points, keys), NamedSharding(mesh, P()))


@partial(jax.jit, static_argnums=range(4))
def _measure(
    apply: Apply, batch_size: int, mesh: Mesh, objectives: Objectives, params: Params, inputs: Inputs, labels: Labels
) -> dict[str, tuple[Array, Array]]:
    """Return each objective's sum and count, by example."""

    def measure_batch(params: Params, batch: list[Any]) -> Any:
        x, y = batch
        outputs = apply(params, x)
        return {name: jax.vmap(objective)(outputs, y) for name, objective in objectives}

    count = len(jax.tree.leaves(inputs)[0])
    batches = in_batches(batch_size * mesh.shape[EXAMPLES], [inputs, labels])
    on_device = lambda params, batches: jax.lax.map(partial(measure_batch, params), batches)  # noqa: E731
    one_batch = jax.tree.map(lambda x: x[:batch_size], inputs)
    shares = P(None, EXAMPLES)
    sharded = on_each_device(on_device, mesh, (P(), shares), shares, jax.make_jaxpr(apply)(params, one_batch))
    flat = jax.tree.map(lambda values: values.reshape(-1, *values.shape[2:])[:count], sharded(params, batches))
    return jax.lax.with_sharding_constraint(flat, NamedSharding(mesh, P()))


def _choose_sizes(
    apply: Apply, draw: Draw, networks: tuple[Params, ...], one: tuple[Any, Array], inputs: Inputs, most: Sizes
) -> Sizes:
    """Return how many combinations a device should process at once.

    On CPU, small dense networks are faster together as long as they fit into the cache. A large network keeps the cores
    busy by itself. Under vmap, a convolution becomes a slow grouped convolution, and a branch computes both sides. The
    choice does not depend on the number of combinations, so that a resumed run uses the same program.
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

    args = networks, _first(inputs, most.examples)
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
    """Return some rows, or one row, of each array; keep NumPy arrays on the host."""
    return jax.tree.map(lambda x: (x if isinstance(x, jax.Array) else np.asarray(x))[rows], tree)


def require_tuple(networks: Any) -> None:
    """Raise an error unless networks are a tuple or a list."""
    if not isinstance(networks, tuple | list):
        raise UserError(f"The networks are a {type(networks).__name__}: pass a tuple of parameter trees.")


def _count_combinations(networks: Any, points: Any, keys: Any) -> int:
    """Return the number of combinations; raise an error unless there are networks, and as many points as keys."""
    require_tuple(networks)
    if not getattr(keys, "ndim", 0):
        raise UserError(f"The keys are a {type(keys).__name__}: pass an array with one key for each combination.")
    require_whole(combinations=len(keys))
    for leaf in named_leaves(points).values():
        if jnp.shape(leaf)[:1] != (len(keys),):
            raise UserError(f"There are {len(keys)} keys but points of shape {jnp.shape(leaf)}: pass one for each key.")
    require_finite("the points", points)
    return len(keys)


def _mean(name: str, sums_and_counts: tuple[Array, Array], axis: int) -> np.ndarray:
    """Divide an objective's sum by its count, both added up along an axis."""
    total, count = (np.asarray(values).sum(axis, dtype=np.float64) for values in sums_and_counts)
    if name == "loss" and (count == 0).any():
        raise UserError("The loss counts no examples, as if all labels were padding: check the labels.")
    count = count[(..., *[None] * (total.ndim - count.ndim))]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(total / count)
