"""Training: an optax recipe, one jitted update, data-parallel over all local devices.

`train` is a generator of states, one an epoch. It saves nothing: its caller does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Float, Float32, Int32, PRNGKeyArray, Shaped

from mcomb.base import Apply, Array, Params, UserError, progress_bar, stream
from mcomb.data import Split


@dataclass(frozen=True)
class Augmentation:
    """The ranges of one random affine map per image; the default is no change."""

    scale: tuple[float, float] = (1.0, 1.0)
    rotation: float = 0.0  # degrees either way
    flip: bool = False
    shift: int = 0  # whole pixels either way


@dataclass(frozen=True)
class Recipe:
    """How a network is trained: SGD with momentum 0.9 and a schedule of the learning rate."""

    epochs: int
    learning_rate: float
    weight_decay: float
    schedule: Literal["thirds", "cosine", "warmup-cosine"]
    augmentation: Augmentation
    batch_size: int = 100
    clip: float | None = None
    checkpoint_every: int = 5  # epochs


class State(NamedTuple):
    """All that changes in training."""

    params: Params
    optimizer: optax.OptState
    step: Int32[Array, ""]


class Progress(NamedTuple):
    """Mean loss and accuracy on the augmented training images."""

    loss: Float[Array, ""]
    accuracy: Float[Array, ""]


class Diverged(UserError):
    """Training met a loss that is not finite."""

    exit_code = 1


def learning_rate(recipe: Recipe, steps_per_epoch: int) -> optax.Schedule:
    """The learning rate as a function of the step."""
    peak, steps = recipe.learning_rate, max(1, recipe.epochs * steps_per_epoch)
    if recipe.schedule == "thirds":
        return optax.piecewise_constant_schedule(peak, {steps // 3: 0.1, 2 * steps // 3: 0.1})
    if recipe.schedule == "cosine":
        return optax.cosine_decay_schedule(peak, steps)
    warmup = min(steps_per_epoch, steps // 2)  # the paper's one epoch, unless the training is shorter than two
    return optax.warmup_cosine_decay_schedule(1e-6, peak, warmup, steps)


@cache  # equal recipes share an optimiser, and with it what is compiled for it
def make_optimizer(recipe: Recipe, steps_per_epoch: int) -> optax.GradientTransformation:
    """The recipe's optimiser."""
    return optax.chain(
        optax.clip_by_global_norm(recipe.clip) if recipe.clip else optax.identity(),
        optax.add_decayed_weights(recipe.weight_decay),
        optax.sgd(learning_rate(recipe, steps_per_epoch), momentum=0.9),
    )


def augment(key: PRNGKeyArray, images: Shaped[Array, "n h w c"], how: Augmentation) -> Float32[Array, "n h w c"]:
    """Each image under a random map of its own: resize, crop, flip and rotation in one bilinear resampling."""
    return jax.vmap(partial(_augment_one, how=how))(jax.random.split(key, len(images)), images)


def _augment_one(key: PRNGKeyArray, image: Shaped[Array, "h w c"], how: Augmentation) -> Float32[Array, "h w c"]:
    height, width, _ = image.shape
    k_scale, k_crop, k_flip, k_rotation, k_shift = jax.random.split(key, 5)
    size = jnp.array([height, width], jnp.float32)
    scale = jax.random.uniform(k_scale, minval=how.scale[0], maxval=how.scale[1])
    # A crop of the resized image: its centre may lie anywhere that leaves no more border than the resize made.
    crop = jax.random.uniform(k_crop, (2,), minval=-0.5, maxval=0.5) * jnp.abs(scale - 1) * size
    mirror = jnp.where(how.flip & jax.random.bernoulli(k_flip), -1.0, 1.0)
    angle = jnp.deg2rad(how.rotation) * jax.random.uniform(k_rotation, minval=-1.0)
    shift = jax.random.randint(k_shift, (2,), -how.shift, how.shift + 1)

    # Where in the source each target pixel lies: undo the maps, last one first, about the image's centre.
    centre = (size - 1) / 2
    y = jnp.arange(height)[:, None] - centre[0] - shift[0]
    x = jnp.arange(width)[None, :] - centre[1] - shift[1]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    source_y = (cos * y - sin * x + crop[0]) / scale + centre[0]
    source_x = (mirror * (sin * y + cos * x) + crop[1]) / scale + centre[1]
    sample = partial(jax.scipy.ndimage.map_coordinates, coordinates=[source_y, source_x], order=1)
    return jax.vmap(sample, in_axes=-1, out_axes=-1)(image.astype(jnp.float32))


def update(
    state: State,
    batch: Int32[Array, "b"],
    images: Shaped[Array, "n h w c"],
    labels: Int32[Array, "n"],
    key: PRNGKeyArray,
    *,
    apply: Apply,
    optimizer: optax.GradientTransformation,
    augmentation: Augmentation,
) -> tuple[State, Progress]:
    """The state after one batch, given as indices of images; an index of -1 is padding and counts for nothing."""
    x = augment(jax.random.fold_in(key, state.step), images[batch], augmentation)
    real = batch >= 0

    def loss_fn(params: Params) -> tuple[Float[Array, ""], Float[Array, ""]]:
        logits = apply(params, x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels[batch])
        correct = logits.argmax(axis=-1) == labels[batch]
        return jnp.mean(losses, where=real), jnp.mean(correct, where=real)

    (loss, accuracy), gradient = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    updates, moments = optimizer.update(gradient, state.optimizer, state.params)
    return State(optax.apply_updates(state.params, updates), moments, state.step + 1), Progress(loss, accuracy)


