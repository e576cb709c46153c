"""Canonical forms: the elements of a symmetry group that fold a network's gains and balance its weights."""

from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from mcomb.errors import UserError
from mcomb.symmetry.places import Place, part_at, unit_rows
from mcomb.trees import Array, Params, is_inexact, named_leaves

if TYPE_CHECKING:
    from mcomb.symmetry.matrix_groups import Element, Scaling, SymmetrySpec

RANK = 1e-6  # singular values of a head below this fraction of the norm are not balanced
NEWTON_STEPS = 50  # at most; the problem of each unit is convex
VISITS, CONVERGED = 500, 1e-9  # visits of all scales, and the relative change that ends them
SMALLEST = 1e-150  # keeps the logarithms of norms finite


def folding(spec: "SymmetrySpec", params: Params) -> "Element":
    """Return the element that sets the gains of norms to 1, or to −1 where a factor must be positive."""
    leaves, element = named_leaves(params), spec.identity()
    for name, own in spec.scalings.items():
        if own.gain:
            gain = part_at(spec, own.gain, np.asarray(leaves[own.gain.leaf], float))
            require_gain(own.gain, gain)
            element[name] = 1 / (gain if own.values == "nonzero" else np.abs(gain))
    return element


def require_gain(place: Place, gain: Array) -> None:
    """Raise an error if a gain has zeros."""
    if not np.all(gain):
        raise UserError(
            f"The gain {place.leaf} is 0 for some units, so that no rotation can mix them with others: set it to a "
            'small number, or use groups="permutations".'
        )


def balancing(spec: "SymmetrySpec", params: Params) -> "Element":
    """Return the element that folds gains, and balances spaces of invertible matrices and scales.

    For invertible matrices, such as those of queries and keys, let X be the weights that write into the space, and Y
    the weights that read from it, with a column for each unit. The function depends on X Yᵀ = P Σ Rᵀ, and the balanced
    weights are P Σ^½ and R Σ^½.
    """
    element = folding(spec, params)
    wide = {name: np.asarray(x, float) if is_inexact(x) else np.asarray(x) for name, x in named_leaves(params).items()}
    folded: Any = spec.apply(element, wide)
    for name, group in spec.groups.items():
        if group.is_invertible:
            writers, readers = (
                [unit_rows(spec, place, folded[place.leaf]) for place, power in group.powers.items() if power == sign]
                for sign in (1, -1)
            )
            matrices = _balanced(np.concatenate(writers, -1), np.concatenate(readers, -1))
            element[name] = matrices.reshape(element[name].shape)
    scales = {
        name: own
        for name, own in spec.scalings.items()
        if own.gain is None and own.values != "sign" and min(own.powers.values()) < 0 < max(own.powers.values())
    }
    for _ in range(VISITS if scales else 0):  # the sum of all squared weights is convex, and falls with each visit
        largest = 1.0
        for name, own in scales.items():
            factors = _least_factors(spec, own, folded).reshape(element[name].shape)
            element[name] = element[name] * factors
            folded = spec.apply(spec.identity() | {name: factors}, folded)
            largest = max(largest, factors.max(), 1 / factors.min())
        if largest < 1 + CONVERGED:
            break
    return element


def _balanced(
    writers: Float[np.ndarray, "batch n weights"], readers: Float[np.ndarray, "batch n others"]
) -> Float[np.ndarray, "batch n n"]:
    """Return matrices M for which M · writers and M⁻ᵀ · readers have orthogonal rows of equal norms.

    A small multiple of the identity among the weights keeps heads of low rank invertible.
    """
    n = writers.shape[1]

    def triangle(rows: np.ndarray) -> np.ndarray:
        floor = RANK * np.linalg.norm(rows, axis=(1, 2), keepdims=True) + SMALLEST
        return np.linalg.qr(np.concatenate([rows, floor * np.eye(n)], -1).swapaxes(-1, -2))[1]

    reading = triangle(readers)
    _, sigma, vt = np.linalg.svd(triangle(writers) @ reading.swapaxes(-1, -2))
    return (vt / np.sqrt(sigma)[..., None]) @ reading


def _least_factors(spec: "SymmetrySpec", scaling: "Scaling", leaves: Params) -> Float[np.ndarray, "batch n"]:
    """Return the positive factor of each unit that minimises the sum of its squared weights.

    With squared norms w_p of the places of power p, the sum Σ w_p s^2p is convex in log s. Newton's method stops at its
    minimum.
    """
    norms: dict[float, Any] = {}
    for place, power in scaling.powers.items():
        norms[power] = norms.get(power, SMALLEST) + (unit_rows(spec, place, leaves[place.leaf]) ** 2).sum(-1)
    logs, powers = np.log(np.stack([*norms.values()])), np.array([*norms])[:, None, None]
    x = np.zeros(logs.shape[1:])
    for _ in range(NEWTON_STEPS):
        exponents = logs + 2 * powers * x
        terms = np.exp(exponents - exponents.max(0))
        step = (powers * terms).sum(0) / (2 * powers**2 * terms).sum(0)
        x -= np.clip(step, -1, 1)
        if np.abs(step).max() < 1e-12:
            break
    return np.exp(x)
