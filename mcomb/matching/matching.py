"""Define the result type and the objective of all matchers."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from mcomb.symmetry.matrix_groups import Element
from mcomb.symmetry.spec import Layout, Perms, PermutationSpec, require_spec
from mcomb.trees import Params, at_least_float32, is_inexact, named_leaves, require_alike, require_finite

WIDENED_ROWS = 1024  # rows of half precision that are converted to float32 at once


@dataclass(frozen=True, repr=False)
class Matching:
    """The permutations that match network B to network A, and how well they do it.

    Attributes:
        perms: Index arrays for `spec.apply(perms, b)`, by the names of the permutations. For a `SymmetrySpec`, an
            element of its group.
        objective: The inner product of A's weights with B's permuted weights; higher is better.
        trace: The objective at the start and after each sweep over all permutations, or after each gradient step.
        tried: The final objective of each restart; the matching is that of the best one.
        solved: The number of visits to a permutation that solved its assignment problem.
        skipped: The number of visits that were skipped because nothing had changed.
        by_weights: The permutations that activation matching left to weight matching.
        losses: For matchers that minimise a loss, the held-out loss of the midpoint of A and permuted B, for each
            entry of `trace`.

    Examples:
        >>> matching = mcomb.align(apply, a, b, x).matching
        >>> matching.perms["up"].shape, matching.trace[0] < matching.objective
        ((128,), True)
    """

    perms: Element
    objective: float
    trace: tuple[float, ...]
    tried: tuple[float, ...] = ()
    solved: int = 0
    skipped: int = 0
    by_weights: tuple[str, ...] = ()
    losses: tuple[float, ...] = ()

    def __repr__(self) -> str:
        names = ", ".join(self.perms) or "no permutations"
        return f"Matching({names}: inner product with A {self.objective:.4g})"


def check_networks(spec: PermutationSpec, a: Params, b: Params, start: Element | None = None) -> None:
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


def weight_parts(spec: PermutationSpec, a: Params, b: Params, widen: bool = True) -> Iterator[WeightPart]:
    """Yield the weights of A and B part by part, without leaves that are not floats.

    They are in float32 or wider. Without `widen`, half precision stays as it is and arrays that are mapped to memory
    are not read. Complex weights become pairs of reals along an additional axis.
    """
    leaves_a, leaves_b = named_leaves(a), named_leaves(b)
    for name, layouts in spec.axes.items():
        both = leaves_a[name], leaves_b[name]
        if all(map(is_inexact, both)):
            dtype = np.result_type(*([np.float32] if widen else []), *map(jnp.result_type, both))
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
        for pair in widened(np.atleast_1d(a), np.atleast_1d(permuted)):
            total += float(np.vecdot(*pair).sum(dtype=np.float64))
    return total


def widened(*arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield arrays in float32 or wider: whole, or a few rows at a time if they are in half precision."""
    size = len(arrays[0]) if arrays[0].dtype.itemsize >= 4 else WIDENED_ROWS
    for start in range(0, len(arrays[0]), max(1, size)):
        yield tuple(at_least_float32(array[start : start + size]) for array in arrays)
