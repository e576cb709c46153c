"""Merge leaf by leaf: averages, spherical interpolation, and task vectors (task arithmetic, TIES, DARE).

A task vector is the difference between a network and the base that it was fine-tuned from.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from mcomb.errors import UserError
from mcomb.evaluation.batch_statistics import estimate_statistics
from mcomb.keys import stream
from mcomb.merging.shares import Shares, resolve_shares
from mcomb.trees import Apply, Inputs, Params, at_least_float32, is_inexact, map_named, named_leaves

Vector = Float[np.ndarray, "n"]
NEARLY_PARALLEL = 1e-3  # sine of the angle between two leaves below which their arc is a line up to rounding


class Leaf(NamedTuple):
    """A leaf of all networks, flattened, in float32 or wider."""

    name: str
    values: Sequence[Vector]
    shares: Sequence[float]
    base: Any = None

    def task_vectors(self) -> list[Vector]:
        """Return the differences from the base."""
        return [values - self.base for values in self.values]


@dataclass(frozen=True)
class LeafByLeaf:
    """A merge method that needs one leaf of all networks at a time, so that it works for files larger than memory.

    Attributes:
        rule: Called as `rule(leaf, **options)` with a `Leaf`; returns the merged values.
    """

    rule: Callable[..., Vector]

    def __call__(
        self,
        apply: Apply,
        networks: Sequence[Params],
        inputs: Inputs,
        *,
        base: Params | None = None,
        shares: Shares = None,
        **options: Any,
    ) -> Params:
        """Merge networks, with running statistics re-estimated on the inputs."""
        merged = self.merge_networks(networks, base, shares=shares, **options)
        return estimate_statistics(apply, merged, inputs)

    def merge_networks(
        self, networks: Sequence[Params], base: Params | None = None, *, shares: Shares = None, **options: Any
    ) -> Params:
        """Merge all leaves of networks."""
        trees = jax.device_get([*networks, *([] if base is None else [base])])  # they may be on different devices
        of_leaf = resolve_shares(shares, named_leaves(trees[0]), len(networks))

        def merge(name: str, *leaves: Any) -> Any:
            return self.merge_leaf(name, leaves[: len(networks)], of_leaf[name], *leaves[len(networks) :], **options)

        return map_named(merge, *trees)

    def merge_leaf(
        self, name: str, leaves: Sequence[Any], shares: Sequence[float], base: Any = None, **options: Any
    ) -> Any:
        """Merge one leaf, in its dtype; return the first network's leaf if it is not a float."""
        if not is_inexact(leaves[0]):
            return leaves[0]
        first = np.asarray(leaves[0])
        values = [_flatten(leaf) for leaf in leaves]
        merged = self.rule(Leaf(name, values, shares, None if base is None else _flatten(base)), **options)
        if np.iscomplexobj(first):
            merged = merged.view(np.result_type(merged.dtype, np.complex64))
        return merged.astype(first.dtype).reshape(first.shape)


def average_leaf(leaf: Leaf) -> Vector:
    """Return the average weighted by the shares."""
    return _weighted_sum(leaf.shares, leaf.values)


def slerp_leaf(leaf: Leaf) -> Vector:
    """Return the point on the arc between two leaves, or on the line if they are nearly parallel or one is zero."""
    if len(leaf.values) != 2:
        raise UserError(f"slerp merges two networks, not {len(leaf.values)}: merge by average.")
    (a, b), weights = leaf.values, tuple(leaf.shares)
    lengths = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    angle = math.acos(min(1.0, max(-1.0, float(np.dot(a, b)) / lengths))) if lengths else 0.0
    if math.sin(angle) > NEARLY_PARALLEL:
        weights = tuple(math.sin(share * angle) / math.sin(angle) for share in leaf.shares)
    return _weighted_sum(weights, (a, b))


def task_arithmetic_leaf(leaf: Leaf, *, scale: float) -> Vector:
    """Return the base plus the sum of the task vectors."""
    return _from_base(leaf, scale, leaf.task_vectors())


def ties_leaf(leaf: Leaf, *, scale: float, density: float) -> Vector:
    """Return the base plus the mean of the trimmed task vectors, over the networks that agree on the sign."""
    return _from_base(leaf, scale, [_trim(vector, density) for vector in leaf.task_vectors()], elect=True)


def dare_leaf(leaf: Leaf, *, scale: float, density: float, elect: bool, seed: int) -> Vector:
    """Drop random entries of the task vectors, rescale the others, and add the vectors to the base."""
    vectors = [_drop(vector, density, leaf.name, i, seed) for i, vector in enumerate(leaf.task_vectors())]
    return _from_base(leaf, scale, vectors, elect)


def _flatten(leaf: Any) -> Vector:
    """Return the entries of a leaf, in float32 or wider, with complex numbers as pairs of reals."""
    values = np.ascontiguousarray(at_least_float32(np.asarray(leaf))).reshape(-1)
    return values.view(values.real.dtype) if np.iscomplexobj(values) else values


def _from_base(leaf: Leaf, scale: float, vectors: Sequence[Vector], elect: bool = False) -> Vector:
    """Return the base plus the merged task vectors."""
    if elect:
        return leaf.base + scale * _elect(vectors, leaf.shares)
    weights = [len(vectors) * share for share in leaf.shares]  # 1 each if they are equal
    return leaf.base + scale * _weighted_sum(weights, vectors)


def _trim(vector: Vector, density: float) -> Vector:
    """Return the entries of largest magnitude, and zero for the others."""
    count = math.ceil(density * vector.size)
    if count == vector.size:
        return vector
    sizes = np.abs(vector)
    return np.where(sizes >= np.partition(sizes, -count)[-count], vector, 0)


def _drop(vector: Vector, density: float, name: str, network: int, seed: int) -> Vector:
    """Return a random fraction of the entries, divided by this fraction, and zero for the others."""
    rng = np.random.default_rng(np.asarray(jax.random.key_data(stream(seed, "dare", name, network))))
    return np.where(rng.random(vector.size, np.float32) < density, vector / density, 0)


def _elect(vectors: Sequence[Vector], shares: Sequence[float]) -> Vector:
    """Return the weighted mean of the entries that have the sign of the weighted sum, without zeros."""
    sign = np.sign(_weighted_sum(shares, vectors))
    agreeing = [(np.sign(vector) == sign) & (vector != 0) for vector in vectors]
    total = _weighted_sum(shares, [vector * agrees for vector, agrees in zip(vectors, agreeing, strict=True)])
    weights = _weighted_sum(shares, [agrees.astype(total.dtype) for agrees in agreeing])
    return np.divide(total, weights, out=np.zeros_like(total), where=weights > 0)


def _weighted_sum(weights: Sequence[float], vectors: Sequence[Vector]) -> Vector:
    total = weights[0] * vectors[0]
    for weight, vector in zip(weights[1:], vectors[1:], strict=True):
        total += weight * vector
    return total
