"""Align two networks: match the units of B to those of A and permute B accordingly."""

from dataclasses import dataclass

import numpy as np

from mcomb.evaluation.objectives import Objective, cross_entropy
from mcomb.matching.matchers import Matcher, as_matcher
from mcomb.matching.matching import Matching
from mcomb.symmetry.derive import derive_spec
from mcomb.symmetry.spec import PermutationSpec
from mcomb.trees import Apply, Inputs, Labels, Params


@dataclass(frozen=True, repr=False)
class Alignment:
    """Network B with its units permuted to match A's.

    Attributes:
        params: B's parameters, permuted. They compute the same function as before.
        matching: The permutations, and how close B's weights get to A's.
        spec: The symmetries that the permutations belong to.

    Examples:
        >>> aligned = mcomb.align(apply, a, b, x)
        >>> aligned.params, aligned.matching.perms
    """

    params: Params
    matching: Matching
    spec: PermutationSpec

    def __repr__(self) -> str:
        perms = self.matching.perms.values()
        moved = sum(int((np.asarray(perm) != np.arange(np.shape(perm)[-1])).sum()) for perm in perms)
        units = sum(np.size(perm) for perm in perms)
        before, after = self.matching.trace[0], self.matching.objective
        return f"Alignment({moved:,} of {units:,} units moved, inner product with A from {before:.4g} to {after:.4g})"


def align(
    apply: Apply,
    a: Params,
    b: Params,
    inputs: Inputs,
    labels: Labels = None,
    *,
    matcher: str | Matcher = "weights",
    spec: PermutationSpec | None = None,
    loss: Objective = cross_entropy,
) -> Alignment:
    """Permute the units of network `b` to match those of network `a`.

    Args:
        apply: The function that both networks belong to, called as `apply(params, inputs)`.
        a: Parameters of the network that stays unchanged.
        b: Parameters of the network whose units are permuted.
        inputs: Example inputs. Weight matching reads only their shapes.
        labels: Labels of the inputs, for matchers that minimise the loss.
        matcher: A name (`"weights"`, `"activations"`, `"ste"`) or a configured matcher, such as
            `mcomb.weights(restarts=8)`.
        spec: The symmetries of the network; derived from `apply` by default.
        loss: The loss, for matchers that minimise it.

    Returns:
        The alignment. `.params` is B with its units in the order of A's.

    Raises:
        UserError: The networks do not fit each other or the spec, or the matcher lacks data.

    Examples:
        >>> aligned = mcomb.align(apply, a, b, x)
        >>> midpoint = mcomb.combine(a, aligned.params, 0.5)
    """
    if spec is None:
        spec = derive_spec(apply, a, inputs)
    matching = as_matcher(matcher).match(spec, a, b, apply=apply, inputs=inputs, labels=labels, loss=loss)
    return Alignment(spec.apply(matching.perms, b), matching, spec)
