"""The straight-through estimator: a matching learnt by gradient descent on the loss half way between A and B."""

import itertools
from collections.abc import Iterator
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float, Int, Int32

from mcomb.base import Apply, Array, Params, UserError, named_leaves, progress_bar
from mcomb.combine import combine
from mcomb.evaluate import replicate, score
from mcomb.permute import Perms, PermutationSpec
from mcomb.train import Diverged, all_finite, epoch_order
from mcomb.weights import Matching, match_weights, objective


class State(NamedTuple):
    """All that is learnt: weights that stand in for A's when B is matched, and their optimiser's state."""

    weights: Params
    optimizer: optax.OptState


class Candidate(NamedTuple):
    """A matching on the way: the inner product of A with the permuted B, and the held-out loss half way."""

    perms: Perms
    objective: float
    loss: float


def match_straight_through(
    spec: PermutationSpec,
    a: Params,
    b: Params,
    apply: Apply,
    inputs: Array,
    labels: Int[Array, "n"],
    *,
    seed: int = 0,
    steps: int = 100,
    learning_rate: float = 0.01,
    batch_size: int = 100,
) -> Matching:
    """The matching of `b` to `a` that a straight-through estimator finds (Git Re-Basin's third algorithm).

    B is matched not to A but to weights that start there. Each step changes them by the gradient of the midpoint's
    loss, ½ (A + permuted B), as if they were the permuted B, and matches B to them anew from where it is. Of all
    matchings on the way, plain weight matching the first, the result is the one whose midpoint has the lowest loss
    on the last tenth of the data, which no gradient sees; `trace` and `losses` tell of all of them.

    The learning rate is in units of the norm of A's weights, whatever that of the gradient. A step costs a weight
    matching, however small the batch: so their number is given and not that of epochs.
    """
    for name, leaf in named_leaves(a).items():
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise UserError(f"{name} is no float, and nothing can be learnt of it: match by weights or activations")
    if not len(inputs) == len(labels) >= 2:
        raise UserError(f"{len(inputs)} inputs and {len(labels)} labels: give as many of both, and at least two")
    count = len(labels) - max(1, len(labels) // 10)
    mesh = Mesh(np.array(jax.local_devices()), "data")
    batches = _batches(seed, count, min(batch_size, count), mesh)
    a, inputs, labels = replicate((a, inputs, labels))
    optimizer = _optimizer(learning_rate)
    state = State(jax.tree.map(jnp.copy, a), optimizer.init(a))  # a copy: an update eats its state

    def candidate(perms: Perms, moved: Params) -> Candidate:
        loss = score(apply, combine(a, moved, 0.5), inputs[count:], labels[count:]).loss
        if not np.isfinite(loss):
            raise _diverged("on the held-out data")
        return Candidate(perms, objective(spec, a, b, perms), loss)

    perms = match_weights(spec, a, b, seed=seed).perms
    moved = replicate(spec.apply(perms, b))
    best = now = candidate(perms, moved)
    history = [now]
    with progress_bar(steps, "step", "straight-through matching") as bar:
        for step, batch in enumerate(itertools.islice(batches, steps), 1):
            state, loss = _update(state, moved, a, inputs, labels, batch, apply=apply, optimizer=optimizer, mesh=mesh)
            if not all_finite((loss, state.weights)):
                raise _diverged(f"in step {step}")
            perms = match_weights(spec, state.weights, b, start=perms, seed=seed).perms
            if any((perms[name] != now.perms[name]).any() for name in perms):
                moved = replicate(spec.apply(perms, b))
                now = candidate(perms, moved)
                best = min(best, now, key=lambda candidate: candidate.loss)
            history.append(now)
            bar.set_postfix(loss=f"{loss:.4f}", held_out=f"{now.loss:.4f}", best=f"{best.loss:.4f}", refresh=False)
            bar.update()
    _, trace, losses = zip(*history, strict=True)
    return Matching(best.perms, best.objective, trace, losses=losses)


def _diverged(where: str) -> Diverged:
    return Diverged(
        f"the loss half way between the networks, or its gradient, is infinite or not a number {where}: "
        "look for such numbers in the weights and in the inputs"
    )


@cache  # equal rates share an optimiser, and with it what is compiled for it
def _optimizer(learning_rate: float) -> optax.GradientTransformation:
    return optax.sgd(learning_rate, momentum=0.9)


def _batches(seed: int, count: int, size: int, mesh: Mesh) -> Iterator[Int32[Array, "padded"]]:
    """Batches of indices without end, each shared out among the devices."""
    for epoch in itertools.count():
        for batch in epoch_order(seed, epoch, count, size, mesh.size):
            yield jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))


@partial(jax.jit, static_argnames=("apply", "optimizer", "mesh"), donate_argnames="state")
def _update(
    state: State,
    moved: Params,
    a: Params,
    inputs: Array,
    labels: Array,
    batch: Int32[Array, "b"],
    *,
    apply: Apply,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
) -> tuple[State, Float[Array, ""]]:
    """The state after one batch, given as indices of which -1 is padding, and the loss half way."""

    def loss_fn(moved: Params) -> Float[Array, ""]:
        logits = apply(combine(a, moved, 0.5), inputs[batch])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels[batch])
        return jnp.mean(losses, where=batch >= 0)

    loss, gradient = jax.value_and_grad(loss_fn)(moved)
    # In units of A's norm: how large gradients are depends on how good the midpoint is, and on the network.
    norm = optax.tree_utils.tree_norm
    scale = norm(a) / jnp.maximum(norm(gradient), jnp.finfo(jnp.float32).tiny)
    updates, moments = optimizer.update(jax.tree.map(lambda g: scale * g, gradient), state.optimizer)
    out = State(optax.apply_updates(state.weights, updates), moments), loss
    return jax.lax.with_sharding_constraint(out, NamedSharding(mesh, PartitionSpec()))
