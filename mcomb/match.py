"""Weight matching: the order of one network's units that brings its weights closest to another's."""

from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Float
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
    until a whole sweep adds next to nothing to the inner product of the two networks' weights.
    """
    spec.validate(a)
    spec.validate(b)
    leaves_a, leaves_b = ({k: np.asarray(v) for k, v in named_leaves(tree).items()} for tree in (a, b))
    perms = spec.identity()
    trace = [_inner(spec, leaves_a, leaves_b, perms)]
    gain = np.inf
    while gain > TOLERANCE * abs(trace[-1]):
        order = jax.random.permutation(stream(seed, "visits", len(trace)), len(spec.sizes))
        for name in np.array(list(spec.sizes))[np.asarray(order)]:
            scores = _scores(spec, leaves_a, leaves_b, perms, name)
            candidate = perms | {name: linear_sum_assignment(scores, maximize=True)[1]}
            if _improves(spec, leaves_a, leaves_b, perms, candidate, scores, name):
                perms = candidate
        trace.append(_inner(spec, leaves_a, leaves_b, perms))
        gain = trace[-1] - trace[-2]
    return Matching(perms, trace[-1], tuple(trace))


def _permuted(spec: PermutationSpec, leaf: str, value: np.ndarray, perms: Perms, skip: int = -1) -> np.ndarray:
    """A leaf with every axis permuted but the one to `skip`."""
    for axis, perm in enumerate(spec.axes[leaf]):
        if perm is not None and axis != skip:
            value = value.take(np.asarray(perms[perm]), axis)
    return value


def _inner(spec: PermutationSpec, a: Leaves, b: Leaves, perms: Perms, only: str | None = None) -> float:
    """The inner product of A with the permuted B, over all leaves or those that one permutation acts on."""
    leaves = spec.axes if only is None else dict(spec.places(only))
    return sum(float(np.sum(a[leaf] * _permuted(spec, leaf, b[leaf], perms), dtype=np.float64)) for leaf in leaves)


def _scores(spec: PermutationSpec, a: Leaves, b: Leaves, perms: Perms, name: str) -> Float[np.ndarray, "n n"]:
    """The inner product of each unit of A with each unit of B, all other permutations applied to B."""
    n = spec.sizes[name]
    total = np.zeros((n, n), np.float32)
    for leaf, axis in spec.places(name):
        rows_a, rows_b = (
            np.moveaxis(value, axis, 0).reshape(n, -1)
            for value in (a[leaf], _permuted(spec, leaf, b[leaf], perms, skip=axis))
        )
        total += rows_a @ rows_b.T
    return total


def _improves(
    spec: PermutationSpec, a: Leaves, b: Leaves, old: Perms, new: Perms, scores: np.ndarray, name: str
) -> bool:
    """Whether a permutation is truly better; where it acts twice on one leaf, the scores only estimate that."""
    places = spec.places(name)
    if len(dict(places)) < len(places):
        return _inner(spec, a, b, new, name) > _inner(spec, a, b, old, name)
    rows = np.arange(len(scores))
    values = (np.sum(scores[rows, np.asarray(perms[name])], dtype=np.float64) for perms in (new, old))
    return bool(next(values) > next(values))
