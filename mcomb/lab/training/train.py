"""Train a network: an optax recipe, and the minibatch loop run epoch by epoch.

`train` yields a state after each epoch. Its caller saves the checkpoints.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise
from threading import Event
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.linen.module import InterceptorContext
from jax.sharding import Mesh
from jaxtyping import Float, Int32, PRNGKeyArray
from tqdm import tqdm

from mcomb.errors import Diverged, UserError
from mcomb.evaluation.objectives import predict
from mcomb.keys import stream
from mcomb.lab.data.augmentation import Augmentation, augment, shrink
from mcomb.lab.data.datasets import Split
from mcomb.lab.data.splits import Subset
from mcomb.runtime import training_loop
from mcomb.runtime.devices import replicate
from mcomb.runtime.progress import progress_bar
from mcomb.runtime.training_loop import Loss, TrainState, all_finite, fit, shuffled_rows, steps_per_call
from mcomb.trees import Apply, Array, Params, at_least_float32


@dataclass(frozen=True)
class Stage:
    """A part of the training with its own learning-rate schedule.

    Attributes:
        share: The fraction of the epochs.
        rate: The peak of the learning rate, as a multiple of the recipe's.
        shrink: The factor by which images are shrunk, for networks that accept images of any size.
    """

    share: float = 1.0
    rate: float = 1.0
    shrink: int = 1


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of training by SGD with momentum 0.9 or by AdamW, with a learning-rate schedule."""

    epochs: int
    learning_rate: float
    weight_decay: float
    schedule: Literal["thirds", "cosine", "warmup-cosine"]
    augmentation: Augmentation | None = None  # of images
    batch_size: int = 100
    clip: float | None = None
    checkpoint_every: int = 5  # epochs
    algorithm: Literal["sgd", "adamw"] = "sgd"
    stages: tuple[Stage, ...] = (Stage(),)

    def epochs_by_stage(self) -> list[range]:
        """Return the epochs of each stage, counted from 0."""
        ends = [round(self.epochs * share) for share in accumulate(stage.share for stage in self.stages)]
        return [range(start, end) for start, end in pairwise([0, *ends])]

    def work_after(self, epoch: int) -> float:
        """Return the work of the epochs after the first `epoch` ones, in epochs on images of full size."""
        left = (len(range(max(epoch, epochs.start), epochs.stop)) for epochs in self.epochs_by_stage())
        return sum(count / stage.shrink**2 for count, stage in zip(left, self.stages, strict=True))


class Training(NamedTuple):
    """The seed of a network, and its train examples unless it has all."""

    seed: int
    subset: Subset | None = None


class Stopped(Exception):
    """Exception that carries the state of a stopped training run."""

    def __init__(self, state: TrainState):
        super().__init__("the training was stopped")
        self.state = state


class Needs(NamedTuple):
    """Requirements of a training run.

    Attributes:
        memory: Bytes on each accelerator, or on all devices of a CPU together.
        flop: Floating-point operations of a step, averaged over the stages.
    """

    memory: float
    flop: float


class Progress(NamedTuple):
    """Mean loss and accuracy on the augmented train examples of an epoch."""

    loss: float
    accuracy: float


def learning_rate(recipe: Recipe, steps_per_epoch: int) -> optax.Schedule:
    """Return the learning rate as a function of the step. Only the first stage warms up."""
    by_stage, schedules = recipe.epochs_by_stage(), list[optax.Schedule]()
    for stage, epochs in zip(recipe.stages, by_stage, strict=True):
        kind = "cosine" if schedules and recipe.schedule == "warmup-cosine" else recipe.schedule
        schedules.append(_schedule(kind, recipe.learning_rate * stage.rate, len(epochs), steps_per_epoch))
    starts = [epochs.start * steps_per_epoch for epochs in by_stage]
    return optax.join_schedules(schedules, starts[1:]) if starts[1:] else schedules[0]


