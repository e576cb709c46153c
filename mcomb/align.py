"""Many networks in one common order of units, so that any of them can be combined with any other."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mcomb.base import Array, Params, UserError, stream
from mcomb.permute import Perms, PermutationSpec
from mcomb.weights import match_weights, objective

TOLERANCE = 1e-6  # of the objective: what a round must add


@dataclass(frozen=True)
class Alignment:
    """Permutations of each network to a common order of units.

    The objective is the sum over all pairs of the inner products of their permuted weights; the trace has it after
    each round of matching.
    """

    spec: PermutationSpec
    perms: tuple[Perms, ...]
    objective: float
    trace: tuple[float, ...]

    def between(self, i: int, j: int) -> Perms:
        """The permutations of network j to the order of network i: j to i after k to j is k to i."""
        return self.spec.compose(self.spec.invert(self.perms[i]), self.perms[j])


def align_many(
    spec: PermutationSpec, networks: Sequence[Params], *, reference: int | None = 0, seed: int = 0
) -> Alignment:
    """The alignment of networks to the one at index `reference`, or if that is None to their own barycentre.

    The barycentre is Git Re-Basin's MergeMany: visits the networks in a random order and matches each, from where it
    is, to the sum of the others, until a round of all adds next to nothing to the objective. But its first round
    matches each to those visited before it: a sum of networks in unrelated orders is like none of them.
    """
    count = len(networks)
    if count < 2:
        raise UserError(f"there is nothing to align in {count} networks: give two or more")
    if reference is not None and reference not in range(count):
        raise UserError(f"there is no network {reference} among {count}: give an index from 0 to {count - 1}, or None")
    perms, moved = [spec.identity() for _ in networks], list(networks)

    def visit(i: int, others: Sequence[int]) -> float:
        """Matches network i to the sum of others, and returns the gain in their inner product."""
        matching = match_weights(spec, _sum([moved[j] for j in others]), networks[i], start=perms[i], seed=seed)
        perms[i], moved[i] = matching.perms, spec.apply(matching.perms, networks[i])
        return matching.objective - matching.trace[0]

    def visits(number: int) -> list[int]:
        return jax.random.permutation(stream(seed, "networks", number), count).tolist()

    if reference is not None:
        for i in range(count):
            if i != reference:
                visit(i, [reference])
        total = _total(spec, moved)
        return Alignment(spec, tuple(perms), total, (total,))
    order = visits(0)
    for n in range(1, count):
        visit(order[n], order[:n])
    trace, gain = [_total(spec, moved)], math.inf
    while gain > TOLERANCE * abs(trace[-1]):
        gain = sum(visit(i, [j for j in range(count) if j != i]) for i in visits(len(trace)))
        trace.append(trace[-1] + gain)
    return Alignment(spec, tuple(perms), trace[-1], tuple(trace))


def _total(spec: PermutationSpec, networks: Sequence[Params]) -> float:
    """The sum over all pairs of the inner products of their weights."""
    return sum(objective(spec, a, b) for a, b in itertools.combinations(networks, 2))


def _sum(networks: Sequence[Params]) -> Params:
    """The sum of networks' weights, in single precision at least; what is no float is the first one's."""

    def add(first: Array, *rest: Array) -> Array:
        if not jnp.issubdtype(jnp.result_type(first), jnp.floating):
            return first
        return sum(rest, jnp.asarray(first, jnp.promote_types(jnp.result_type(first), jnp.float32)))

    return jax.tree.map(add, *networks)
