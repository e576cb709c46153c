"""Configure matchers, which match the units of network B to those of network A."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mcomb.errors import UserError, brief
from mcomb.evaluation.objectives import Objective, cross_entropy
from mcomb.matching.activations import match_activations, match_groups_by_activations
from mcomb.matching.learned_groups import match_by_learning
from mcomb.matching.matching import Matching
from mcomb.matching.procrustes import match_groups
from mcomb.matching.straight_through import match_straight_through
from mcomb.matching.weights import match_weights
from mcomb.runtime.batching import BATCH
from mcomb.symmetry.matrix_groups import SymmetrySpec
from mcomb.symmetry.spec import Perms, PermutationSpec
from mcomb.trees import Apply, Inputs, Labels, Params


@dataclass(frozen=True)
class Matcher:
    """A way to match units, with its options.

    Attributes:
        name: The name to display.
        function: Called as `function(spec, a, b, **data, **options)`; returns a `Matching`.
        needs: The data that the function takes, among `apply`, `inputs`, `labels` and `loss`.
        options: Further keyword arguments of the function.
        mixed: The function for a `SymmetrySpec`, which takes the same data and options, or None.

    Examples:
        >>> matcher = mcomb.weights(restarts=8)
        >>> mcomb.align(apply, a, b, x, matcher=matcher)
        Alignment(125 of 128 units moved, inner product with A 129.1)
    """

    name: str
    function: Callable[..., Matching]
    needs: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    mixed: Callable[..., Matching] | None = None

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r:.50}' for name, value in self.options.items())})"

    def match(
        self,
        spec: PermutationSpec,
        a: Params,
        b: Params,
        *,
        apply: Apply | None = None,
        inputs: Inputs | None = None,
        labels: Labels = None,
        loss: Objective = cross_entropy,
    ) -> Matching:
        """Match the units of network `b` to those of network `a`.

        Args:
            spec: The symmetries of both networks.
            a: Parameters of the network that stays unchanged.
            b: Parameters of the network whose units move.
            apply: The function that both networks belong to.
            inputs: Example inputs.
            labels: Labels of the inputs, for matchers that minimise a loss.
            loss: The loss, for matchers that minimise one.

        Returns:
            The matching. `spec.apply(matching.perms, b)` is B with its units in the order of A's.

        Raises:
            UserError: The matcher needs data that are missing.

        Examples:
            >>> matching = matcher.match(aligned.spec, a, b)
            >>> permuted = aligned.spec.apply(matching.perms, b)
        """
        given = {"apply": apply, "inputs": inputs, "labels": labels, "loss": loss}
        data = {name: given[name] for name in self.needs}
        if missing := [name for name, value in data.items() if value is None]:
            raise UserError(
                f"Cannot match by {self.name} without {' and '.join(missing)}: pass them, or match by weights."
            )
        function = self.function
        if isinstance(spec, SymmetrySpec):
            if not spec.groups and not spec.scalings:
                spec = spec.permutations
            elif self.mixed is None:
                raise UserError(
                    f'Cannot match by {self.name} beyond permutations: match by weights, or use groups="permutations".'
                )
            else:
                function = self.mixed
        return function(spec, a, b, **data, **self.options)


def weights(*, restarts: int = 1, seed: int = 0, start: Perms | None = None, coarse: bool = False) -> Matcher:
    """Match by weights: permutation coordinate descent, Git Re-Basin's first algorithm.

    This matcher needs no data.

    Args:
        restarts: Number of descents, from different starting points and in different orders; the best result counts.
        seed: Seed of the visiting orders and random starting points.
        start: Permutations to start from instead of the identity.
        coarse: Precede each descent by a cheaper one on the centres of convolution kernels.

    Returns:
        A matcher for `align`.

    Examples:
        >>> mcomb.align(apply, a, b, x, matcher=mcomb.weights(restarts=8))
        Alignment(125 of 128 units moved, inner product with A 129.1)
    """
    options: dict[str, Any] = {"restarts": restarts, "seed": seed}
    options |= {"start": start} if start is not None else {}
    options |= {"coarse": coarse} if coarse else {}
    return Matcher("weights", match_weights, options=options, mixed=match_groups)


def activations(*, inner_products: bool = False, batch_size: int = BATCH) -> Matcher:
    """Match by activations: maximise the correlation between matched units over the inputs.

    Args:
        inner_products: Maximise inner products of activations instead of correlations.
        batch_size: Number of inputs that a device processes at once.

    Returns:
        A matcher for `align`.

    Examples:
        >>> mcomb.align(apply, a, b, x, matcher=mcomb.activations(inner_products=True))
        Alignment(127 of 128 units moved, inner product with A 112)
    """
    options = {"inner_products": inner_products, "batch_size": batch_size}
    return Matcher("activations", match_activations, ("apply", "inputs"), options, mixed=match_groups_by_activations)


def straight_through(*, steps: int = 100, learning_rate: float = 0.01, batch_size: int = 100, seed: int = 0) -> Matcher:
    """Learn the matching: gradient descent on the loss of the midpoint, through a straight-through estimator.

    This is Git Re-Basin's third algorithm. It needs labels and holds out the last tenth of the data.

    Args:
        steps: Number of gradient steps. Each one matches by weights once.
        learning_rate: Step length, relative to the norm of A's weights.
        batch_size: Number of examples in a minibatch.
        seed: Seed of the minibatches and of weight matching.

    Returns:
        A matcher for `align`.

    Examples:
        >>> mcomb.align(apply, a, b, x, y, matcher=mcomb.straight_through(steps=20))
        Alignment(125 of 128 units moved, inner product with A 128.8)
    """
    options = {"steps": steps, "learning_rate": learning_rate, "batch_size": batch_size, "seed": seed}
    needs = ("apply", "inputs", "labels", "loss")
    return Matcher("straight_through", match_straight_through, needs, options, mixed=match_by_learning)


MATCHERS: dict[str, Callable[..., Matcher]] = {
    "weights": weights,
    "activations": activations,
    "ste": straight_through,  # as the flags call it; `as_matcher` takes both names
}


def as_matcher(matcher: str | Matcher) -> Matcher:
    """Return the matcher with this name and default options; return matchers unchanged."""
    if isinstance(matcher, Matcher):
        return matcher
    if matcher == "straight_through":
        return straight_through()
    if callable(matcher) and matcher in MATCHERS.values():
        name = getattr(matcher, "__name__", "")
        raise UserError(f"The matcher {name} is a function: call it, as in mcomb.{name}().")
    if not isinstance(matcher, str) or matcher not in MATCHERS:
        names = ", ".join(MATCHERS).replace("ste", "straight_through")
        raise UserError(f"Unknown matcher {brief(matcher)}: choose from {names}, or configure one.")
    return MATCHERS[matcher]()
