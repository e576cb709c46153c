"""Learn an alignment by gradient descent on the loss between the networks, over all of the network's groups.

The descent starts from the alignment by weights, between networks in canonical form, and multiplies B by

    rotations               (1 + K)⁻¹ (1 − K), with a skew matrix K (Cayley)
    rotations, mean kept    the same among vectors with mean zero
    invertible matrices     1 + Z, and its inverse for the weights that read
    scales                  exp(z)
    permutations            the assignment on scores, with the scores' gradient passed straight through

Each step draws a share of B from 0.4 to 0.6. All groups act linearly, so moving A by p and B by q gives the same losses
on the line as moving B alone by p⁻¹q. One network is therefore enough. Mixtures with a share for each weight differ
from the line: they depend on the basis of both networks, which `learn_basis` learns in the same way.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float, Int32, PRNGKeyArray

from mcomb.combination import Distribution, combine, mix, sample
from mcomb.errors import Diverged, require_positive, require_whole
from mcomb.evaluation.evaluate import score
from mcomb.evaluation.objectives import Objective, count_training, cross_entropy, minibatch_loss
from mcomb.keys import stream
from mcomb.matching.assignment import solve_assignment
from mcomb.matching.matching import Matching
from mcomb.matching.procrustes import Alternation, canonical_parts, canonical_product, match_groups, wide
from mcomb.runtime.devices import replicate
from mcomb.runtime.processes import from_first
from mcomb.runtime.progress import progress_bar
from mcomb.runtime.training_loop import Loss, fit, initial_state, minibatches
from mcomb.symmetry.folding import balancing
from mcomb.symmetry.matrix_groups import CENTRED, ROTATION, Element, Group, SymmetrySpec, centring
from mcomb.symmetry.places import places_of
from mcomb.trees import Apply, Array, Inputs, Labels, Params, from_lists, map_named

SHARE_RANGE = (0.4, 0.6)  # of B
EVALUATIONS = 20  # of the held-out loss; the best result counts
HELD_OUT_DRAWS = 3  # mixtures whose mean loss judges a basis
SCORE_SIZE = 0.1  # standard deviation of the scores of permutations: a step of Adam changes all parameters alike


def match_by_learning(
    spec: SymmetrySpec,
    a: Params,
    b: Params,
    apply: Apply,
    inputs: Inputs,
    labels: Labels,
    *,
    loss: Objective = cross_entropy,
    seed: int = 0,
    steps: int = 100,
    learning_rate: float = 0.01,
    batch_size: int = 100,
) -> Matching:
    """Match `b` to `a` by gradient descent (Adam) on the loss of combinations near the midpoint.

    The last tenth of the data is held out. The result has the lowest held-out loss of the midpoint among the start and
    equally spaced steps; `losses` of the result has these losses.
    """
    labels = from_lists(labels)
    require_whole(0, steps=steps)
    require_whole(batch_size=batch_size)
    require_positive(learning_rate=learning_rate)
    train_count = count_training(apply, a, inputs, labels, loss)
    matching = from_first(match_groups, spec, a, b, seed=seed)
    to_a = balancing(spec, a)
    from_b = spec.compose(to_a, matching.perms)  # brings B to its matched canonical form
    canonical = [spec.apply(to_a, wide(a)), spec.apply(from_b, wide(b))]
    scores = _scores(spec, *canonical)
    networks = [map_named(lambda name, leaf, own=own: np.asarray(own[name], leaf.dtype), a) for own in canonical]
    given = replicate((*networks, inputs, labels))
    held_out = jax.tree.map(lambda x: x[train_count:], (inputs, labels))

    trace: list[float] = []

    def held_out_loss(move: Element) -> float:
        moved = spec.apply(move, networks[1])
        trace.append(canonical_product(spec, networks[0], moved))
        return score(apply, combine(networks[0], moved, 0.5), *held_out, loss=loss).loss

    best, losses = _descend(
        spec,
        _latents(spec, scores),
        _loss(apply, _with_matrices(spec, [*scores]), loss),
        lambda latent: (*given, _orders(latent)),
        held_out_loss,
        minibatches(seed, train_count, batch_size),
        steps,
        learning_rate,
        stream(seed),
        "learning the alignment",
    )
    perms = spec.compose(spec.invert(to_a), spec.compose(best, from_b))
    objective = trace[int(np.argmin(losses))]
    return replace(matching, perms=perms, objective=objective, trace=tuple(trace), tried=(), losses=losses)


def learn_basis(
    spec: SymmetrySpec,
    networks: tuple[Params, Params],
    apply: Apply,
    inputs: Inputs,
    labels: Labels,
    distribution: Distribution,
    point: float,
    *,
    loss: Objective = cross_entropy,
    seed: int = 0,
    steps: int = 100,
    learning_rate: float = 0.01,
    batch_size: int = 100,
) -> Element:
    """Learn an element that lowers the loss of the networks' mixtures if it moves both networks.

    The line between two networks does not depend on their common basis, but mixtures with a share for each weight do.
    The descent starts at the canonical form of the first network, and minimises the loss of mixtures whose shares come
    from `distribution` at `point`. The last tenth of the data is held out, as in `match_by_learning`.
    """
    train_count = count_training(apply, networks[0], inputs, labels, loss)
    start = balancing(spec, networks[0])
    a, b = (spec.apply(start, params) for params in networks)
    given = replicate((a, b, inputs, labels))
    held_out = jax.tree.map(lambda x: x[train_count:], (inputs, labels))

    def held_out_loss(move: Element) -> float:
        one, other = (spec.apply(move, params) for params in (a, b))
        mixtures = (sample(one, other, distribution, point, seed=draw) for draw in range(HELD_OUT_DRAWS))
        return float(np.mean([score(apply, mixture, *held_out, loss=loss).loss for mixture in mixtures]))

    best, _ = _descend(
        spec,
        _latents(spec, {}),
        _basis_loss(apply, spec, distribution, point, loss),
        lambda latent: given,
        held_out_loss,
        minibatches(seed, train_count, batch_size),
        steps,
        learning_rate,
        stream(seed),
        "learning the basis",
    )
    return spec.compose(best, start)


def _descend(
    spec: SymmetrySpec,
    latent: Any,
    loss: Loss,
    given_of: Callable[[Any], Any],
    held_out_loss: Callable[[Element], float],
    batches: Iterable[Int32[np.ndarray, "1 b"]],
    steps: int,
    learning_rate: float,
    key: PRNGKeyArray,
    what: str,
) -> tuple[Element, tuple[float, ...]]:
    """Return the element with the lowest held-out loss during a descent, and the held-out losses."""

    def measure(move: Element) -> float:
        try:
            return held_out_loss(move)
        except Diverged as error:
            raise _diverged("on the held-out data") from error

    best = spec.identity()
    losses = [lowest := measure(best)]
    current = latent
    optimizer = _optimizer(float(learning_rate), max(1, steps))
    data = ((rows, given_of(current)) for rows in batches)
    fitting = fit(loss, initial_state(latent, optimizer), data, optimizer, key)
    every = max(1, steps // EVALUATIONS)
    with progress_bar(steps, "step", what) as bar:
        for step in range(1, steps + 1):
            try:
                state, (step_loss,), _ = next(fitting)
            except Diverged as error:
                raise _diverged(f"in step {step}") from error
            current = jax.device_get(state.params)
            if step % every == 0 or step == steps:
                move = _element(spec, current, _orders(current))
                losses.append(measure(move))
                if losses[-1] < lowest:
                    best, lowest = move, losses[-1]
            bar.set_postfix(loss=f"{step_loss:.4f}", best=f"{lowest:.4f}", refresh=False)
            bar.update()
    return best, tuple(losses)


def _diverged(where: str) -> Diverged:
    return Diverged(
        f"The loss between the networks, or its gradient, is infinite or not a number {where}: lower the learning rate."
    )


def _scores(spec: SymmetrySpec, a: Params, b: Params) -> dict[str, Float[np.ndarray, "..."]]:
    """Return the initial scores of the units of each space of learnable permutations, scaled alike."""
    alternation = Alternation(spec, list(canonical_parts(spec, a, b)), np.random.default_rng(0))
    free = [name for name in spec.sizes if name not in spec.groups and name not in spec.batched_over]
    outer = set(itertools.chain.from_iterable(spec.batched_over.values()))
    signed = {own.space for own in spec.scalings.values() if own.values == "sign"}
    scores = {}
    for name in free:
        if name not in outer and name not in signed:
            total: Any = sum(alternation.scores(name, alternation.related(name)).values())
            scores[name] = np.asarray(SCORE_SIZE * total[0] / (np.std(total) or 1.0), np.float32)
    return scores


def _latents(spec: SymmetrySpec, scores: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Return the parameters of the descent at its start."""
    matrices = {}
    for name, group in spec.groups.items():
        *batch, n = spec.shape(name)
        size = n - 1 if group.kind == CENTRED else n
        matrices[name] = np.zeros((*batch, size, size), np.float32)
    scales = {
        name: np.zeros(spec.shape(own.space), np.float32)
        for name, own in spec.scalings.items()
        if own.gain is None and own.values != "sign"
    }
    return {"matrices": matrices, "scales": scales, "scores": scores}