def steps_per_call(params: Params, steps_per_epoch: int) -> int:
    """How many updates one dispatch makes: an epoch of them, but for convolutions on CPU.

    XLA's CPU backend runs the gradient of a convolution more than ten times slower inside a loop.
    """
    convolutional = any(leaf.ndim > 2 for leaf in jax.tree.leaves(params))
    return 1 if convolutional and jax.default_backend() == "cpu" else steps_per_epoch


def initial_state(params: Params, recipe: Recipe, images: int) -> State:
    """The state of a training on so many images before its first step."""
    optimizer = make_optimizer(recipe, images // recipe.batch_size)
    return State(params, optimizer.init(params), jnp.array(0, jnp.int32))


def train(
    apply: Apply,
    state: State,
    data: Split,
    recipe: Recipe,
    seed: int,
    *,
    per_call: int | None = None,
    describe: str = "training",
) -> Iterator[tuple[int, State, Progress]]:
    """Yields (epoch, state, progress) after each epoch that `state` has not seen.

    A yielded state is donated to the next epoch: use it before asking for the next one.
    """
    count = len(data.labels)
    steps = count // recipe.batch_size
    if steps == 0:
        raise UserError(f"--batch-size {recipe.batch_size} is more than the {count} training images: give less")
    optimizer = make_optimizer(recipe, steps)
    per_call = per_call or steps_per_call(state.params, steps)

    mesh = Mesh(np.array(jax.local_devices()), "data")
    replicated, sharded = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(None, "data"))
    # Copies, so that donating the state never eats the caller's arrays.
    state = jax.jit(partial(jax.tree.map, jnp.copy), out_shardings=replicated)(state)
    images, labels, key = jax.device_put((data.images, data.labels, stream(seed, "augment")), replicated)
    constants = {"apply": apply, "optimizer": optimizer, "augmentation": recipe.augmentation, "mesh": mesh}

    total, done = recipe.epochs * steps * recipe.batch_size, int(state.step) * recipe.batch_size
    with progress_bar(total, "img", describe, done) as bar:
        for epoch in range(int(state.step) // steps, recipe.epochs):
            order = epoch_order(seed, epoch, count, recipe.batch_size, mesh.size)
            history = []
            for start in range(0, steps, per_call):
                chunk = order[start : start + per_call]
                batches = jax.device_put(chunk, sharded)
                state, progress = _updates(state, batches, images, labels, key, **constants)
                # One dispatch in flight: with several virtual CPU devices more can starve the all-reduce.
                history.append(jax.device_get(progress))
                loss, accuracy = (values.mean() for values in history[-1])
                bar.set_postfix(epoch=epoch + 1, loss=f"{loss:.3f}", acc=f"{accuracy:.3f}", refresh=False)
                bar.update(len(chunk) * recipe.batch_size)
            mean = Progress(*(np.concatenate(values).mean() for values in zip(*history, strict=True)))
            if not (np.isfinite(mean.loss) and all_finite(state.params)):
                raise Diverged(
                    f"the loss or a weight became infinite or not a number in epoch {epoch + 1}; "
                    "the last good checkpoint is kept: "
                    f"try a --learning-rate below {recipe.learning_rate:g}"
                )
            yield epoch + 1, state, mean


@jax.jit
def all_finite(tree: Params) -> Bool[Array, ""]:
    """Whether no number of a tree is infinite or not a number."""
    return jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]))


def epoch_order(seed: int, epoch: int, count: int, batch_size: int, devices: int) -> Int32[np.ndarray, "steps padded"]:
    """The epoch's batches as rows of image indices, padded with -1 to a multiple of the devices."""
    order = np.asarray(jax.random.permutation(stream(seed, "order", epoch), count), np.int32)
    rows = order[: count - count % batch_size].reshape(-1, batch_size)
    return np.pad(rows, ((0, 0), (0, -batch_size % devices)), constant_values=-1)


@partial(jax.jit, static_argnames=("apply", "optimizer", "augmentation", "mesh"), donate_argnames="state")
def _updates(
    state: State,
    batches: Int32[Array, "steps b"],
    images: Array,
    labels: Array,
    key: PRNGKeyArray,
    *,
    apply: Apply,
    optimizer: optax.GradientTransformation,
    augmentation: Augmentation,
    mesh: Mesh,
) -> tuple[State, Progress]:
    """The state after several batches, and the progress of each."""

    def one(state: State, batch: Any) -> tuple[State, Progress]:
        out = update(state, batch, images, labels, key, apply=apply, optimizer=optimizer, augmentation=augmentation)
        return jax.lax.with_sharding_constraint(out, NamedSharding(mesh, PartitionSpec()))

    if len(batches) == 1:  # no loop at all: see steps_per_call
        state, progress = one(state, batches[0])
        return state, jax.tree.map(lambda value: value[None], progress)
    return jax.lax.scan(one, state, batches)
