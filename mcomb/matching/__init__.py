"""Matching the units of one network to those of another: three methods behind one function, `match`."""

from collections.abc import Callable
from typing import Any

from mcomb.base import Apply, Inputs, Labels, Params, UserError, brief
from mcomb.matching.activations import match_activations
from mcomb.matching.core import Matching
from mcomb.matching.straight_through import match_straight_through
from mcomb.matching.weights import match_weights
from mcomb.objectives import Objective, cross_entropy
from mcomb.symmetry.spec import PermutationSpec

MATCHERS: dict[str, tuple[Callable[..., Matching], tuple[str, ...]]] = {
    "weights": (match_weights, ("seed",)),
    "activations": (match_activations, ("apply", "inputs")),
    "ste": (match_straight_through, ("apply", "inputs", "labels", "loss", "seed")),  # a straight-through estimator
}
"""For each name of a matcher its function, and what of `match` it takes besides the spec and the two networks."""


def match(
    spec: PermutationSpec,
    a: Params,
    b: Params,
    apply: Apply | None = None,
    inputs: Inputs | None = None,
    labels: Labels = None,
    *,
    matcher: str = "weights",
    loss: Objective = cross_entropy,
    seed: int = 0,
) -> Matching:
    """The matching of network `b` to network `a`: `spec.apply(matching.perms, b)` has its units in the order of A's.

    matcher="weights" compares weights and needs no data, "activations" also needs `apply` and `inputs`, and "ste"
    (straight-through estimator) needs `labels` as well, and the `loss` if it is not that of a classifier.
    """
    if matcher not in MATCHERS:
        raise UserError(f"there is no matcher {brief(matcher)}: choose from {', '.join(MATCHERS)}")
    function, names = MATCHERS[matcher]
    given: dict[str, Any] = {"apply": apply, "inputs": inputs, "labels": labels, "loss": loss, "seed": seed}
    needs = {name: given[name] for name in names}
    if missing := [name for name, value in needs.items() if value is None]:
        raise UserError(f"the matcher {matcher} needs {' and '.join(missing)}: give them too, or match by weights")
    return function(spec, a, b, **needs)
