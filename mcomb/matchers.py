"""The three ways to match one network's units to another's, behind one call."""

from typing import Any

from jaxtyping import Int

from mcomb.activations import match_activations
from mcomb.base import Apply, Array, Params, UserError
from mcomb.permute import PermutationSpec
from mcomb.ste import match_straight_through
from mcomb.weights import Matching, match_weights

MATCHERS = ("weights", "activations", "ste")


def match(
    spec: PermutationSpec,
    a: Params,
    b: Params,
    apply: Apply | None = None,
    inputs: Array | None = None,
    labels: Int[Array, "n"] | None = None,
    *,
    matcher: str = "weights",
    seed: int = 0,
) -> Matching:
    """The matching of `b` to `a` by their weights, by their activations, or by a straight-through estimator."""
    if matcher not in MATCHERS:
        raise UserError(f"there is no matcher {matcher!r}: choose from {', '.join(MATCHERS)}")
    if matcher == "weights":
        return match_weights(spec, a, b, seed=seed)
    needs: dict[str, Any] = {"apply": apply, "inputs": inputs}
    if matcher == "ste":
        needs["labels"] = labels
    if missing := [name for name, value in needs.items() if value is None]:
        raise UserError(f"the matcher {matcher} needs {' and '.join(missing)}: give them too, or match by weights")
    if matcher == "activations":
        return match_activations(spec, a, b, **needs)
    return match_straight_through(spec, a, b, **needs, seed=seed)
