"""Learn the shares of networks by gradient descent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mcomb.errors import UserError
from mcomb.evaluation.objectives import Objective, cross_entropy
from mcomb.io.paths import AnyPath
from mcomb.merging.average import require_networks, weighted_sum
from mcomb.merging.fine_tuning import descend
from mcomb.symmetry.derive import derive_spec
from mcomb.symmetry.spec import PermutationSpec, axis_names, require_spec
from mcomb.trees import (
    Apply,
    Array,
    Inputs,
    Labels,
    Params,
    is_inexact,
    map_named,
    named_leaves,
)

# Default learning rates, lower for more shares. On CIFAR-10, a rate of 0.1 per weight does not improve on the average.
LEARNING_RATES = {"network": 0.1, "layer": 0.1, "leaf": 0.1, "unit": 0.03, "weight": 0.01}
GRANULARITIES = tuple(LEARNING_RATES)


@dataclass(frozen=True, repr=False)
class LearnedShares:
    """A combination with learned shares.

    Attributes:
        params: The parameters with the lowest held-out loss.
        shares: For each network but the first, a tree of its shares: an array like the leaf, or one number.
        loss: The held-out loss of `params`.
        losses: The held-out losses of the average and then at regular intervals.

    Examples:
        >>> learned = mcomb.learn_shares(apply, (a, aligned.params), x, y, per="unit", steps=100)
        >>> learned
        LearnedShares(held-out loss from 0.2081 to 0.1768)
        >>> learned.shares[0]["bias"].shape  # one share of B for each unit
        (128,)
    """

    params: Params
    shares: tuple[Params, ...]
    loss: float
    losses: tuple[float, ...]

    def __repr__(self) -> str:
        return f"LearnedShares(held-out loss from {self.losses[0]:.4g} to {self.loss:.4g})"


def learn_shares(
    apply: Apply,
    networks: Sequence[Params],
    inputs: Inputs,
    labels: Labels,
    *,
    per: str = "weight",
    spec: PermutationSpec | None = None,
    loss: Objective = cross_entropy,
    beyond: bool = False,
    steps: int = 400,
    batch_size: int = 100,
    learning_rate: float | None = None,
    seed: int = 0,
    keep: AnyPath | str | None = None,
) -> LearnedShares:
    """Learn the shares of aligned networks by gradient descent (Adam), starting from the average.

    The last tenth of the data is held out. The result has the lowest held-out loss, and learning stops early if that
    loss does not fall for a quarter of the steps. Running statistics (BatchNorm) are those of the minibatch during
    learning. For held-out losses and the result, they are estimated on the other nine tenths.

    Args:
        apply: The function that all networks belong to, called as `apply(params, inputs)`.
        networks: Parameters of two or more aligned networks.
        inputs: Inputs with examples along the first axis.
        labels: Labels with examples along the first axis.
        per: One share per "network", "layer" (the leaves of one branch), "leaf", "unit" or "weight". A unit has one
            learned value for all its incoming and outgoing weights, and a weight adds the values of its units.
        spec: The symmetries of the network, which define its units; derived from `apply` by default.
        loss: The loss: a function of one example's output and label that returns a sum and a count.
        beyond: Allow shares below 0 and above 1.
        steps: Number of gradient steps.
        batch_size: Number of examples in a minibatch.
        learning_rate: Learning rate of Adam; by default 0.1, 0.03 per unit and 0.01 per weight.
        seed: Seed of the minibatches.
        keep: A file that stores the progress, so that the same call resumes.

    Returns:
        The learned combination and its shares.

    Raises:
        UserError: The networks, the data or the options do not fit together.
        Diverged: A loss is not finite.

    Examples:
        >>> learned = mcomb.learn_shares(apply, (a, aligned.params), x, y, per="unit", steps=100)
        >>> mcomb.score(apply, learned.params, x_test, y_test)
        Metrics(loss=0.3039, accuracy=0.9129)
    """
    if per not in GRANULARITIES:
        raise UserError(f"Cannot learn shares per {per!r}: choose from {', '.join(GRANULARITIES)}.")
    require_networks(networks)
    spec = derive_spec(apply, networks[0], inputs) if spec is None else spec
    require_spec(spec)
    for network in networks:
        spec.validate(network)
    mapping = _Shares(spec, per, beyond)
    rate = LEARNING_RATES[per] if learning_rate is None else learning_rate
    how: Any = {"loss": loss, "steps": steps, "batch_size": batch_size, "learning_rate": rate, "seed": seed}
    how |= {"keep": keep, "describe": f"learning shares per {per}"}
    found = descend(mapping, mapping.start(networks), networks, apply, inputs, labels, **how)
    every_share = {
        name: np.asarray(mapping.shares(found.numbers, name, leaf)) if is_inexact(leaf) else np.zeros(len(networks) - 1)
        for name, leaf in named_leaves(networks[0]).items()
    }
    shares = (map_named(lambda name, leaf, i=i: every_share[name][i], networks[0]) for i in range(len(networks) - 1))
    return LearnedShares(found.params, tuple(shares), min(found.losses), found.losses)


class _Shares(NamedTuple):
    """Maps learned values to the shares of all networks but the first, which has the rest."""

    spec: PermutationSpec
    per: str
    beyond: bool

    def start(self, networks: Sequence[Params]) -> dict[str, Array]:
        """Return the values of the average, which are zero, with networks along the first axis."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, leaf in named_leaves(networks[0]).items():
            if is_inexact(leaf):
                shapes |= {own: self._shape(own, leaf) for own in self._names(name)}
        if not shapes:
            raise UserError(
                "The networks have no float weights, so there is nothing to learn: pass networks with floats."
            )
        return {name: jnp.zeros((len(networks) - 1, *shape)) for name, shape in shapes.items()}

    def shares(self, numbers: Mapping[str, Array], name: str, leaf: Any) -> Array:
        """Return the share of each network but the first, for each weight of a leaf or for all of them."""
        names = self._names(name)
        own = numbers[names[0]]
        if self.per == "unit" and names[0] in self.spec.sizes:
            of_units = {unit: numbers[unit] for unit in names}
            own = jax.vmap(lambda values: self.spec.add_units(values, name, jnp.shape(leaf)))(of_units)
        if self.beyond:
            return 1 / (len(own) + 1) + own
        return jax.nn.softmax(jnp.concatenate([jnp.zeros_like(own[:1]), own]), axis=0)[1:]

    def combine(self, numbers: Mapping[str, Array], networks: Sequence[Params]) -> Params:
        """Return the combination with these shares."""

        def combine_leaf(name: str, *leaves: Any) -> Any:
            if not is_inexact(leaves[0]):
                return leaves[0]
            rest = self.shares(numbers, name, leaves[0])
            return weighted_sum(leaves, [1 - rest.sum(0), *rest])

        return map_named(combine_leaf, *networks)

    def _names(self, leaf: str) -> list[str]:
        """Return the names of the learned values that determine a leaf's shares."""
        units = [name for layout in self.spec.axes[leaf] for name in axis_names(layout) if name in self.spec.sizes]
        branch = leaf.rpartition("/")[0]
        own = {"network": "every weight", "layer": f"{branch}/", "leaf": leaf, "weight": leaf, "unit": leaf}[self.per]
        return list(dict.fromkeys(units)) if self.per == "unit" and units else [own]

    def _shape(self, name: str, leaf: Any) -> tuple[int, ...]:
        if self.per == "weight":
            return jnp.shape(leaf)
        return self.spec.shape(name) if self.per == "unit" and name in self.spec.sizes else ()
