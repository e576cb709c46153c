"""The minibatch loop of gradient descent, used by training and by the straight-through estimator.

`fit` knows nothing of datasets or networks. It passes to its loss function the parameters, the rows of a minibatch
(indices of examples; -1 is padding and must not count), the data that came with them, and a new random key each step:

    def loss(params, rows, data, key):
        inputs, targets = data
        squares = jnp.square(apply(params, inputs[rows]) - targets[rows])
        return jnp.mean(squares, where=rows >= 0), None  # None: nothing else to report

    for state, losses, _ in fit(loss, initial_state(params, optimizer), batches, optimizer, key): ...
"""

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
"""A function (params, rows, given, key) that returns a minibatch's loss and anything else to report, or None."""


class State(NamedTuple):
    """Everything that a step changes: the parameters, the optimizer's state, and the number of steps so far."""

    params: Params
    optimizer: optax.OptState
    step: Int32[Array, ""]


def initial_state(params: Params, optimizer: optax.GradientTransformation) -> State:
    """The state before the first step."""
    return State(params, optimizer.init(params), jnp.array(0, jnp.int32))


def fit(
    loss: Loss,
    state: State,
    batches: Iterable[tuple[Int32[np.ndarray, "steps b"], Any]],
    optimizer: optax.GradientTransformation,
    key: PRNGKeyArray,
    mesh: Mesh | None = None,
    network: Params | None = None,
) -> Iterator[tuple[State, Float[np.ndarray, "steps"], Any]]:
    """Yields (state, losses, reports) after each compiled call; losses and reports have one entry for each step.

    An item of `batches` is a pair: the rows of one or more minibatches, which one compiled call steps through, and the
    data that the loss gets with them. The rows of a minibatch are shared out over the devices of the mesh (by default
    all) and padded with -1 to a multiple of their number. The next item is taken only when the next state
    is asked for.

    The arrays of a yielded state are donated to the next call: use or copy them before asking for the next state. The
    compiled call is reused as long as `loss` and `optimizer` are the same objects. Where the state's parameters are no
    network's, but what the loss makes a network of, `network` is one like it. Raises Diverged, which names the step, if
    a loss is infinite or not a number.
    """
    mesh = mesh or device_mesh()
    update = _update_for(state.params if network is None else network)
    # Copies, so that donating the state never eats the caller's arrays.
    state = _copy(replicate(state, mesh))
    key = replicate(key, mesh)
    for rows, given in batches:
        padded = np.pad(rows, ((0, 0), (0, _padding(rows.shape[1], mesh))), constant_values=-1)
        args = share_out(padded, mesh, PartitionSpec(None, AXIS)), replicate(given, mesh), key
        state, reports = update(state, *args, loss=loss, optimizer=optimizer, mesh=mesh)
        # One call in flight: with several virtual CPU devices more can starve the all-reduce.
        losses, report = jax.device_get(reports)
        if not np.isfinite(losses).all():
            step = int(state.step) - len(losses) + int(np.isfinite(losses).argmin()) + 1
            raise Diverged(f"the loss became infinite or not a number in step {step}")
        yield state, losses, report


def _padding(rows: int, mesh: Mesh) -> int:
    return -rows % mesh.size


def lower_call(
    loss: Loss, state: State, steps: int, rows: int, given: Any, optimizer: optax.GradientTransformation, mesh: Mesh
) -> jax.stages.Lowered:
    """Lower the call that `fit` makes for `steps` minibatches of `rows` rows, from the shapes of its arguments alone.

    Once this is compiled, `fit` need not compile it again.
    """

    def on(tree: Any, spec: PartitionSpec = PartitionSpec()) -> Any:  # noqa: B008 (it is never changed)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)), tree
        )

    indices = jax.ShapeDtypeStruct((steps, rows + _padding(rows, mesh)), jnp.int32)
    args = on(state), on(indices, PartitionSpec(None, AXIS)), on(given), on(jax.eval_shape(lambda: jax.random.key(0)))
    update: Any = _update_for(state.params)
    return update.lower(*args, loss=loss, optimizer=optimizer, mesh=mesh)


