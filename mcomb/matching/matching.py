"""Define what all matchers share: the result type, the objective, and the assignment problem."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import scipy  # imports `scipy.optimize`, which is slow, on first use
from jaxtyping import Float, Int

from mcomb.errors import UserError
from mcomb.symmetry.spec import Layout, Perms, PermutationSpec, require_spec
from mcomb.trees import Params, is_inexact, named_leaves, require_alike, require_finite


@dataclass(frozen=True)
class Matching:
    """The permutations that match network B to network A, and how well they do it.

    Attributes:
        perms: Index arrays for `spec.apply(perms, b)`, by the names of the permutations.
        objective: The inner product of A's weights with B's permuted weights; higher is better.
        trace: The objective at the start and after each sweep over all permutations, or after each gradient step.
        tried: The final objective of each restart, of which the best was kept.
        solved: The number of visits to a permutation that solved its assignment problem.
        skipped: The number of visits that were skipped because nothing had changed.
        by_weights: The permutations that activation matching left to weight matching.
        losses: For matchers that minimise a loss, the held-out loss of the midpoint of A and permuted B, for each
            entry of `trace`.

    Examples:
        >>> aligned = mcomb.align(apply, a, b, x)
        >>> aligned.matching.trace[0] <= aligned.matching.objective
        True
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
    """Raise an error unless two networks fit each other, the spec and the permutations `start`."""
    require_spec(spec)
    require_alike("The networks to match", named_leaves(a), named_leaves(b))  # containers may differ
    for name, params in {"network A": a, "network B": b}.items():
        spec.validate(params)
        require_finite(name, params)
    if start is not None:
        spec.check_perms(start)


def objective(spec: PermutationSpec, a: Params, b: Params, perms: Perms | None = None) -> float:
    """Return the inner product of A's weights with B's weights, permuted if `perms` is given."""
    return inner_product(spec, weight_parts(spec, a, b), perms)


class WeightPart(NamedTuple):
    """The weights of A and B in a part of a leaf in which each axis belongs to at most one permutation.

    `labels` has the name of the permutation of each axis, or None or a size if the axis never moves. A fused
    query-key-value kernel of shape (8, 3 · 4), for example, can be a part of shape (8, 3, 4) with the labels
    ("stream", 3, "dims").
    """

    labels: tuple[Layout, ...]
    a: np.ndarray
    b: np.ndarray


def weight_parts(spec: PermutationSpec, a: Params, b: Params) -> Iterator[WeightPart]:
    """Yield the weights of A and B part by part, in float32 or wider, without leaves that are not floats.

    Complex weights become pairs of reals along an additional axis.
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
    """Return the inner product of A's weights with B's, permuted unless `perms` is None, summed over the parts."""
    total = 0.0
    for labels, a, b in parts:
        permuted = b if perms is None else spec.permute_array(perms, labels, b)
        total += float(np.vecdot(np.atleast_1d(a), np.atleast_1d(permuted)).sum(dtype=np.float64))
    return total


def solve_assignment(
    scores: Float[np.ndarray, "*batch n n"], prices: Float[np.ndarray, "n"] | float = 0.0
) -> Int[np.ndarray, "*batch n"]:
    """Assign a column to each row so that the sum of the assigned scores is largest, for each entry of the batch.

    solve_assignment(np.array([[1, 5], [4, 9]])) is [0, 1], because 1 + 9 is more than 5 + 4.

    `prices` of the columns are subtracted from their scores. This lowers all assignments equally, so it does not change
    the best one. With prices from `fair_prices`, the solver is faster if the scores have changed little since.
    """
    flat = scores.reshape(-1, *scores.shape[-2:])
    if not np.isfinite(flat).all():
        raise UserError("Cannot compare units with non-finite inner products: scale weights or inputs down.")
    costs = (np.subtract(prices, one, dtype=np.float64) for one in flat)  # the dtype that scipy needs no copy of
    return np.stack([scipy.optimize.linear_sum_assignment(one)[1] for one in costs]).reshape(scores.shape[:-1])


def fair_prices(
    scores: Float[np.ndarray, "n n"], assigned: Int[np.ndarray, "n"], prices: Float[np.ndarray, "n"] | float = 0.0
) -> Float[np.ndarray, "n"]:
    """Return prices of the columns at which few rows would prefer another column to their assigned one.

    Starting from `prices`, each pass raises the price of a column to its value for the row that would gain most from
    it. Repeated until convergence, this would solve the dual problem. Two passes are enough for `solve_assignment`.
    """
    own, fair = scores[np.arange(len(scores)), assigned], np.broadcast_to(np.float64(prices), len(scores))
    for _ in range(2):
        fair = (scores + (fair[assigned] - own)[:, None]).max(axis=0)
    return fair