def _orders(latent: Any) -> dict[str, Int32[np.ndarray, "..."]]:
    """Return the permutations that the scores assign."""
    return {name: solve_assignment(np.asarray(x)).astype(np.int32) for name, x in latent["scores"].items()}


def _element(spec: SymmetrySpec, latent: Any, orders: Any) -> Element:
    """Return the element that the parameters describe, with index arrays for permutations."""
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(latent))
    xp: Any = jnp if traced else np
    if not traced:
        latent = jax.tree.map(lambda x: np.asarray(x, float), latent)
    element: Element = {name: xp.asarray(x) for name, x in spec.identity().items()}
    for name, z in latent["matrices"].items():
        unit, skew = xp.eye(z.shape[-1]), z - z.swapaxes(-1, -2)
        if spec.groups[name].is_invertible:
            element[name] = unit + z
            continue
        rotation = xp.linalg.solve(unit + skew, unit - skew)
        if spec.groups[name].kind == CENTRED:
            basis = xp.asarray(centring(z.shape[-1] + 1))
            rotation = 1 / len(basis) + basis @ rotation @ basis.T
        element[name] = rotation
    return element | {name: xp.exp(z) for name, z in latent["scales"].items()} | orders


def _with_matrices(spec: SymmetrySpec, names: list[str]) -> SymmetrySpec:
    """Return the spec with matrices in place of the permutations of some spaces."""
    groups = {name: Group(ROTATION, dict.fromkeys(places_of(spec, name), 1)) for name in names}
    return replace(spec, groups={**spec.groups, **groups})


