"""Merge several aligned networks into one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcomb.errors import UserError, brief
from mcomb.evaluation.objectives import Objective, cross_entropy
from mcomb.io.paths import AnyPath
from mcomb.merging.average import average_networks, require_networks
from mcomb.merging.fisher import fisher_average
from mcomb.merging.learned import LearnedShares, learn_shares
from mcomb.merging.partial import PartlyMerged, merge_partly
from mcomb.merging.refit import refit_average
from mcomb.symmetry.derive import derive_spec
from mcomb.symmetry.spec import PermutationSpec, require_spec
from mcomb.trees import Apply, Inputs, Labels, Params, from_lists


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
        >>> outputs = merged.apply(merged.params, x)
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

    Examples:
        >>> merged = mcomb.merge(apply, (a, aligned.params), x, method=mcomb.refit(ridge=0.1))
    """

    name: str
    function: Callable[..., Any]
    needs: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r:.50}' for name, value in self.options.items())})"


def merge(
    apply: Apply,
    networks: Sequence[Params],
    inputs: Inputs,
    labels: Labels = None,
    *,
    method: str | Method = "learned",
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
        labels: Labels with examples along the first axis; `average`, `refit` and `partial` do not need them.
        method: A name (`"average"`, `"fisher"`, `"refit"`, `"learned"`) or a configured method, such as
            `mcomb.refit(ridge=0.1)` or `mcomb.partial(budget=1.5)`.
        spec: The symmetries of the network; derived from `apply` by default.
        loss: The loss: a function of one example's output and label that returns a sum and a count.

    Returns:
        The merged network: `.apply` and `.params`.

    Raises:
        UserError: The networks, the data or the method do not fit together.

    Examples:
        >>> merged = mcomb.merge(apply, (a, aligned.params), x, method="refit")
        >>> mcomb.score(merged.apply, merged.params, x, y).accuracy
    """
    chosen, labels = as_method(method), from_lists(labels)
    require_networks(networks)
    if "labels" in chosen.needs and labels is None:
        raise UserError(f"Cannot merge by {chosen.name} without labels: pass them, or merge by refit or average.")
    if "spec" in chosen.needs and spec is None:
        spec = derive_spec(apply, networks[0], inputs)
    if spec is not None:
        require_spec(spec)
        for network in networks:
            spec.validate(network)
    given = {"labels": labels, "loss": loss, "spec": spec}
    found = chosen.function(apply, networks, inputs, **{name: given[name] for name in chosen.needs}, **chosen.options)
    if isinstance(found, LearnedShares):
        return Merged(apply, found.params, chosen, found)
    if isinstance(found, PartlyMerged):
        return Merged(found.apply, found.params, chosen, found)
    return Merged(apply, found, chosen)


def average() -> Method:
    """Merge by averaging all weights.

    Returns:
        A method for `merge`.

    Examples:
        >>> mcomb.merge(apply, (a, aligned.params), x, method="average")
        Merged(by average())
    """
    return Method("average", average_networks)


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
        >>> merged = mcomb.merge(apply, (a, aligned.params), x, y, method=mcomb.learned(per="unit"))
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
        >>> outputs = merged.apply(merged.params, x)
    """
    return Method("partial", merge_partly, ("spec",), {"budget": budget, "per": per})


METHODS: dict[str, Callable[..., Method]] = {"average": average, "fisher": fisher, "refit": refit, "learned": learned}


def as_method(method: str | Method) -> Method:
    """Return the method with this name and default options; return methods unchanged."""
    if isinstance(method, Method):
        return method
    if method == "partial":
        raise UserError('Method "partial" has no default budget: pass mcomb.partial(budget=1.5).')
    if not isinstance(method, str) or method not in METHODS:
        raise UserError(f"Unknown method {brief(method)}: choose from {', '.join(METHODS)}, or configure one.")
    return METHODS[method]()
