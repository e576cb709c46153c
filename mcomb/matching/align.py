"""Align two networks: match the units of B to those of A and permute B accordingly."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mcomb.errors import UserError, brief
from mcomb.evaluation.objectives import Objective, cross_entropy
from mcomb.matching.matchers import Matcher, as_matcher
from mcomb.matching.matching import Matching
from mcomb.symmetry.derive import given_or_derived
from mcomb.symmetry.matrix_groups import SymmetrySpec
from mcomb.symmetry.null_space import first_examples
from mcomb.symmetry.spec import PermutationSpec
from mcomb.trees import Apply, Inputs, Labels, Params, in_dtype_of, is_inexact, map_named, named_leaves, require_alike

TREE_NAMES = ("the network", "the tree")


@dataclass(frozen=True, repr=False)
class Alignment:
    """Network B with its units permuted to match A's.

    Attributes:
        params: B's parameters, permuted. They compute the same function as before.
        matching: The permutations, and how close B's weights get to A's.
        spec: The symmetries that the permutations belong to.
        rounding: The largest change of an output on the first inputs, relative to its largest entry. Permutations are
            exact, so it is measured for `groups="all"` only.

    Examples:
        >>> aligned = mcomb.align(apply, a, b, x)
        >>> list(aligned.matching.perms), aligned.params["up"].shape
        (['up'], (64, 128))
    """

    params: Params
    matching: Matching
    spec: PermutationSpec
    rounding: float = 0.0

    def transport(self, tree: Params, *, kind: str = "update") -> Params:
        """Carry a tree that belongs to B's weights over to the aligned network, and therefore to A.

        Fine-tuned B minus B is an update; multiply LoRA factors out first. Momentum and Adam's first moments are
        gradients. Squared gradients, such as Adam's second moments, follow permutations only. With other groups, let
        the optimizer estimate them again.

        Args:
            tree: A tree with B's leaves.
            kind: "update" for a difference of weights, or "gradient" for a derivative by the weights. Permutations and
                rotations move both in the same way; scales and invertible matrices move them inversely.

        Returns:
            The tree in A's units. `aligned.params` plus a carried update computes the same function as B plus the
            update.

        Raises:
            UserError: The tree does not have B's leaves, or the kind is unknown.

        Examples:
            >>> tuned = mcomb.fine_tune(apply, b, x, y, steps=20).params
            >>> update = jax.tree.map(jnp.subtract, tuned, b)
            >>> transferred = jax.tree.map(jnp.add, a, aligned.transport(update))
        """
        if kind not in ("update", "gradient"):
            raise UserError(f"Unknown kind {brief(kind)}: choose update or gradient.")
        require_alike("The network and the tree to carry", named_leaves(self.params), named_leaves(tree), TREE_NAMES)
        perms = self.matching.perms
        if not isinstance(self.spec, SymmetrySpec):
            return self.spec.apply(perms, tree)
        back = self.spec.invert(perms)
        if kind == "gradient":
            floats = {name: leaf for name, leaf in named_leaves(self.params).items() if is_inexact(leaf)}
            tangents = named_leaves(tree)

            def move_back(own: Params) -> Params:
                moved = self.spec.apply(back, map_named(own.get, self.params))
                return {name: leaf for name, leaf in named_leaves(moved).items() if name in own}

            (carried,) = jax.vjp(move_back, floats)[1]({name: jnp.asarray(tangents[name]) for name in floats})
            return map_named(carried.get, tree)
        after = jax.tree.map(_widen, self.params)
        before = self.spec.apply(back, after)
        moved = self.spec.apply(perms, jax.tree.map(np.add, before, jax.tree.map(_widen, tree)))
        return jax.tree.map(lambda new, old, leaf: in_dtype_of(leaf, new - old), moved, after, tree)

    def __repr__(self) -> str:
        perms = [np.asarray(self.matching.perms[name]) for name in self.spec.sizes]
        orders = [perm for perm in perms if np.issubdtype(perm.dtype, np.integer)]
        moved = sum(int((perm != np.arange(perm.shape[-1])).sum()) for perm in orders)
        units, spaces = sum(perm.size for perm in orders), len(perms) - len(orders)
        turned = f"{spaces} space{'s' * (spaces > 1)} rotated, " if spaces else ""
        rounding = f", rounding {self.rounding:.2g}" if self.rounding else ""
        product = f"inner product with A {self.matching.objective:.4g}"
        return f"Alignment({turned}{moved:,} of {units:,} units moved, {product}{rounding})"


def _widen(leaf: Any) -> np.ndarray:
    return np.asarray(leaf, float) if is_inexact(leaf) else np.asarray(leaf)


def align(
    apply: Apply,
    a: Params,
    b: Params,
    inputs: Inputs,
    labels: Labels = None,
    *,
    matcher: str | Matcher = "weights",
    groups: str = "permutations",
    spec: PermutationSpec | None = None,
    loss: Objective = cross_entropy,
) -> Alignment:
    """Permute the units of network `b` to match those of network `a`.

    With `groups="all"`, B also moves by all other symmetries that the network has: rotations of a residual stream,
    invertible matrices of heads, scales and signs. B then has A's norm gains and A's scales.

    Args:
        apply: The function that both networks belong to, called as `apply(params, inputs)`.
        a: Parameters of the network that stays unchanged.
        b: Parameters of the network whose units are permuted.
        inputs: Example inputs. Weight matching reads only their shapes.
        labels: Labels of the inputs, for matchers that minimise the loss.
        matcher: A name (`"weights"`, `"activations"`, `"straight_through"`) or a configured matcher, such as
            `mcomb.weights(restarts=8)`.
        groups: "permutations" or "all"; see `derive_spec`.
        spec: The symmetries of the network; derived from `apply` by default. Replaces `groups`.
        loss: The loss, for matchers that minimise it.

    Returns:
        The alignment. `.params` is B with its units in the order of A's.

    Raises:
        UserError: The networks do not fit each other or the spec, or the matcher lacks data.

    Examples:
        >>> aligned = mcomb.align(apply, a, b, x)
        >>> aligned
        Alignment(125 of 128 units moved, inner product with A 129.1)
        >>> for params in (b, aligned.params):
        ...     midpoint = mcomb.combine(a, params, 0.5)
        ...     print(mcomb.score(apply, midpoint, x_test, y_test))
        Metrics(loss=0.5788, accuracy=0.8928)
        Metrics(loss=0.3202, accuracy=0.9012)
    """
    spec = given_or_derived(spec, apply, a, inputs, groups)
    matching = as_matcher(matcher).match(spec, a, b, apply=apply, inputs=inputs, labels=labels, loss=loss)
    few = first_examples(inputs) if isinstance(spec, SymmetrySpec) else None
    rounding = spec.rounding(apply, b, few, matching.perms) if isinstance(spec, SymmetrySpec) else 0.0
    return Alignment(spec.apply(matching.perms, b), matching, spec, rounding)