@cache  # the same function object for the same arguments, so that it is compiled only once
def _loss(apply: Apply, spec: SymmetrySpec, objective: Objective) -> Loss:
    """Return the loss of a random combination of A and the moved B."""

    def loss(latent: Any, rows: Int32[Array, "b"], given: Any, key: PRNGKeyArray) -> tuple[Float[Array, ""], None]:
        a, b, inputs, labels, orders = given
        matrices = {}
        for name, scores in latent["scores"].items():
            hard = jax.nn.one_hot(orders[name], len(scores))
            matrices[name] = hard + scores - jax.lax.stop_gradient(scores)
        moved = spec.apply(_element(spec, latent | {"scores": {}}, {}) | matrices, b)
        share = jax.random.uniform(key, minval=SHARE_RANGE[0], maxval=SHARE_RANGE[1])
        x, y = jax.tree.map(lambda leaf: leaf[rows], (inputs, labels))
        return minibatch_loss(objective, apply(combine(a, moved, share), x), y, rows >= 0), None

    return loss


@cache  # the same function object for the same arguments, so that it is compiled only once
def _basis_loss(
    apply: Apply, spec: SymmetrySpec, distribution: Distribution, point: float, objective: Objective
) -> Loss:
    """Return the loss of a random mixture of two networks that an element moves together."""

    def loss(latent: Any, rows: Int32[Array, "b"], given: Any, key: PRNGKeyArray) -> tuple[Float[Array, ""], None]:
        *networks, inputs, labels = given
        element = _element(spec, latent, {})
        mixture = mix(distribution)(key, jnp.float32(point), *(spec.apply(element, params) for params in networks))
        x, y = jax.tree.map(lambda leaf: leaf[rows], (inputs, labels))
        return minibatch_loss(objective, apply(mixture, x), y, rows >= 0), None

    return loss


@cache  # the same optimizer object for the same arguments, so that it is compiled only once
def _optimizer(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """Return Adam with a learning rate that falls along a cosine."""
    return optax.adam(optax.cosine_decay_schedule(learning_rate, steps))
