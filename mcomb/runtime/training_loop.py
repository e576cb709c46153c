"""Run the minibatch loop of gradient descent, for training, fine-tuning and the straight-through estimator.

`fit` does not depend on datasets or networks. At each step it passes the parameters, the rows of a minibatch, their
data and a new random key to its loss function. Rows are indices of examples; -1 is padding and must not count:

    def loss(params, rows, data, key):
        inputs, targets = data
        squares = jnp.square(apply(params, inputs[rows]) - targets[rows])
        return jnp.mean(squares, where=rows >= 0), None  # None: no further report

    for state, losses, _ in fit(loss, initial_state(params, optimizer), batches, optimizer, key): ...
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Float, Int32, PRNGKeyArray

from mcomb.errors import Diverged
from mcomb.keys import stream
from mcomb.runtime.devices import AXIS, device_mesh, replicate, share_out
from mcomb.trees import Array, Params

Loss = Callable[[Params, Int32[Array, "b"], Any, PRNGKeyArray], tuple[Float[Array, ""], Any]]
"""A function (params, rows, given, key) that returns a minibatch's loss and a further report or None."""


class TrainState(NamedTuple):
    """The parameters, the optimizer's state, and the number of steps so far: everything that a step changes."""

    params: Params
    optimizer: optax.OptState
    step: Int32[Array, ""]


def initial_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """Return the state before the first step."""
    return TrainState(params, optimizer.init(params), jnp.array(0, jnp.int32))


def fit(
    loss: Loss,
    state: TrainState,
    batches: Iterable[tuple[Int32[np.ndarray, "steps b"], Any]],
    optimizer: optax.GradientTransformation,
    key: PRNGKeyArray,
    mesh: Mesh | None = None,
    network: Params | None = None,
) -> Iterator[tuple[TrainState, Float[np.ndarray, "steps"], Any]]:
    """Yield (state, losses, reports) after each compiled call, with one loss and one report for each step.

    The arrays of a yielded state are donated to the next call: use or copy them before requesting the next state. The
    compiled call is reused as long as `loss` and `optimizer` are the same objects.

    Args:
        loss: The loss function.
        state: The state to start from.
        batches: Pairs of rows and data. One compiled call steps through the rows of one or more minibatches, and the
            loss receives the data. `fit` takes the next pair only when the next state is requested.
        optimizer: The optimizer.
        key: The random key, which is folded with the number of each step.
        mesh: The devices that share the rows of a minibatch; by default all. Minibatches are padded with
            rows of -1, so that all devices have equally many rows.
        network: The network, if the state's parameters are not a network but the loss computes one from them.

    Raises:
        Diverged: A loss is infinite or not a number. The message names the step.
    """
    mesh = mesh or device_mesh()
    update = _update_for(state.params if network is None else network)
    # Copy, because donating the state would delete the caller's arrays.
    state = _copy(replicate(state, mesh))
    key = replicate(key, mesh)
    for rows, given in batches:
        padded = np.pad(rows, ((0, 0), (0, _padding(rows.shape[1], mesh))), constant_values=-1)
        args = share_out(padded, mesh, PartitionSpec(None, AXIS)), replicate(given, mesh), key
        state, reports = update(state, *args, loss=loss, optimizer=optimizer, mesh=mesh)
        # One call in flight, because more can starve the all-reduce on virtual CPU devices.
        losses, report = jax.device_get(reports)
        if not np.isfinite(losses).all():
            step = int(state.step) - len(losses) + int(np.isfinite(losses).argmin()) + 1
            raise Diverged(f"The loss became infinite or not a number in step {step}: lower the learning rate.")
        yield state, losses, report


def _padding(rows: int, mesh: Mesh) -> int:
    return -rows % mesh.size


def lower_call(
    loss: Loss,
    state: TrainState,
    steps: int,
    rows: int,
    given: Any,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
) -> jax.stages.Lowered:
    """Lower the call that `fit` makes for `steps` minibatches of `rows` rows, given only shapes.

    Once it is compiled, `fit` does not compile it again.
    """

    def on(tree: Any, spec: PartitionSpec = PartitionSpec()) -> Any:  # noqa: B008 (immutable)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)), tree
        )

    indices = jax.ShapeDtypeStruct((steps, rows + _padding(rows, mesh)), jnp.int32)
    args = on(state), on(indices, PartitionSpec(None, AXIS)), on(given), on(jax.eval_shape(lambda: jax.random.key(0)))
    update: Any = _update_for(state.params)
    return update.lower(*args, loss=loss, optimizer=optimizer, mesh=mesh)


