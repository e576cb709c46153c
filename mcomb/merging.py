"""Merging: one network out of several aligned ones, whose shares are chosen instead of drawn.

    a, aligned = ...  # two networks, the second with its units in the order of the first's
    merged = mcomb.merge(spec, (a, aligned), apply, inputs, labels, method="learned")

The paper samples the cube of all shares; `learn_shares` looks for a good point in it by gradient descent on data.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mcomb.base import (
    Apply,
    Array,
    Inputs,
    Labels,
    Params,
    UserError,
    brief,
    count_examples,
    from_lists,
    is_inexact,
    map_examples,
    map_named,
    named_leaves,
    require_alike,
    require_finite,
    require_finite_result,
)
from mcomb.devices import AXIS, device_mesh, on_each_device, replicate, share_out
from mcomb.early_stopping import check_data, descend
from mcomb.files import AnyPath
from mcomb.objectives import Objective, add_up, at_least_float32, cross_entropy
from mcomb.refit import refit
from mcomb.running_statistics import estimate_statistics
from mcomb.symmetry.spec import PermutationSpec, axis_names, require_spec

# How fast shares are learnt unless somebody says: the more of them there are, the slower. On CIFAR-10, a rate of 0.1
# for one share a weight finds nothing that is better than the average.
LEARNING_RATES = {"network": 0.1, "layer": 0.1, "leaf": 0.1, "unit": 0.03, "weight": 0.01}
GRANULARITIES = tuple(LEARNING_RATES)
METHODS = ("average", "fisher", "refit", "learned")
TOGETHER = 8  # examples whose gradients are taken at once: each is as large as the network


class LearnedShares(NamedTuple):
    """A combination whose shares were learnt.

    `shares` has a tree like the networks' for each network but the first: its share in each weight, one number where
    all weights of a leaf have the same. `losses` are those on held-out data, of the average first and then after every
    few steps; `loss` is the least of them, that of `params`.
    """

    params: Params
    shares: tuple[Params, ...]
    loss: float
    losses: tuple[float, ...]


def merge(
    spec: PermutationSpec,
    networks: Sequence[Params],
    apply: Apply,
    inputs: Inputs,
    labels: Labels = None,
    *,
    method: str = "learned",
    loss: Objective = cross_entropy,
    **options: Any,
) -> Params:
    """One network made of aligned ones, by one of four methods.

    - "average": the mean of all weights.
    - "fisher": each weight by how much the network's own loss depends on it, as the diagonal of the empirical Fisher
      information says.
    - "refit": the average, then each linear map by least squares to the mean of the networks' outputs. It needs no
      labels, and its option is `ridge`: see `mcomb.refit`.
    - "learned": shares that gradient descent finds. Its options are those of `learn_shares`.

    The data should be none that the networks were trained on. Running statistics, as those of a BatchNorm, are
    estimated anew on the inputs, by whatever method (`estimate_statistics`).
    """
    if method not in METHODS:
        raise UserError(f"there is no method {brief(method)} to merge by: choose from {', '.join(METHODS)}")
    if labels is None and method in ("fisher", "learned"):
        raise UserError(f'the method "{method}" needs labels: give them, or merge by "average" or "refit"')
    labels = from_lists(labels)
    if method == "learned":
        return learn_shares(spec, networks, apply, inputs, labels, loss=loss, **options).params
    if unknown := options.keys() - ({"ridge"} if method == "refit" else set()):
        raise UserError(f"the method {method} has no option {min(unknown)}: leave it out")
    _check_networks(spec, networks)
    here = jax.device_get(tuple(networks))  # they may be on different devices
    if method in ("average", "refit"):
        mean = jax.tree.map(lambda *leaves: _weigh(leaves, [1 / len(leaves)] * len(leaves)), *here)
        mean = estimate_statistics(apply, mean, inputs)
        if method == "average":
            return mean
        return estimate_statistics(apply, refit(spec, here, mean, apply, inputs, **options), inputs)
    check_data(apply, networks[0], inputs, labels, loss)
    informations = [fisher_information(apply, network, inputs, labels, loss=loss) for network in networks]
    require_finite_result("the gradients of the loss", informations, inputs, *networks)

    def weigh(*both: Any) -> Any:
        leaves, weights = both[: len(networks)], both[len(networks) :]
        total = sum(weights)
        least = jnp.finfo(jnp.result_type(total)).tiny  # where no network's loss depends on a weight: the mean
        return _weigh(
            leaves, [jnp.where(total > least, w / jnp.maximum(total, least), 1 / len(leaves)) for w in weights]
        )

    return estimate_statistics(apply, jax.tree.map(weigh, *here, *informations), inputs)


def learn_shares(
    spec: PermutationSpec,
    networks: Sequence[Params],
    apply: Apply,
    inputs: Inputs,
    labels: Labels,
    *,
    per: str = "weight",
    beyond: bool = False,
    loss: Objective = cross_entropy,
    steps: int = 400,
    batch_size: int = 100,
    learning_rate: float | None = None,
    seed: int = 0,
    keep: AnyPath | str | None = None,
) -> LearnedShares:
    """The combination of aligned networks whose shares gradient descent (Adam) finds, starting from the average.

    There is one share `per` network, layer (the leaves of one branch), leaf, unit or weight. With units, each unit has
    a number for all weights that come into it and go out of it, and those of the units that a weight connects are
    added; a leaf without units that may be permuted has one. Shares stay between 0 and 1, unless `beyond` is true. The
    learning rate is, by default, 0.1; 0.03 per unit and 0.01 per weight.

    A tenth of the data, the last, is held out: the result is whatever had the least loss on it, and where it has not
    fallen for a quarter of the steps, the descent ends. In the file `keep` it keeps how far it has come, and the same
    call goes on from there.

    Running statistics are those of the minibatch while shares are learnt, and estimated on the other nine tenths of the
    data where the loss on the last is looked at, and in the result.
    """
    if per not in GRANULARITIES:
        raise UserError(f"there are no shares per {brief(per)}: choose from {', '.join(GRANULARITIES)}")
    _check_networks(spec, networks)
    learnt = _Shares(spec, per, beyond)
    rate = LEARNING_RATES[per] if learning_rate is None else learning_rate
    how: Any = {"loss": loss, "steps": steps, "batch_size": batch_size, "learning_rate": rate, "seed": seed}
    how |= {"keep": keep, "describe": f"learning shares per {per}"}
    found = descend(learnt, learnt.start(networks), networks, apply, inputs, labels, **how)
    every_share = {
        name: np.asarray(learnt.shares(found.numbers, name, leaf)) if is_inexact(leaf) else np.zeros(len(networks) - 1)
        for name, leaf in named_leaves(networks[0]).items()
    }
    shares = (map_named(lambda name, leaf, i=i: every_share[name][i], networks[0]) for i in range(len(networks) - 1))
    return LearnedShares(found.params, tuple(shares), min(found.losses), found.losses)


def fisher_information(
    apply: Apply, params: Params, inputs: Inputs, labels: Labels, *, loss: Objective = cross_entropy
) -> Params:
    """The diagonal of the empirical Fisher information: the mean over examples of the squared gradient of the loss.

    Leaves that are no floats have zeros.
    """
    count = count_examples(inputs, labels)
    mesh, size = device_mesh(), min(TOGETHER, count)
    rows = np.pad(np.arange(count), (0, -count % (size * mesh.size)), constant_values=-1).reshape(-1, size)
    args = share_out(rows, mesh, P(AXIS)), *replicate((params, inputs, labels), mesh)
    sums = jax.device_get(_squared_gradients(apply, loss, mesh, *args))  # wherever the networks are
    return jax.tree.map(lambda total: total / count, sums)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _squared_gradients(
    apply: Apply, objective: Objective, mesh: Mesh, rows: Array, params: Params, inputs: Inputs, labels: Labels
) -> Params:
    """The sum over the examples in `rows` of the squared gradient of each one's loss; -1 is no example.

    The rows are shared out among the devices.
    """
    is_learnable = jax.tree.map(is_inexact, params)

    def on_device(rows: Array, params: Params, inputs: Inputs, labels: Labels) -> Params:
        def loss(learnable: Params, row: Array) -> Array:
            x, y = jax.tree.map(lambda leaf: leaf[row][None], (inputs, labels))
            whole = jax.tree.map(lambda own, leaf, ours: own if ours else leaf, learnable, params, is_learnable)
            total, count = add_up(objective, apply(whole, x), y, jnp.ones(1, bool))
            return total / jnp.where(count == 0, 1, count)

        start = jax.tree.map(lambda leaf, ours: leaf if ours else jnp.zeros(()), params, is_learnable)

        def add(sums: Params, rows: Any) -> tuple[Params, None]:
            gradients = map_examples(partial(jax.grad(loss), start), rows)

            def square(gradient: Array) -> Array:
                each = jnp.square(at_least_float32(jnp.abs(gradient)))
                return jnp.sum(each, axis=0, where=(rows >= 0).reshape(-1, *[1] * (each.ndim - 1)))

            return jax.tree.map(lambda total, gradient: total + square(gradient), sums, gradients), None

        zeros = jax.tree.map(lambda leaf: jnp.zeros_like(at_least_float32(jnp.abs(leaf))), start)
        return jax.lax.psum(jax.lax.scan(add, zeros, rows)[0], AXIS)

    traced = jax.make_jaxpr(apply)(params, jax.tree.map(lambda x: x[:1], inputs))
    sharded = on_each_device(on_device, mesh, (P(AXIS), P(), P(), P()), P(), traced)
    return sharded(rows, params, inputs, labels)


class _Shares(NamedTuple):
    """How the numbers that are learnt become shares: those of all networks but the first, which has the rest."""

    spec: PermutationSpec
    per: str
    beyond: bool

    def start(self, networks: Sequence[Params]) -> dict[str, Array]:
        """The numbers of the average, which are zero; their first axis is that of the networks."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, leaf in named_leaves(networks[0]).items():
            if is_inexact(leaf):
                shapes |= {own: self._shape(own, leaf) for own in self._names(name)}
        if not shapes:
            raise UserError("the networks have no weights that are floats, so there is nothing to learn: give others")
        return {name: jnp.zeros((len(networks) - 1, *shape)) for name, shape in shapes.items()}

    def shares(self, numbers: Mapping[str, Array], name: str, leaf: Any) -> Array:
        """The share of each network but the first in each weight of a leaf, or one number for all of its weights."""
        names = self._names(name)
        own = numbers[names[0]]
        if self.per == "unit" and names[0] in self.spec.sizes:
            of_units = {unit: numbers[unit] for unit in names}
            own = jax.vmap(lambda values: self.spec.add_units(values, name, jnp.shape(leaf)))(of_units)
        if self.beyond:
            return 1 / (len(own) + 1) + own
        return jax.nn.softmax(jnp.concatenate([jnp.zeros_like(own[:1]), own]), axis=0)[1:]

    def combine(self, numbers: Mapping[str, Array], networks: Sequence[Params]) -> Params:
        """The combination with these shares."""

        def combine_leaf(name: str, *leaves: Any) -> Any:
            if not is_inexact(leaves[0]):
                return leaves[0]
            rest = self.shares(numbers, name, leaves[0])
            return _weigh(leaves, [1 - rest.sum(0), *rest])

        return map_named(combine_leaf, *networks)

    def _names(self, leaf: str) -> list[str]:
        """The names of the numbers that a leaf's shares are made of."""
        units = [name for layout in self.spec.axes[leaf] for name in axis_names(layout) if name in self.spec.sizes]
        branch = leaf.rpartition("/")[0]
        own = {"network": "every weight", "layer": f"{branch}/", "leaf": leaf, "weight": leaf, "unit": leaf}[self.per]
        return list(dict.fromkeys(units)) if self.per == "unit" and units else [own]

    def _shape(self, name: str, leaf: Any) -> tuple[int, ...]:
        if self.per == "weight":
            return jnp.shape(leaf)
        return self.spec.shape(name) if self.per == "unit" and name in self.spec.sizes else ()


def _weigh(leaves: Sequence[Any], weights: Sequence[Any]) -> Any:
    """The weighted sum of one leaf of each network; what is no float is the first one's."""
    if not is_inexact(leaves[0]):
        return leaves[0]
    total = sum(weight * leaf for weight, leaf in zip(weights, leaves, strict=True))
    return jnp.asarray(total, jnp.result_type(leaves[0]))


def _check_networks(spec: PermutationSpec, networks: Sequence[Params]) -> None:
    require_spec(spec)
    if not isinstance(networks, Sequence) or len(networks) < 2:
        raise UserError("there are fewer than two networks: give a tuple of two or more parameter trees to merge")
    for i, network in enumerate(networks):
        require_alike("the networks to merge", networks[0], network, ("network 0", f"network {i}"))
        spec.validate(network)
        require_finite(f"network {i}", network)
