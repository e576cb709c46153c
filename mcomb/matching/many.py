"""Align several networks to one common order of units, so that any two can be combined."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mcomb.errors import UserError
from mcomb.keys import stream
from mcomb.matching.matching import objective
from mcomb.matching.procrustes import match_groups
from mcomb.matching.weights import match_weights
from mcomb.symmetry.derive import given_or_derived
from mcomb.symmetry.folding import balancing
from mcomb.symmetry.matrix_groups import Element, SymmetrySpec
from mcomb.symmetry.spec import PermutationSpec
from mcomb.trees import Apply, Inputs, Params, require_alike

ROUND_TOLERANCE = 1e-6  # stop when a round adds less than this fraction of the objective


@dataclass(frozen=True, repr=False)
class MultiAlignment:
    """Several networks permuted to one common order of units.

    Attributes:
        params: Each network's parameters, permuted into the common order.
        perms: Each network's permutations, or its element of a larger group.
        spec: The symmetries that the permutations belong to.
        objective: The inner product of permuted weights, summed over all pairs of networks; higher is better.
        trace: The objective after each round of matching.

    Examples:
        >>> several = mcomb.align_many(apply, (a, b, c), x)
        >>> midpoint = mcomb.combine(several.params[1], several.params[2], 0.5)
        >>> mcomb.score(apply, midpoint, x_test, y_test)
        Metrics(loss=0.3733, accuracy=0.8844)
    """

    params: tuple[Params, ...]
    perms: tuple[Element, ...]
    spec: PermutationSpec
    objective: float
    trace: tuple[float, ...]

    def __repr__(self) -> str:
        return f"MultiAlignment({len(self.params)} networks, sum of inner products {self.objective:.4g})"

    def between(self, i: int, j: int) -> Element:
        """Return the permutations that bring network j into the order of network i.

        They are transitive: `between(i, j)` after `between(j, k)` is `between(i, k)`.

        Args:
            i: Index of the network that keeps its order.
            j: Index of the network that is permuted.

        Returns:
            Permutations for `spec.apply`.

        Raises:
            UserError: There is no network with this index.

        Examples:
            >>> b_like_c = several.spec.apply(several.between(2, 1), b)
        """
        for index in (i, j):
            _require_index(index, len(self.perms))
        return self.spec.compose(self.spec.invert(self.perms[i]), self.perms[j])


def align_many(
    apply: Apply,
    networks: Sequence[Params],
    inputs: Inputs,
    *,
    groups: str = "permutations",
    spec: PermutationSpec | None = None,
    reference: int | None = 0,
    seed: int = 0,
) -> MultiAlignment:
    """Align several networks by weights, so that any two can be combined.

    Without a reference, each round visits the networks in a random order, and matches each one to the sum of the
    others. Rounds repeat until the objective stops growing (MergeMany of Git Re-Basin). The first round matches each
    network only to those visited before it, because a sum of networks with unrelated orders of units resembles none of
    them.

    Args:
        apply: The function that all networks belong to, called as `apply(params, inputs)`.
        networks: Parameters of two or more networks.
        inputs: Example inputs, to derive the symmetries from. Only their shapes matter for permutations.
        groups: "permutations" or "all"; see `derive_spec`. Without a reference, "all" returns the networks in canonical
            form: see `SymmetrySpec.balance`.
        spec: The symmetries of the network; derived from `apply` by default. Replaces `groups`.
        reference: Index of the network to align the others to, or None to find a common order.
        seed: Seed of the visiting orders.

    Returns:
        The aligned networks, as `.params`.

    Raises:
        UserError: There are fewer than two networks, or they do not fit each other.

    Examples:
        >>> several = mcomb.align_many(apply, (a, b, c), x)
        >>> several
        MultiAlignment(3 networks, sum of inner products 335.2)
        >>> merged = mcomb.merge(apply, several.params, x, method="average")
        >>> mcomb.score(apply, merged.params, x_test, y_test)
        Metrics(loss=0.3591, accuracy=0.8894)
    """
    count = len(networks) if isinstance(networks, Sequence) else 1
    if count < 2:
        raise UserError(f"Cannot align fewer than two networks (got {count}): pass a list of parameter trees.")
    for i, network in enumerate(networks):
        require_alike("The networks to align", networks[0], network, ("network 0", f"network {i}"))
    if reference is not None:
        _require_index(reference, count)
    spec = given_or_derived(spec, apply, networks[0], inputs, groups)
    if isinstance(spec, SymmetrySpec):
        if spec.groups or spec.scalings:
            return _align_groups(spec, networks, reference, seed)
        spec = spec.permutations
    perms, permuted = [spec.identity() for _ in networks], list(networks)

    def rematch(i: int, others: Sequence[int]) -> float:
        """Match network i to the sum of the others, and return the gain in their inner product."""
        target = _sum_of_networks([permuted[j] for j in others])
        matching = match_weights(spec, target, networks[i], start=perms[i], seed=seed)
        perms[i], permuted[i] = matching.perms, spec.apply(matching.perms, networks[i])
        return matching.objective - matching.trace[0]

    def visit_order(round_index: int) -> list[int]:
        return jax.random.permutation(stream(seed, "networks", round_index), count).tolist()

    if reference is not None:
        for i in range(count):
            if i != reference:
                rematch(i, [reference])
        total = _pairwise_objective(spec, permuted)
        return MultiAlignment(tuple(permuted), tuple(perms), spec, total, (total,))
    order = visit_order(0)
    for n in range(1, count):
        rematch(order[n], order[:n])
    trace, gain = [_pairwise_objective(spec, permuted)], math.inf
    while gain > ROUND_TOLERANCE * abs(trace[-1]):
        gain = sum(rematch(i, [j for j in range(count) if j != i]) for i in visit_order(len(trace)))
        trace.append(trace[-1] + gain)
    return MultiAlignment(tuple(permuted), tuple(perms), spec, trace[-1], tuple(trace))


def _align_groups(spec: SymmetrySpec, networks: Sequence[Params], reference: int | None, seed: int) -> MultiAlignment:
    """Align several networks by all groups of a spec.

    Without a reference, all networks are first brought to canonical form. Only rotations, permutations and signs are
    left there, and these keep inner products.
    """
    count, perms, moved = len(networks), [spec.identity() for _ in networks], list(networks)

    def rematch(i: int, target: Params, **options: Any) -> None:
        perms[i] = match_groups(spec, target, networks[i], seed=seed, **options).perms
        moved[i] = spec.apply(perms[i], networks[i])

    if reference is not None:
        for i in [i for i in range(count) if i != reference]:
            rematch(i, networks[reference])
        total = _pairwise_objective(spec.permutations, moved)
        return MultiAlignment(tuple(moved), tuple(perms), spec, total, (total,))
    rng = np.random.default_rng(seed)
    order = rng.permutation(count).tolist()
    perms = [balancing(spec, network) for network in networks]
    moved = [spec.apply(element, network) for element, network in zip(perms, networks, strict=True)]
    for n in range(1, count):
        rematch(order[n], _sum_of_networks([moved[i] for i in order[:n]]), balanced=True)
    trace = [_pairwise_objective(spec.permutations, moved)]
    while len(trace) < 2 or trace[-1] - trace[-2] > ROUND_TOLERANCE * abs(trace[-1]):
        for i in rng.permutation(count).tolist():
            others = _sum_of_networks([moved[j] for j in range(count) if j != i])
            rematch(i, others, balanced=True, start=perms[i])
        trace.append(_pairwise_objective(spec.permutations, moved))
    return MultiAlignment(tuple(moved), tuple(perms), spec, trace[-1], tuple(trace))


def _require_index(index: int, count: int) -> None:
    if not isinstance(index, Integral) or index not in range(count):
        raise UserError(f"There is no network {index!s:.50} among {count}: pass an index from 0 to {count - 1}.")


def _pairwise_objective(spec: PermutationSpec, networks: Sequence[Params]) -> float:
    """Return the inner product of two networks' weights, summed over all pairs of networks."""
    return sum(objective(spec, a, b) for a, b in itertools.combinations(networks, 2))


def _sum_of_networks(networks: Sequence[Params]) -> Params:
    """Sum the networks' weights in float32 or wider; leaves that are not floats are the first network's."""

    def add(first: Any, *rest: Any) -> Any:
        if not jnp.issubdtype(jnp.result_type(first), jnp.floating):
            return first
        return sum(rest, jnp.asarray(first, jnp.promote_types(jnp.result_type(first), jnp.float32)))

    return jax.tree.map(add, *networks)
