"""Weight matching: the order of one network's units that brings its weights closest to another's."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment

from mcomb.base import Params, named_leaves, stream
from mcomb.permute import Perms, PermutationSpec

TOLERANCE = 1e-6  # of the objective per sweep: well above what float32 resolves
Leaves = dict[str, np.ndarray]


@dataclass(frozen=True)
class Matching:
    """Permutations for B, the inner product of A with the permuted B, and that product after each sweep."""

    perms: Perms
    objective: float
    trace: tuple[float, ...]


def match_weights(spec: PermutationSpec, a: Params, b: Params, *, seed: int = 0) -> Matching:
    """The matching of `b` to `a` by permutation coordinate descent (the paper's Algorithm 1).

    Visits the permutations in a random order and solves each one's assignment problem with the others held,
    unless nothing that it depends on has changed, until a whole sweep adds next to nothing to the inner product
    of the two networks' weights.
    """
    spec.validate(a)
    spec.validate(b)
    leaves_a, leaves_b = _weights(a), _weights(b)
    perms, unmoved = spec.identity(), spec.identity()
    leaves_of = {name: [leaf for leaf, _ in spec.places(name) if leaf in leaves_a] for name in spec.sizes}
    stale = set(spec.sizes)  # those whose scores have changed since they were last solved
    trace = [_inner(leaves_a, leaves_b)]
    gain = np.inf
    while gain > TOLERANCE * abs(trace[-1]):
        order = jax.random.permutation(stream(seed, "visits", len(trace)), len(spec.sizes))
        for name in (list(spec.sizes)[i] for i in order):
            if name not in stale:
                continue
            stale.remove(name)
            step = unmoved | _best_step(spec, leaves_a, leaves_b, name)
            touched = {leaf: leaves_b[leaf] for leaf in leaves_of[name]}
            moved = spec.apply(step, touched)
            # Scores only estimate the gain where a permutation acts twice on one leaf.
            if _inner(leaves_a, moved) > _inner(leaves_a, touched):
                leaves_b |= moved
                perms = spec.compose(step, perms)
                stale |= {other for other in spec.sizes if touched.keys() & set(leaves_of[other])}
                if len(touched) == len(leaves_of[name]) and not _inside(spec, name):
                    stale.remove(name)  # it is at its best, as long as it acts on no leaf twice
        trace.append(_inner(leaves_a, leaves_b))
        gain = trace[-1] - trace[-2]
    return Matching(perms, trace[-1], tuple(trace))


def _weights(params: Params) -> Leaves:
    """The leaves that are floats, in single precision at least: neither counters nor random keys."""
    floats = {k: v for k, v in named_leaves(params).items() if jnp.issubdtype(jnp.result_type(v), jnp.floating)}
    return {name: np.asarray(leaf, np.promote_types(leaf.dtype, np.float32)) for name, leaf in floats.items()}


def _inner(a: Leaves, b: Leaves) -> float:
    """The inner product of those leaves of A that B has with B's."""
    return sum(float(np.sum(a[leaf] * b[leaf], dtype=np.float64)) for leaf in b)


def _best_step(spec: PermutationSpec, a: Leaves, b: Leaves, name: str) -> Perms:
    """The permutation of B's units that fits A best, all others held but those inside the units.

    What is inside a unit, such as the dimensions of a head, is matched anew for each pair of units: a head's fit
    to another is that of its best order of dimensions.
    """
    family, inside = spec.families.get(name, ()), _inside(spec, name)
    n = spec.sizes[name]
    scores = _scores(spec, a, b, family, (name,), without=inside)
    inner = {}
    for other in inside:
        m = spec.sizes[other]
        pairs = _scores(spec, a, b, family, (name, other)).reshape(-1, n, m, n, m).swapaxes(2, 3)
        inner[other] = _assigned(pairs)
        scores = scores + np.take_along_axis(pairs, inner[other][..., None], -1).sum((-2, -1))
    best = _assigned(scores)
    step: Perms = {name: best.reshape(spec.shape(name))}
    for other, perm in inner.items():
        step[other] = np.take_along_axis(perm, best[..., None, None], 2).reshape(spec.shape(other))
    return step


def _inside(spec: PermutationSpec, name: str) -> list[str]:
    """The permutations of what is inside a permutation's units, one for each unit."""
    family = spec.families.get(name, ())
    return [other for other, along in spec.families.items() if along == (*family, name)]


def _assigned(scores: Float[np.ndarray, "*batch n n"]) -> Int[np.ndarray, "*batch n"]:
    """The column assigned to each row, in each assignment problem of a batch."""
    flat = scores.reshape(-1, *scores.shape[-2:])
    return np.stack([linear_sum_assignment(one, maximize=True)[1] for one in flat]).reshape(scores.shape[:-1])


def _scores(
    spec: PermutationSpec,
    a: Leaves,
    b: Leaves,
    family: tuple[str, ...],
    names: tuple[str, ...],
    without: list[str] | None = None,
) -> Float[np.ndarray, "family n n"]:
    """For each member of a family, the inner product of each unit of A with each of B.

    A unit is a position along all of `names`; parts of leaves that have any axis of `without` do not count.
    """
    members = math.prod(spec.shape(names[0])[:-1])
    count = math.prod(spec.sizes[name] for name in names)
    total = np.zeros((members, count, count), np.float32)
    for leaf in dict(spec.places(names[-1])):
        if leaf not in a:
            continue
        for (labels, piece_a), (_, piece_b) in zip(
            spec.pieces(spec.axes[leaf], a[leaf]), spec.pieces(spec.axes[leaf], b[leaf]), strict=True
        ):
            if set(labels) & set(without or ()):
                continue
            for axis in [axis for axis, label in enumerate(labels) if label == names[-1]]:
                front = [*map(labels.index, family + names[:-1]), axis]
                units = [np.moveaxis(piece, front, range(len(front))) for piece in (piece_a, piece_b)]
                rows_a, rows_b = (unit.reshape(members, count, -1) for unit in units)
                total = total + rows_a @ rows_b.swapaxes(-1, -2)
    return total
