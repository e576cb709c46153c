"""Straight-through estimator: find a matching by gradient descent on the loss of the midpoint of A and B."""

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float, Int32, PRNGKeyArray

from mcomb.combination import combine
from mcomb.errors import Diverged, UserError, require_positive, require_whole
from mcomb.evaluation.evaluate import score
from mcomb.evaluation.objectives import Objective, count_training, cross_entropy, minibatch_loss
from mcomb.keys import stream
from mcomb.matching.matching import Matching, check_networks, objective
from mcomb.matching.weights import match_weights
from mcomb.runtime.devices import replicate
from mcomb.runtime.processes import from_first
from mcomb.runtime.progress import SILENCE, progress_bar, say
from mcomb.runtime.training_loop import Loss, all_finite, fit, initial_state, minibatches
from mcomb.symmetry.spec import Perms, PermutationSpec
from mcomb.trees import (
    Apply,
    Array,
    Inputs,
    Labels,
    Params,
    at_least_float32,
    from_lists,
    named_leaves,
)

STEPS = 100
BATCH_SIZE = 100


class Candidate(NamedTuple):
    """The permutations after a step, their objective, and the held-out loss of the midpoint of A and permuted B."""

    perms: Perms
    objective: float
    loss: float


def match_straight_through(
    spec: PermutationSpec,
    a: Params,
    b: Params,
    apply: Apply,
    inputs: Inputs,
    labels: Labels,
    *,
    loss: Objective = cross_entropy,
    seed: int = 0,
    steps: int = STEPS,
    learning_rate: float = 0.01,
    batch_size: int = BATCH_SIZE,
) -> Matching:
    """Match `b` to `a` with a straight-through estimator (Git Re-Basin's third algorithm).

    It trains weights W that start as a copy of A, and always matches B to W. Each step has two parts:

    1. Evaluate the midpoint ½ (A + permuted B) on a minibatch, and move W against the gradient of the loss as if W were
       the permuted B.
    2. Match B to W by weights, starting from the current permutations.

    The first candidate is the weight matching of B to A, and each step adds one. The result is the candidate whose
    midpoint has the lowest loss on the last tenth of the data, which is held out. `trace` and `losses` of the result
    have one entry for each candidate.

    Gradients are rescaled to the norm of A's weights, so that `learning_rate` is relative to that norm. The duration is
    counted in steps, not epochs, because each step costs a weight matching, however small its minibatch. The matcher
    prints a line if the best candidate is among the last tenth, because more steps may then find a better one.
    """
    for name, leaf in named_leaves(a).items():
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise UserError(f"{name} is not a float and has no gradient: match by weights or activations.")
    check_networks(spec, a, b)
    labels = from_lists(labels)
    # Zero steps, or a learning rate of zero, is weight matching.
    require_whole(0, steps=steps)
    require_whole(batch_size=batch_size)
    require_positive(learning_rate=learning_rate or 1.0)
    train_count = count_training(apply, a, inputs, labels, loss)
    a, inputs, labels = replicate((a, inputs, labels))
    held_out = jax.tree.map(lambda x: x[train_count:], (inputs, labels))

    def evaluate_candidate(perms: Perms, permuted: Params) -> Candidate:
        try:
            held_out_loss = score(apply, combine(a, permuted, 0.5), *held_out, loss=loss).loss
        except Diverged as error:
            raise _diverged("on the held-out data") from error
        return Candidate(perms, objective(spec, a, b, perms), held_out_loss)

    perms = from_first(match_weights, spec, a, b, seed=seed).perms
    permuted = replicate(spec.apply(perms, b))
    # Each batch comes with the current `permuted` of the loop below.
    batches = ((rows, (a, permuted, inputs, labels)) for rows in minibatches(seed, train_count, batch_size))
    best = current = evaluate_candidate(perms, permuted)
    candidates = [current]
    optimizer = _optimizer(float(learning_rate))
    start = initial_state(
        jax.tree.map(at_least_float32, a), optimizer
    )  # half precision would round small steps to zero
    fitting = fit(_midpoint_loss(apply, loss), start, batches, optimizer, stream(seed))
    with progress_bar(steps, "step", "straight-through matching", delay=SILENCE) as bar:
        for step in range(1, steps + 1):
            try:
                state, (step_loss,), _ = next(fitting)
            except Diverged as error:
                raise _diverged(f"in step {step}") from error
            if not all_finite(state.params):
                raise _diverged(f"in step {step}")
            weights = jax.device_get(state.params)
            perms = from_first(match_weights, spec, weights, b, start=perms, seed=seed).perms
            if any((perms[name] != current.perms[name]).any() for name in perms):
                permuted = replicate(spec.apply(perms, b))
                current = evaluate_candidate(perms, permuted)
                best = min(best, current, key=lambda candidate: candidate.loss)
            candidates.append(current)
            shown = {"loss": step_loss, "held_out": current.loss, "best": best.loss}
            bar.set_postfix({name: f"{value:.4f}" for name, value in shown.items()}, refresh=False)
            bar.update()
    _, trace, losses = zip(*candidates, strict=True)
    if (last := int(np.argmin(losses))) > 0.9 * steps:
        say(
            f"straight-through matching: the held-out loss is lowest after step {last} of {steps}; more steps may "
            f"lower it further, such as straight_through(steps={2 * steps})"
        )
    return Matching(best.perms, best.objective, trace, losses=losses)


def _diverged(where: str) -> Diverged:
    return Diverged(
        f"The loss of the midpoint, or its gradient, is infinite or not a number {where}: "
        "check weights and inputs for large or non-finite values."
    )


@cache  # the same function object for the same arguments, so that it is compiled only once
def _midpoint_loss(apply: Apply, objective: Objective) -> Loss:
    """Return the loss of the midpoint of A and permuted B, with gradients passed straight through to W."""

    def loss(weights: Params, rows: Int32[Array, "b"], given: Any, key: PRNGKeyArray) -> tuple[Float[Array, ""], None]:
        a, permuted, inputs, labels = given
        # The value is that of the permuted B, and the gradient is with respect to W.
        x, y = jax.tree.map(lambda leaf: leaf[rows], (inputs, labels))
        straight_through = jax.tree.map(lambda p, w: p + (w - jax.lax.stop_gradient(w)), permuted, weights)
        return minibatch_loss(objective, apply(combine(a, straight_through, 0.5), x), y, rows >= 0), None

    return loss


@cache  # the same optimizer object for the same learning rate, so that it is compiled only once
def _optimizer(learning_rate: float) -> optax.GradientTransformation:
    """Return SGD with momentum on gradients that are rescaled to the norm of the initial weights.

    The norm of an unscaled gradient depends on the network and on the loss of the midpoint.
    """
    norm = optax.tree_utils.tree_norm

    def rescale(gradient: Params, initial_norm: Array, params: Params = None) -> tuple[Params, Array]:
        size = norm(gradient)
        vanishes = size < jnp.finfo(jnp.float32).tiny  # take no step if the loss saturates at 0
        scale = jnp.where(vanishes, 0.0, initial_norm / jnp.where(vanishes, 1.0, size))
        return jax.tree.map(lambda g: scale * g, gradient), initial_norm

    return optax.chain(optax.GradientTransformation(norm, rescale), optax.sgd(learning_rate, momentum=0.9))