@jax.jit
def _copy(state: TrainState) -> TrainState:
    return jax.tree.map(jnp.copy, state)


ON_CPU = {"xla_cpu_experimental_ynn_fusion_type": "", "xla_disable_hlo_passes": "cse_barrier_expander"}
"""XLA options for the steps of convolutional networks on CPU.

The first disables YNN, XLA's library for convolutions and sums. Its gradients of convolution kernels and its sums of
gradients write whole arrays of copies and are slower than XLA's own. The second keeps optimization barriers, which XLA
otherwise removes on CPU, so that a loss can force an array to be stored.
"""


def _update_for(network: Params) -> Callable[..., Any]:
    return _compiled_update(_is_convolutional_on_cpu(network) and _can_be_tuned())


@cache
def _compiled_update(tuned: bool) -> Callable[..., Any]:
    """Return the compiled `_update`, optionally tuned for convolutions on CPU."""
    options = ON_CPU if tuned else None
    static = ("loss", "optimizer", "mesh")
    return jax.jit(_update, static_argnames=static, donate_argnames="state", compiler_options=options)


@cache
def _can_be_tuned() -> bool:
    """Return whether this version of XLA has these options and can compile a barrier with them."""
    try:
        jax.jit(jax.lax.optimization_barrier, compiler_options=ON_CPU).lower(jnp.zeros(())).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _update(
    state: TrainState,
    rows: Int32[Array, "steps b"],
    given: Any,
    key: PRNGKeyArray,
    *,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
) -> tuple[TrainState, tuple[Float[Array, "steps"], Any]]:
    """Return the state after several minibatches, and the loss and report of each."""

    def one(state: TrainState, rows: Any) -> tuple[TrainState, tuple[Float[Array, ""], Any]]:
        of_step = jax.random.fold_in(key, state.step)
        reports, gradient = jax.value_and_grad(loss, has_aux=True)(state.params, rows, given, of_step)
        gradient = jax.tree.map(jnp.conj, gradient)  # JAX returns the conjugate of the steepest ascent
        updates, moments = optimizer.update(gradient, state.optimizer, state.params)
        new = TrainState(optax.apply_updates(state.params, updates), moments, state.step + 1)
        return jax.lax.with_sharding_constraint((new, reports), NamedSharding(mesh, PartitionSpec()))

    if len(rows) == 1:  # without a loop: see steps_per_call
        state, reports = one(state, rows[0])
        return state, jax.tree.map(lambda value: value[None], reports)
    return jax.lax.scan(one, state, rows)


def steps_per_call(params: Params, steps_per_epoch: int) -> int:
    """Return the number of steps per compiled call: an epoch, but only one for convolutional networks on CPU.

    On CPU, XLA computes the gradient of a convolution more than ten times more slowly inside a loop.
    """
    return 1 if _is_convolutional_on_cpu(params) else steps_per_epoch


def _is_convolutional_on_cpu(params: Params) -> bool:
    """Return whether a network has kernels of 2-D or 3-D convolutions; attention has leaves with three axes."""
    return any(np.ndim(leaf) > 3 for leaf in jax.tree.leaves(params)) and jax.default_backend() == "cpu"


def shuffled_rows(seed: int, epoch: int, count: int, batch_size: int) -> Int32[np.ndarray, "steps b"]:
    """Return the minibatches of one epoch over `count` examples, as rows of indices in random order.

    An epoch drops the examples that do not fill a last minibatch: shuffled_rows(0, 0, count=7, batch_size=3) has the
    form [[4, 0, 6], [1, 5, 3]].
    """
    order = np.asarray(jax.random.permutation(stream(seed, "order", epoch), count), np.int32)
    return order[: count - count % batch_size].reshape(-1, batch_size)


def minibatches(seed: int, count: int, batch_size: int) -> Iterator[Int32[np.ndarray, "1 b"]]:
    """Yield the minibatches of endless epochs, one for each compiled call."""
    for epoch in itertools.count():
        yield from shuffled_rows(seed, epoch, count, min(batch_size, count))[:, None]


@jax.jit
def all_finite(tree: Params) -> Bool[Array, ""]:
    """Return whether every number in the tree is finite."""
    return jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]))