def _schedule(kind: str, peak: float, epochs: int, steps_per_epoch: int) -> optax.Schedule:
    """Return the learning rate of one stage."""
    steps = max(1, epochs * steps_per_epoch)
    if kind == "thirds":
        return optax.piecewise_constant_schedule(peak, {steps // 3: 0.1, 2 * steps // 3: 0.1})
    if kind == "cosine":
        return optax.cosine_decay_schedule(peak, steps)
    warmup = min(steps_per_epoch, steps // 2)  # one epoch as in the paper, unless the run is shorter than two epochs
    return optax.warmup_cosine_decay_schedule(1e-6, peak, warmup, steps)


@cache  # equal recipes share an optimiser and its compiled code
def make_optimizer(recipe: Recipe, steps_per_epoch: int) -> optax.GradientTransformation:
    """Return the recipe's optimizer. AdamW decays matrices and embeddings, but neither gains nor biases."""
    rate, clip = learning_rate(recipe, steps_per_epoch), recipe.clip
    if recipe.algorithm == "adamw":
        matrices = partial(jax.tree.map, lambda leaf: leaf.ndim > 1)
        steps = [optax.adamw(rate, b2=0.95, weight_decay=recipe.weight_decay, mask=matrices)]
    else:
        steps = [optax.add_decayed_weights(recipe.weight_decay), optax.sgd(rate, momentum=0.9)]
    return optax.chain(optax.clip_by_global_norm(clip) if clip else optax.identity(), *steps)


@cache  # equal arguments share one function, so that its compiled code is reused
def training_loss(apply: Apply, augmentation: Augmentation | None, factor: int = 1) -> Loss:
    """Return the loss function: the mean cross-entropy of augmented and shrunk inputs, and the accuracy on them."""

    def loss(
        params: Params, rows: Int32[Array, "b"], data: Any, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        inputs, labels = (array[rows] for array in data)
        if augmentation:
            inputs = augment(key, inputs, augmentation)
        if factor > 1:
            inputs = shrink(inputs, factor)
        with nn.intercept_methods(call_for_gradient):
            logits = apply(params, inputs)
        losses = optax.softmax_cross_entropy_with_integer_labels(at_least_float32(logits), labels)
        correct, is_real = predict(logits) == labels, (rows >= 0).reshape(-1, *[1] * (labels.ndim - 1))
        return jnp.mean(losses, where=is_real), jnp.mean(correct, where=is_real)

    return loss


def call_for_gradient(method: Callable[..., Any], args: Any, options: Any, context: InterceptorContext) -> Any:
    """Call a layer in the form whose kernel's gradient XLA computes fastest on CPU.

    XLA transposes the input of a convolution for this gradient. Without a barrier it also recomputes the input, in five
    times the time. The gradient of a dense layer is a sum over all positions, which is faster over one axis than two.
    """
    if jax.default_backend() == "cpu" and isinstance(context.module, nn.Conv):
        return method(*jax.lax.optimization_barrier(args), **options)
    if jax.default_backend() == "cpu" and isinstance(context.module, nn.Dense) and args[0].ndim > 2:
        (x,) = args
        return method(x.reshape(-1, x.shape[-1]), **options).reshape(*x.shape[:-1], -1)
    return method(*args, **options)


def initial_state(params: Params, recipe: Recipe, examples: int) -> TrainState:
    """Return the state before the first step of a training on this many examples."""
    return training_loop.initial_state(params, make_optimizer(recipe, examples // recipe.batch_size))


def count_steps(data: Split, recipe: Recipe) -> int:
    """Return the number of full batches in the data.

    Raises:
        UserError: The batch size exceeds the number of examples.
    """
    count, size = len(data.labels), recipe.batch_size
    if count < size:
        raise UserError(f"--batch-size {size} exceeds the {count} training examples: use a smaller batch size.")
    return count // size


def compile_training(
    apply: Apply, params: Params, data: Split, recipe: Recipe, mesh: Mesh, per_call: int | None = None
) -> Needs:
    """Compile the training step of each stage on a mesh from the shapes of `params`, and return the requirements.

    The memory includes XLA's temporary buffers, the state on each device and the data. It also includes the initial
    state, which stays in memory until the first step.
    """
    steps = count_steps(data, recipe)
    state = jax.eval_shape(lambda params: initial_state(params, recipe, len(data.labels)), params)
    temporary, flop = 0, 0.0
    for stage in recipe.stages:
        lowered = training_loop.lower_call(
            training_loss(apply, recipe.augmentation, stage.shrink),
            state,
            min(steps, per_call or steps_per_call(params, steps)),
            recipe.batch_size,
            tuple(data),
            make_optimizer(recipe, steps),
            mesh,
        )
        analysis, cost = lowered.compile().memory_analysis(), lowered.cost_analysis()
        temporary = max(temporary, analysis.temp_size_in_bytes if analysis else 0)
        flop += stage.share * float((cost or {}).get("flops", 0.0))
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    inputs_and_labels = sum(array.nbytes for array in data)
    copies = len(mesh.local_devices) if jax.default_backend() == "cpu" else 1
    return Needs(float(copies * (temporary + held) + held + inputs_and_labels), flop)


def training_bar(recipe: Recipe, examples: int, step: int, describe: str) -> "tqdm[Any]":
    """Return a progress bar over the examples of all epochs, after `step` steps."""
    size = recipe.batch_size
    return progress_bar(recipe.epochs * (examples // size * size), "ex", describe, step * size)


def train(
    apply: Apply,
    state: TrainState,
    data: Split,
    recipe: Recipe,
    seed: int,
    *,
    mesh: Mesh | None = None,
    per_call: int | None = None,
    describe: str = "training",
    stop: Event | None = None,
    bar: "tqdm[Any] | None" = None,
    begun: Event | None = None,
) -> Iterator[tuple[int, TrainState, Progress]]:
    """Yield (epoch, state, progress) after each epoch that `state` has not seen.

    A yielded state is donated to the next epoch: use it before asking for the next one. A state within an epoch
    resumes there.

    Args:
        apply: The function from parameters and raw inputs to logits.
        state: Where the training begins or resumes.
        data: The train examples.
        recipe: The training recipe.
        seed: The seed of the order and augmentation of examples.
        mesh: The devices to train on.
        per_call: Training steps in one compiled call.
        describe: The name of the training in messages.
        stop: An event of another thread. Once it is set, Stopped is raised before the next compiled call.
        bar: A `training_bar` that is shown already. Its clock restarts.
        begun: An event to set after the first compiled call.
    """
    count, size = len(data.labels), recipe.batch_size
    steps = count_steps(data, recipe)
    per_call = per_call or steps_per_call(state.params, steps)
    first, done = divmod(int(state.step), steps)
    everything = replicate(tuple(data), mesh)

    def batches(epochs: range) -> Iterator[tuple[Int32[np.ndarray, "steps b"], Any]]:
        for epoch in range(max(first, epochs.start), epochs.stop):
            rows = shuffled_rows(seed, epoch, count, size)
            for start in range(done if epoch == first else 0, steps, per_call):
                if stop and stop.is_set():
                    return
                yield rows[start : start + per_call], everything

    def calls(state: TrainState) -> Iterator[tuple[TrainState, Any, Any]]:
        optimizer, key = make_optimizer(recipe, steps), stream(seed, "augment")
        for stage, epochs in zip(recipe.stages, recipe.epochs_by_stage(), strict=True):
            loss = training_loss(apply, recipe.augmentation, stage.shrink)
            for call in fit(loss, state, batches(epochs), optimizer, key, mesh):
                state = call[0]
                yield call

    fitting = calls(state)
    bar = training_bar(recipe, count, int(state.step), describe) if bar is None else bar
    with bar:
        bar.unpause()  # exclude earlier time from the rate and the estimate
        bar.update(int(state.step) * size - bar.n)  # move back if the newest checkpoint was damaged
        for epoch in range(first + 1, recipe.epochs + 1):
            history: list[tuple[np.ndarray, np.ndarray]] = []
            try:
                while not history or int(state.step) % steps:
                    if (call := next(fitting, None)) is None:
                        raise Stopped(state)
                    state, *reports = call
                    if begun:
                        begun.set()
                    history.append((reports[0], reports[1]))
                    means = dict(zip(("loss", "acc"), (f"{values.mean():.3f}" for values in reports), strict=True))
                    bar.set_postfix(epoch=epoch, **means, refresh=False)
                    bar.update(len(reports[0]) * size)
                if not all_finite(state.params):
                    raise Diverged("a weight became infinite or NaN")
            except Diverged as error:
                decays = recipe.weight_decay > max(1, recipe.learning_rate)  # then the decay is the likely cause
                remedy = "weight-decay below {weight_decay:g}" if decays else "learning-rate below {learning_rate:g}"
                what = str(error).partition(":")[0]
                raise Diverged(
                    f"{describe}: {what} in epoch {epoch} (earlier checkpoints are intact): "
                    f"use a --{remedy.format_map(vars(recipe))}."
                ) from error
            losses, accuracies = map(np.concatenate, zip(*history, strict=True))
            yield epoch, state, Progress(float(losses.mean()), float(accuracies.mean()))
