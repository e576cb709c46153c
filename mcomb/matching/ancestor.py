"""Recognise networks that share an ancestor, whose units need no matching."""

from typing import Any, NamedTuple

import numpy as np

from mcomb.matching.matchers import Matcher
from mcomb.matching.matching import Matching, check_networks, inner_product, weight_parts, widened
from mcomb.symmetry.spec import PermutationSpec
from mcomb.trees import Params

RELATED = 0.9  # least cosine similarity of all units of networks that share an ancestor


class Match(NamedTuple):
    """A matching, or the identity if the networks share an ancestor.

    `similarity` is the least cosine similarity of a unit of B with the same unit of A, over all their weights.
    """

    matching: Matching
    similarity: float
    is_skipped: bool


def match_unless_related(
    matcher: Matcher, spec: PermutationSpec, a: Params, b: Params, *, force: bool = False, **data: Any
) -> Match:
    """Match B's units to A's, unless each unit of B is already close to the same unit of A, or `force` is set."""
    check_networks(spec, a, b)
    similarity = least_similarity(spec, a, b)
    if similarity < RELATED or force:
        return Match(matcher.match(spec, a, b, **data), similarity, False)
    product = inner_product(spec, weight_parts(spec, a, b, widen=False), None)
    return Match(Matching(spec.identity(), product, (product,)), similarity, True)


def least_similarity(spec: PermutationSpec, a: Params, b: Params) -> float:
    """Return the least cosine similarity of a unit of B with the same unit of A; 1 if there are no units.

    Networks that were fine-tuned from one network keep its units, so that all similarities are high. A single pair of
    swapped units has a low similarity. Units without any weights do not count.
    """
    sums = {name: np.zeros((3, *spec.shape(name))) for name in spec.sizes}
    for labels, *both in weight_parts(spec, a, b, widen=False):
        if not any(label in spec.sizes for label in labels):
            continue
        start = 0
        for x, y in widened(*both):
            for axis, perm in enumerate(labels):
                if isinstance(perm, str) and perm in spec.sizes:
                    front = [*map(labels.index, spec.batched_over.get(perm, ())), axis]
                    place: list[Any] = [slice(None)] * len(front)
                    if 0 in front:
                        place[front.index(0)] = slice(start, start + len(x))
                    for i, (one, other) in enumerate(((x, y), (x, x), (y, y))):
                        sums[perm][(i, *place)] += _sum_products(one, other, front)
            start += len(x)
    least = 1.0
    for products, squares_a, squares_b in sums.values():
        lengths = np.sqrt(squares_a * squares_b)
        cosines = np.divide(products, lengths, out=np.zeros_like(lengths), where=lengths > 0)
        cosines[(squares_a == 0) & (squares_b == 0)] = 1
        least = min(least, float(cosines.min(initial=1)))
    return least


def _sum_products(x: np.ndarray, y: np.ndarray, kept: list[int]) -> np.ndarray:
    """Return the products of two arrays, summed over all axes but some, which come in the given order."""
    axes = list(range(x.ndim))
    return np.einsum(x, axes, y, axes, kept, optimize=False)
