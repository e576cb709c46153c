"""Merge several aligned networks into one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcomb.errors import UserError, brief, require_fraction, require_number
from mcomb.evaluation.objectives import Objective, cross_entropy
from mcomb.io.paths import AnyPath
from mcomb.matching.many import align_many
from mcomb.merging.average import require_networks
from mcomb.merging.fisher import fisher_average
from mcomb.merging.learned_shares import LearnedShares, learn_shares
from mcomb.merging.partial import PartlyMerged, merge_partly
from mcomb.merging.refit_regression import refit_average
from mcomb.merging.shares import Shares
from mcomb.merging.task_vectors import (
    LeafByLeaf,
    average_leaf,
    dare_leaf,
    slerp_leaf,
    task_arithmetic_leaf,
    ties_leaf,
)
from mcomb.symmetry.derive import derive_spec
from mcomb.symmetry.matrix_groups import SymmetrySpec
from mcomb.symmetry.spec import PermutationSpec, require_spec
from mcomb.trees import Apply, Inputs, Labels, Params, from_lists, require_alike, require_finite


@dataclass(frozen=True, repr=False)
class Merged:
    """One network made of several.

    Attributes:
        apply: The function of the merged network, called as `merged.apply(merged.params, inputs)`. Partial merging
            changes the function; all other methods keep it.
        params: The parameters.
        method: The method that merged the networks.
        details: Further results of the method, `LearnedShares` or `PartlyMerged`, or None.

    Examples:
        >>> merged = mcomb.merge(apply, (a, aligned.params), x, method="average")
        >>> merged.apply(merged.params, x_test).shape
        (597, 10)
    """

    apply: Apply
    params: Params
    method: "Method"
    details: Any = None

    def __repr__(self) -> str:
        return f"Merged(by {self.method!r})"


@dataclass(frozen=True)
class Method:
    """A way to merge networks, with its options.

    Attributes:
        name: The name to display.
        function: Called as `function(apply, networks, inputs, **data, **options)`; returns parameters.
        needs: The data that the function takes, among `labels`, `loss` and `spec`.
        options: Further keyword arguments of the function.
        base: Parameters of the network that all others were fine-tuned from, for methods that need it.

    Examples:
        >>> mcomb.refit(ridge=0.1)
        refit(ridge=0.1)
    """

    name: str
    function: Callable[..., Any]
    needs: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    base: Params | None = None

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r:.50}' for name, value in self.options.items())})"


def merge(
    apply: Apply,
    networks: Sequence[Params],
    inputs: Inputs,
    labels: Labels = None,
    *,
    method: str | Method = "learned",
    groups: str | None = None,
    spec: PermutationSpec | None = None,
    loss: Objective = cross_entropy,
) -> Merged:
    """Merge aligned networks into one.

    Use data that the networks were not trained on. All methods re-estimate running statistics (BatchNorm) on the
    inputs.

    Args:
        apply: The function that all networks belong to, called as `apply(params, inputs)`.
        networks: Parameters of two or more aligned networks.
        inputs: Inputs with examples along the first axis.
        labels: Labels with examples along the first axis; only `fisher` and `learned` need them.
        method: A name (`"average"`, `"slerp"`, `"fisher"`, `"refit"`, `"learned"`) or a configured method, such as
            `mcomb.refit(ridge=0.1)`, `mcomb.partial(budget=1.5)` or `mcomb.ties(base)`.
        groups: "permutations" or "all" to align the networks to the first one by weights, as `align_many` does. By
            default they are merged unaligned.
        spec: The symmetries of the network; derived from `apply` by default. Replaces the symmetries of
            `groups`.
        loss: The loss: a function of one example's output and label that returns a sum and a count.

    Returns:
        The merged network: `.apply` and `.params`.

    Raises:
        UserError: The networks, the data or the method do not fit together.

    Examples:
        >>> merged = mcomb.merge(apply, (a, aligned.params), x, method="refit")
        >>> mcomb.score(merged.apply, merged.params, x_test, y_test)
        Metrics(loss=0.2973, accuracy=0.9162)
        >>> merged = mcomb.merge(apply, (a, b), x, method="refit", groups="all")
    """
    chosen, labels = as_method(method), from_lists(labels)
    require_networks(networks)
    if chosen.base is not None:
        require_alike("The networks and their base", networks[0], chosen.base, ("network 0", "the base"))
        require_finite("the base", chosen.base)
    if "labels" in chosen.needs and labels is None:
        raise UserError(f"Cannot merge by {chosen.name} without labels: pass them, or merge by refit or average.")
    if groups is not None:
        if chosen.base is not None:
            raise UserError(f"{chosen.name} merges networks with a common base, which need no alignment: drop groups.")
        aligned = align_many(apply, networks, inputs, groups=groups, spec=spec)
        networks, spec = aligned.params, aligned.spec
    if "spec" in chosen.needs and spec is None:
        spec = derive_spec(apply, networks[0], inputs)
    if isinstance(spec, SymmetrySpec):
        spec = spec.permutations  # aligned networks are merged unit by unit
    if spec is not None:
        require_spec(spec)
        for network in networks:
            spec.validate(network)
    given = {"labels": labels, "loss": loss, "spec": spec, "base": chosen.base}
    found = chosen.function(apply, networks, inputs, **{name: given[name] for name in chosen.needs}, **chosen.options)
    if isinstance(found, LearnedShares):
        return Merged(apply, found.params, chosen, found)
    if isinstance(found, PartlyMerged):
        return Merged(found.apply, found.params, chosen, found)
    return Merged(apply, found, chosen)


def average(*, shares: Shares = None) -> Method:
    """Merge by averaging all weights.

    Args:
        shares: The share of B, from 0 to 1, or a share for each network. A mapping gives shares to layers, such as
            `{"layers.0-9": 0.3, "lm_head": 0}`; see docs/merging.md. Shares are equal by default.

    Returns:
        A method for `merge`.

    Examples:
        >>> mcomb.merge(apply, (a, aligned.params), x, method="average")
        Merged(by average())
        >>> merged = mcomb.merge(apply, (a, aligned.params), x, method=mcomb.average(shares=0.3))
    """
    return Method("average", LeafByLeaf(average_leaf), options=_given(shares=shares))


def slerp(*, shares: Shares = None) -> Method:
    """Merge two networks by spherical linear interpolation of each leaf (Shoemake 1985).

    The result lies on the arc between the leaves of A and B, so that it keeps their length.

    Args:
        shares: The share of B, or shares for layers, as for `average`.

    Returns:
        A method for `merge`.

    Examples:
        >>> merged = mcomb.merge(apply, (a, aligned.params), x, method=mcomb.slerp(shares=0.3))
        >>> mcomb.score(apply, merged.params, x_test, y_test)
        Metrics(loss=0.3002, accuracy=0.8995)
    """
    return Method("slerp", LeafByLeaf(slerp_leaf), options=_given(shares=shares))


def task_arithmetic(base: Params, *, scale: float = 1.0, shares: Shares = None) -> Method:
    """Add the differences of all networks from their base to the base (task arithmetic, Ilharco et al. 2023).

    Args:
        base: Parameters of the network that all networks were fine-tuned from.
        scale: Factor of the sum.
        shares: Shares of the networks, as for `average`. Equal shares weight each difference by 1.

    Returns:
        A method for `merge`.

    Raises:
        UserError: `scale` is not a finite number.

    Examples:
        >>> method = mcomb.task_arithmetic(c, scale=0.5)  # `tuned` are fine-tuned from C
        >>> merged = mcomb.merge(apply, tuned, x, method=method)
        >>> mcomb.score(apply, merged.params, x_test, y_test)
        Metrics(loss=0.2751, accuracy=0.9229)
    """
    return _with_base("task_arithmetic", task_arithmetic_leaf, base, shares, scale=scale)


def ties(base: Params, *, density: float = 0.2, scale: float = 1.0, shares: Shares = None) -> Method:
    """Merge differences from a base after resolving their conflicts (TIES, Yadav et al. 2023).

    In each leaf of each difference, keep the entries of largest magnitude. For each entry, elect the sign of the sum,
    and average the networks that have this sign. Add the result to the base.

    Args:
        base: Parameters of the network that all networks were fine-tuned from.
        density: The fraction of entries to keep. The paper trims the whole difference at once, and mcomb each leaf.
        scale: Factor of the merged difference.
        shares: Shares of the networks in sums and means, as for `average`.

    Returns:
        A method for `merge`.

    Raises:
        UserError: `density` or `scale` is out of range.

    Examples:
        >>> method = mcomb.ties(c, density=0.2)  # `tuned` are fine-tuned from C
        >>> merged = mcomb.merge(apply, tuned, x, method=method)
        >>> mcomb.score(apply, merged.params, x_test, y_test)
        Metrics(loss=0.2830, accuracy=0.9162)
    """
    return _with_base("ties", ties_leaf, base, shares, density=density, scale=scale)


def dare(
    base: Params,
    *,
    density: float = 0.1,
    scale: float = 1.0,
    elect: bool = False,
    shares: Shares = None,
    seed: int = 0,
) -> Method:
    """Drop random entries of the differences from a base, and rescale the others (DARE, Yu et al. 2024).

    The sum of the differences is then added to the base, as in task arithmetic.

    Args:
        base: Parameters of the network that all networks were fine-tuned from.
        density: The fraction of entries to keep. They are divided by this fraction.
        scale: Factor of the merged difference.
        elect: Elect signs and average the networks that have them, as TIES does.
        shares: Shares of the networks, as for `average`.
        seed: Seed of the choice of entries.

    Returns:
        A method for `merge`.

    Raises:
        UserError: `density` or `scale` is out of range.

    Examples:
        >>> method = mcomb.dare(c, density=0.1)  # `tuned` are fine-tuned from C
        >>> merged = mcomb.merge(apply, tuned, x, method=method)
        >>> mcomb.score(apply, merged.params, x_test, y_test)
        Metrics(loss=0.2956, accuracy=0.9179)
    """
    return _with_base("dare", dare_leaf, base, shares, density=density, scale=scale, elect=elect, seed=seed)


def _with_base(name: str, rule: Callable[..., Any], base: Params, shares: Shares, **options: Any) -> Method:
    """Return a method that needs a base, after checking its options."""
    if "density" in options:
        require_fraction(density=options["density"])
    require_number(scale=options["scale"])
    return Method(name, LeafByLeaf(rule), ("base",), options | _given(shares=shares), base)


def _given(**options: Any) -> dict[str, Any]:
    """Return the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def fisher() -> Method:
    """Merge by an average weighted by the diagonal Fisher information of each network (Matena & Raffel 2022).

    This method needs labels.

    Returns:
        A method for `merge`.

    Examples:
        >>> mcomb.merge(apply, (a, aligned.params), x, y, method="fisher")
        Merged(by fisher())
    """
    return Method("fisher", fisher_average, ("labels", "loss"))


