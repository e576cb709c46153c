"""The permutation symmetries of a network: which axes of which parameters must move together.

`perms` is a plain dict from a permutation's name to an index array; applying one takes `axis[perm]`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PRNGKeyArray

from mcomb.base import Apply, Array, Params, UserError, map_named, named_leaves

Perms = dict[str, Int[Array, "_"]]
Axes = dict[str, tuple[str | None, ...]]


@dataclass(frozen=True)
class PermutationSpec:
    """For each leaf, by name, the permutation of each of its axes (None: stays); and each one's size."""

    axes: Axes
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, params: Params, axes: Axes) -> "PermutationSpec":
        """The spec that `axes` describes, its sizes read off `params` (arrays or shapes)."""
        leaves = named_leaves(params)
        sizes: dict[str, int] = {}
        for name, names in axes.items():
            for size, perm in zip(np.shape(leaves.get(name, ())), names, strict=False):
                if perm is not None:
                    sizes.setdefault(perm, size)
        spec = cls(axes, sizes)
        spec.validate(params)
        return spec

    def validate(self, params: Params) -> None:
        """Raises an error that names the leaf unless every axis of every leaf is accounted for and fits."""
        leaves = named_leaves(params)
        for name in sorted(leaves.keys() | self.axes.keys()):
            if name not in self.axes:
                raise UserError(f"the permutation spec says nothing of {name}: add its axes")
            if name not in leaves:
                raise UserError(f"the permutation spec names {name}, which the parameters lack: remove it")
            shape, perms = np.shape(leaves[name]), self.axes[name]
            if len(shape) != len(perms):
                raise UserError(f"the permutation spec gives {name} {len(perms)} axes, but its shape is {shape}")
            for axis, (size, perm) in enumerate(zip(shape, perms, strict=True)):
                if perm is not None and self.sizes.get(perm) != size:
                    raise UserError(
                        f"axis {axis} of {name} has {size} entries, but permutation {perm} has {self.sizes.get(perm)}"
                    )

    def places(self, perm: str) -> list[tuple[str, int]]:
        """The (leaf, axis) pairs that a permutation acts on."""
        return [(name, axis) for name, perms in self.axes.items() for axis, p in enumerate(perms) if p == perm]

    def apply(self, perms: Perms, params: Params) -> Params:
        """The permuted parameters: the same function, its hidden units in another order."""

        def permuted(name: str, leaf: Array) -> Array:
            for axis, perm in enumerate(self.axes[name]):
                if perm is not None:
                    leaf = jnp.take(leaf, jnp.asarray(perms[perm]), axis=axis)
            return leaf

        return map_named(permuted, params)

    def identity(self) -> Perms:
        """The permutations that change nothing."""
        return {name: np.arange(size) for name, size in self.sizes.items()}

    def random(self, key: PRNGKeyArray) -> Perms:
        """Uniformly random permutations."""
        seeds = jax.random.split(key, len(self.sizes))
        return {
            name: np.asarray(jax.random.permutation(seed, size))
            for seed, (name, size) in zip(seeds, self.sizes.items(), strict=True)
        }

    def invert(self, perms: Perms) -> Perms:
        """The permutations that undo `perms`."""
        return {name: np.argsort(np.asarray(perm)) for name, perm in perms.items()}

    def compose(self, p: Perms, q: Perms) -> Perms:
        """`p` after `q`: apply(compose(p, q), x) is apply(p, apply(q, x))."""
        return {name: np.asarray(q[name])[np.asarray(p[name])] for name in self.sizes}


def check_permuted(apply: Apply, params: Params, permuted: Params, inputs: Array) -> None:
    """Raises an error unless both parameter trees compute the same function on `inputs`, to float tolerance."""
    with jax.default_matmul_precision("highest"):
        before, after = (np.asarray(jax.jit(apply)(tree, inputs)) for tree in (params, permuted))
    difference, scale = np.abs(before - after).max(), np.abs(before).max()
    if not difference <= 1e-3 * scale:
        raise UserError(
            f"the permuted network computes another function (logits differ by {difference:.2g} of {scale:.2g}): "
            "the permutation spec does not fit the model"
        )
