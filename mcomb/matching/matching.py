"""What all matchers share: the result type, the objective that judges a result, and the assignment problem."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import scipy  # its `optimize`, which is slow to import, is once it is needed
from jaxtyping import Float, Int

from mcomb.errors import UserError
from mcomb.symmetry.spec import Layout, Perms, PermutationSpec, require_spec
from mcomb.trees import Params, is_inexact, named_leaves, require_alike, require_finite


@dataclass(frozen=True)
class Matching:
    """The permutations that bring network B into the order of network A, and how well they do it.

    - perms: index arrays for `spec.apply(perms, b)`.
    - objective: the inner product of A's weights with B's permuted weights; higher is better.
    - trace: the objective at the start and after each sweep over all permutations (or after each gradient step).
    - tried: the final objective of every restart; the best one was kept.
    - solved, skipped: how many visits to a permutation solved its assignment problem, and how many did not need to.
    - by_weights: the permutations that activation matching had to leave to weight matching.
    - losses: for matchers that minimise a loss, the held-out loss of the midpoint of A and permuted B, one for each
      entry of `trace`.
    """

    perms: Perms
    objective: float
    trace: tuple[float, ...]
    tried: tuple[float, ...] = ()
    solved: int = 0
    skipped: int = 0
    by_weights: tuple[str, ...] = ()
    losses: tuple[float, ...] = ()


def check_networks(spec: PermutationSpec, a: Params, b: Params, start: Perms | None = None) -> None:
    """Raises an error that names what keeps two networks from being matched, from the permutations `start`."""
    require_spec(spec)
    require_alike("the networks to match", named_leaves(a), named_leaves(b))  # whatever their containers are
    for name, params in {"network A": a, "network B": b}.items():
        spec.validate(params)
        require_finite(name, params)
    if start is not None:
        spec.check_perms(start)


def objective(spec: PermutationSpec, a: Params, b: Params, perms: Perms | None = None) -> float:
    """The inner product of A's weights with B's weights, the latter permuted if `perms` is given."""
    return inner_product(spec, weight_parts(spec, a, b), perms)


class WeightPart(NamedTuple):
    """The weights of A and of B in a part of a leaf where each axis belongs to at most one permutation.

    `labels` has, for each axis, the name of its permutation, or None or a size where the axis never moves. A fused
    query-key-value kernel of shape (8, 3 · 4), for example, can be a part of shape (8, 3, 4) with the labels
    ("stream", 3, "dims").
    """

    labels: tuple[Layout, ...]
    a: np.ndarray
    b: np.ndarray


def weight_parts(spec: PermutationSpec, a: Params, b: Params) -> Iterator[WeightPart]:
    """Yields the weights of A and B part by part, in float32 or wider; leaves that are not floats are left out.

    Complex weights are pairs of reals, along an axis of their own.
    """
    leaves_a, leaves_b = named_leaves(a), named_leaves(b)
    for name, layouts in spec.axes.items():
        both = leaves_a[name], leaves_b[name]
        if all(map(is_inexact, both)):
            dtype = np.result_type(np.float32, *map(jnp.result_type, both))
            weights = [np.asarray(leaf, dtype) for leaf in both]
            pairs = np.issubdtype(dtype, np.complexfloating)
            weights = [np.stack([leaf.real, leaf.imag], -1) for leaf in weights] if pairs else weights
            parts = (spec.simple_parts((*layouts, None) if pairs else layouts, leaf) for leaf in weights)
            for (labels, part_a), (_, part_b) in zip(*parts, strict=True):
                yield WeightPart(labels, part_a, part_b)


def inner_product(spec: PermutationSpec, parts: Iterable[WeightPart], perms: Perms | None) -> float:
    """The inner product of A's weights with B's, permuted unless `perms` is None, summed over the parts."""
    total = 0.0
    for labels, a, b in parts:
        permuted = b if perms is None else spec.permute_array(perms, labels, b)
        total += float(np.vecdot(np.atleast_1d(a), np.atleast_1d(permuted)).sum(dtype=np.float64))
    return total


def solve_assignment(
    scores: Float[np.ndarray, "*batch n n"], prices: Float[np.ndarray, "n"] | float = 0.0
) -> Int[np.ndarray, "*batch n"]:
    """The column assigned to each row so that the assigned scores have the largest sum; one problem per batch entry.

    solve_assignment(np.array([[1, 5], [4, 9]])) is [0, 1]: 1 + 9 is more than 5 + 4.

    `prices` of the columns are taken off their scores. All assignments lose the same by that, so the best remains the
    best; but with those of `fair_prices`, for scores that have changed little since, it is found in less time.
    """
    flat = scores.reshape(-1, *scores.shape[-2:])
    if not np.isfinite(flat).all():
        raise UserError("units cannot be compared: inner products of their weights or activations are not finite")
    costs = (np.subtract(prices, one, dtype=np.float64) for one in flat)  # what scipy minimises without a copy
    return np.stack([scipy.optimize.linear_sum_assignment(one)[1] for one in costs]).reshape(scores.shape[:-1])


def fair_prices(
    scores: Float[np.ndarray, "n n"], assigned: Int[np.ndarray, "n"], prices: Float[np.ndarray, "n"] | float = 0.0
) -> Float[np.ndarray, "n"]:
    """Prices of the columns at which hardly a row would gain by having another column than the one assigned to it.

    They rise from `prices`, each to what the column is worth to the row that would gain most from it. Other columns
    become desirable by that; if it went on until none is, the prices would be the solution of the dual problem. Two
    passes are as good for `solve_assignment`.
    """
    own, fair = scores[np.arange(len(scores)), assigned], np.broadcast_to(np.float64(prices), len(scores))
    for _ in range(2):
        fair = (scores + (fair[assigned] - own)[:, None]).max(axis=0)
    return fair