def refit(*, ridge: float = 0.01) -> Method:
    """Merge by averaging, then fit each linear map to the mean of the networks' outputs.

    This method is similar to RegMean (Jin et al. 2023) and needs no labels.

    Args:
        ridge: Strength of the ridge penalty towards the average, relative to the mean square of the map's inputs.

    Returns:
        A method for `merge`.

    Examples:
        >>> mcomb.merge(apply, (a, aligned.params), x, method=mcomb.refit(ridge=0.1))
        Merged(by refit(ridge=0.1))
    """
    return Method("refit", refit_average, ("spec",), {"ridge": ridge})


def learned(
    *,
    per: str = "weight",
    beyond: bool = False,
    steps: int = 400,
    batch_size: int = 100,
    learning_rate: float | None = None,
    seed: int = 0,
    keep: AnyPath | str | None = None,
) -> Method:
    """Merge with shares learned by gradient descent on the loss.

    This method needs labels. `merged.details` is a `LearnedShares`.

    Args:
        per: One share per "network", "layer", "leaf", "unit" or "weight".
        beyond: Allow shares below 0 and above 1.
        steps: Number of gradient steps.
        batch_size: Number of examples in a minibatch.
        learning_rate: Learning rate of Adam; by default 0.1, 0.03 per unit and 0.01 per weight.
        seed: Seed of the minibatches.
        keep: A file that stores the progress, so that the same call resumes.

    Returns:
        A method for `merge`.

    Examples:
        >>> method = mcomb.learned(per="unit", steps=100)
        >>> merged = mcomb.merge(apply, (a, aligned.params), x, y, method=method)
        >>> merged.details
        LearnedShares(held-out loss from 0.2081 to 0.1768)
    """
    options = {"per": per, "beyond": beyond, "steps": steps, "batch_size": batch_size}
    options |= {"learning_rate": learning_rate, "seed": seed, "keep": keep}
    return Method("learned", learn_shares, ("labels", "loss", "spec"), options)