@jax.jit
def _copy(state: State) -> State:
    return jax.tree.map(jnp.copy, state)


ON_CPU = {"xla_cpu_experimental_ynn_fusion_type": "", "xla_disable_hlo_passes": "cse_barrier_expander"}
"""How XLA compiles the steps of convolutional networks on CPU.

Without YNN, the library that XLA gives convolutions and sums to: its gradient of a convolution's kernel and its sums of
a gradient, for which it writes out whole arrays of copies, are slower than XLA's own. And with optimization barriers,
which XLA otherwise removes on CPU: a loss can hold an array as it is with one.
"""


def _update_for(network: Params) -> Callable[..., Any]:
    return _compiled_update(_is_convolutional_on_cpu(network) and _can_be_tuned())


@cache
def _compiled_update(tuned: bool) -> Callable[..., Any]:
    """`_update` under jit; tuned for convolutions on CPU."""
    options = ON_CPU if tuned else None
    static = ("loss", "optimizer", "mesh")
    return jax.jit(_update, static_argnames=static, donate_argnames="state", compiler_options=options)


@cache
def _can_be_tuned() -> bool:
    """Whether this version of XLA has these options and can compile a barrier with them."""
    try:
        jax.jit(jax.lax.optimization_barrier, compiler_options=ON_CPU).lower(jnp.zeros(())).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _update(
    state: State,
    rows: Int32[Array, "steps b"],
    given: Any,
    key: PRNGKeyArray,
    *,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
) -> tuple[State, tuple[Float[Array, "steps"], Any]]:
    """The state after several minibatches, and the loss and report of each."""

    def one(state: State, rows: Any) -> tuple[State, tuple[Float[Array, ""], Any]]:
        of_step = jax.random.fold_in(key, state.step)
        reports, gradient = jax.value_and_grad(loss, has_aux=True)(state.params, rows, given, of_step)
        gradient = jax.tree.map(jnp.conj, gradient)  # JAX's is the conjugate of the steepest ascent
        updates, moments = optimizer.update(gradient, state.optimizer, state.params)
        new = State(optax.apply_updates(state.params, updates), moments, state.step + 1)
        return jax.lax.with_sharding_constraint((new, reports), NamedSharding(mesh, PartitionSpec()))

    if len(rows) == 1:  # no loop at all: see steps_per_call
        state, reports = one(state, rows[0])
        return state, jax.tree.map(lambda value: value[None], reports)
    return jax.lax.scan(one, state, rows)


def steps_per_call(params: Params, steps_per_epoch: int) -> int:
    """How many steps one compiled call should make: a whole epoch, but only one for convolutional networks on CPU.

    On CPU, XLA computes the gradient of a convolution more than ten times slower inside a loop.
    """
    return 1 if _is_convolutional_on_cpu(params) else steps_per_epoch


def _is_convolutional_on_cpu(params: Params) -> bool:
    return any(np.ndim(leaf) > 2 for leaf in jax.tree.leaves(params)) and jax.default_backend() == "cpu"


def shuffled_rows(seed: int, epoch: int, count: int, batch_size: int) -> Int32[np.ndarray, "steps b"]:
    """The minibatches of one epoch over `count` examples, as rows of indices in a random order.

    Examples that do not fill a last minibatch are left out of this epoch: shuffled_rows(0, 0, count=7, batch_size=3)
    has the form [[4, 0, 6], [1, 5, 3]].
    """
    order = np.asarray(jax.random.permutation(stream(seed, "order", epoch), count), np.int32)
    return order[: count - count % batch_size].reshape(-1, batch_size)


@jax.jit
def all_finite(tree: Params) -> Bool[Array, ""]:
    """Whether every number in the tree is finite."""
    return jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]))