def partial(*, budget: float, per: str = "unit") -> Method:
    """Merge matching units and keep the others apart, as ZipIt! and PLeaS do.

    This method needs no labels. `merged.details` is a `PartlyMerged`.

    Args:
        budget: The size of the result in networks, from 1 (the average) to the number of networks (their ensemble).
        per: Keep single units ("unit") or whole layers ("layer") apart.

    Returns:
        A method for `merge`.

    Examples:
        >>> merged = mcomb.merge(apply, (a, aligned.params), x, method=mcomb.partial(budget=1.5))
        >>> merged.details
        PartlyMerged(14,400 weights)
        >>> merged.apply(merged.params, x_test).shape
        (597, 10)
    """
    return Method("partial", merge_partly, ("spec",), {"budget": budget, "per": per})


METHODS: dict[str, Callable[..., Method]] = {
    "average": average,
    "slerp": slerp,
    "fisher": fisher,
    "refit": refit,
    "learned": learned,
}
BASED_METHODS: dict[str, Callable[..., Method]] = {"task_arithmetic": task_arithmetic, "ties": ties, "dare": dare}


def as_method(method: str | Method) -> Method:
    """Return the method with this name and default options; return methods unchanged."""
    if isinstance(method, Method):
        return method
    if method == "partial":
        raise UserError('Method "partial" has no default budget: pass mcomb.partial(budget=1.5).')
    if isinstance(method, str) and method in BASED_METHODS:
        raise UserError(f'Method "{method}" needs the networks\' base: pass mcomb.{method}(base).')
    if callable(method) and method in METHODS.values():
        name = getattr(method, "__name__", "")
        raise UserError(f"The method {name} is a function: call it, as in mcomb.{name}().")
    if not isinstance(method, str) or method not in METHODS:
        raise UserError(f"Unknown method {brief(method)}: choose from {', '.join(METHODS)}, or configure one.")
    return METHODS[method]()
