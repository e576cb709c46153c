"""Partial merging: units that match well become one, the others stay apart, as far as a number of parameters allows.

As in ZipIt! (Stoica et al. 2023) and PLeaS (Nasery et al. 2024), but for any function whose spec is derived. The
function runs as one stream for each network, all in lockstep. A merged unit is one for all of them: where a linear map
gives it a value, that is the mean over the streams. A weight is stored once, as the average, if all units that it
connects are merged, and else for each network. With everything merged this is the average network; with nothing merged,
the mean of the networks' outputs.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import combinations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from mcomb.base import (
    Apply,
    Array,
    Inputs,
    Params,
    UserError,
    count_examples,
    inner_equations,
    is_inexact,
    map_named,
    named_leaves,
    output_shapes,
    require_positive,
)
from mcomb.devices import BATCH, equal_batches, replicate
from mcomb.matching.activations import correlations
from mcomb.merging import merge
from mcomb.running_statistics import Norm, divisors_of, list_norms, normalise
from mcomb.symmetry.intermediates import (
    PRODUCTS,
    ArrayId,
    Equation,
    Intermediates,
    is_linear_map,
    list_intermediates,
    unit_activations,
)
from mcomb.symmetry.spec import PermutationSpec, axis_names

GRANULARITIES = ("unit", "layer")
NEVER = np.iinfo(np.int32).max
Ranks = dict[str, Int[np.ndarray, "..."]]
"""For each permutation, and for each leaf with weights of no unit, when its units come apart: those of 0 first."""


class PartlyMerged(NamedTuple):
    """Networks of which some units are merged: a function, its parameters, and how many of these are weights.

    Among the parameters are the weights that the networks share ("shared", zero where they do not), those that each of
    them has for itself ("own", by leaf and with an axis of networks; zero where they share), and which units of each
    permutation are not merged ("apart").
    """

    apply: Apply
    params: Params
    weights: int


def merge_partly(
    spec: PermutationSpec,
    networks: Sequence[Params],
    apply: Apply,
    inputs: Inputs,
    *,
    budget: float | int,
    per: str = "unit",
) -> PartlyMerged:
    """Aligned networks merged into one with at most `budget` times the weights of one of them.

    The units that match worst stay apart: those whose activations on the inputs have the lowest mean correlation over
    all pairs of networks, whichever layer they are in; with `per` "layer", all units of the permutations with the
    lowest mean. A unit that never changes in any network is merged last of all to come apart, for merging it costs
    nothing; one that changes in some only, or whose activations are not seen, correlates with nothing. Weights that
    belong to no unit are ranked among them, leaf by leaf, by the cosine of the networks' values. Units that differ from
    step to step of a scan stay apart together. Leaves that are no floats are the first network's. Running statistics
    are estimated anew on the inputs, unless nothing is merged.

    At a budget of 1 it is the average network; at as many as there are networks, the mean of their outputs.
    """
    if per not in GRANULARITIES:
        raise UserError(f"there is no merging per {per!r:.50}: choose from {', '.join(GRANULARITIES)}")
    average = merge(spec, networks, apply, inputs, method="average")
    require_positive(**{"the budget": budget})
    if not 1 <= budget <= len(networks):
        raise UserError(f"the budget is {budget}: give one from 1 to {len(networks)}, the number of networks")
    count_examples(inputs)
    if not all(map(is_inexact, jax.tree.leaves(output_shapes(apply, average, inputs)))):
        raise UserError("the function returns numbers that are no floats, which have no mean: return scores instead")
    trace = list_intermediates(spec, apply, average, inputs)
    _require_seen(spec, trace)
    together = spec.sizes.keys() if per == "layer" else _differ_by_step(spec, trace)
    ranks = _ranks(_likeness(spec, networks, apply, inputs), together)
    firsts = {name: _first_rank(spec, ranks, name, leaf) for name, leaf in _floats(average).items()}
    every = np.concatenate([np.ravel(first) for first in firsts.values()])
    counts = np.bincount(every, minlength=1 + max(int(rank.max()) for rank in ranks.values()))
    weights = len(every) + (len(networks) - 1) * np.cumsum([0, *counts])  # if those of rank 0, 1, … come apart
    parted = int(np.searchsorted(weights, budget * len(every), side="right")) - 1
    is_own = {name: first < parted for name, first in firsts.items() if (first < parted).any()}

    def shared(name: str, leaf: Any) -> Any:
        return jnp.where(is_own[name], 0, leaf) if name in is_own else leaf

    def own(name: str, leaf: Any, *leaves: Any) -> Any:
        if name not in is_own:
            return None
        return jnp.stack([jnp.where(is_own[name], each, 0) for each in leaves]).astype(leaf.dtype)

    def split(average: Params, networks: Sequence[Params]) -> Params:
        return {
            "shared": map_named(shared, average),
            "own": map_named(own, average, *networks),
            "apart": {_key(name): ranks[name] < parted for name in spec.sizes},
        }

    params = split(average, networks)
    if 0 < parted < len(counts) and list_norms(trace):
        statistics = jax.device_get(_statistics(spec, apply, *replicate((params, equal_batches(inputs, BATCH)))))
        average = map_named(lambda name, leaf: statistics[name].mean(0) if name in statistics else leaf, average)
        networks = [
            map_named(lambda name, leaf, i=i: statistics[name][i] if name in statistics else leaf, network)
            for i, network in enumerate(networks)
        ]
        params = split(average, networks)
    return PartlyMerged(apply_partly_merged(spec, apply), params, int(weights[parted]))


@cache  # the same function for the same arguments, so that it is compiled only once
def apply_partly_merged(spec: PermutationSpec, apply: Apply) -> Apply:
    """The function of the parameters of `PartlyMerged`: of those in a file, for example."""

    def run(params: Params, inputs: Inputs) -> Any:
        trace = list_intermediates(spec, apply, params["shared"], inputs)
        args = [(network, inputs) for network in _streams(params)]
        outputs = trace.tap_together(_averaging(spec, params, trace))(*args)
        return jax.tree.map(lambda *each: _mean(each), *outputs)

    return run


@partial(jax.jit, static_argnums=(0, 1))
def _statistics(spec: PermutationSpec, apply: Apply, params: Params, batches: Inputs) -> dict[str, Any]:
    """The running statistics of each stream by their names, estimated as `estimate_statistics` does."""
    networks = _streams(params)
    leaves = list(map(named_leaves, networks))

    def of_batch(inputs: Inputs) -> dict[str, Any]:
        trace, found = list_intermediates(spec, apply, networks[0], inputs), dict[str, Any]()

        norms = list_norms(trace)
        divisors = [divisors_of(norms, trace, network, inputs) for network in networks]

        def observe(norm: Norm, values: tuple[Array, ...]) -> tuple[Array, ...]:
            each = [normalise(norm, *own) for own in zip(leaves, divisors, values, strict=True)]
            found.update({name: jnp.stack([own[name] for _, own in each]) for name in each[0][1]})
            return tuple(value for value, _ in each)

        edits = {norm.centred: partial(observe, norm) for norm in norms}
        args = [(network, inputs) for network in networks]
        trace.tap_together(_averaging(spec, params, trace) | edits)(*args)
        return found

    return jax.tree.map(lambda values: values.mean(0), jax.lax.map(of_batch, batches))


def _streams(params: Params) -> list[Params]:
    """The weights of each stream; there is one stream if nothing is apart."""
    own = named_leaves(params.get("own"))
    count = len(next(iter(own.values()), (None,)))
    return [
        map_named(lambda name, leaf, i=i: leaf + own[name][i] if name in own else leaf, params["shared"])
        for i in range(count)
    ]


def _averaging(spec: PermutationSpec, params: Params, trace: Intermediates) -> dict[ArrayId, Callable[..., Any]]:
    """The edits that give merged units one value in all streams, wherever a linear map gives them a value."""
    apart = {name: params["apart"][_key(name)] for name in spec.sizes}
    return {
        equation.results[0].id: partial(_average_merged, _is_apart(spec, apart, equation))
        for equation in _maps_to_units(spec, trace)
    }


def _key(name: str) -> str:
    """The key of a permutation in a tree, in which a / would be a branch."""
    return name.replace("/", ".")


def _floats(params: Params) -> dict[str, Any]:
    return {name: leaf for name, leaf in named_leaves(params).items() if is_inexact(leaf)}


def _mean(values: Sequence[Array]) -> Any:
    return sum(values[1:], values[0]) / len(values)


def _average_merged(is_apart: Bool[Array, "..."], values: tuple[Array, ...]) -> tuple[Any, ...]:
    """An array of each stream, with the mean over the streams where units are merged."""
    if all(value is values[0] for value in values):
        return values
    mean = _mean(values)
    return tuple(jnp.where(is_apart, value, mean.astype(value.dtype)) for value in values)


def _maps_to_units(spec: PermutationSpec, trace: Intermediates) -> Iterator[Equation]:
    """The linear maps, also those inside scans, whose results have units."""
    for equation in trace.equations:
        if is_linear_map(equation) and equation.results[0].names & spec.sizes.keys():
            yield equation


def _is_apart(spec: PermutationSpec, apart: Mapping[str, Array], equation: Equation) -> Bool[Array, "..."]:
    """Where the result of a linear map has values of units that are apart; inside a scan, at each step alike."""
    layouts = equation.results[0].layouts
    shape = tuple(spec.length(layout) if layout and axis_names(layout) else 1 for layout in layouts)
    found: Any = jnp.zeros(shape, bool)
    for name, index, is_unit in spec.units_of(layouts, shape):
        found = found | (is_unit & apart[name][index])
    return found[(0,) * equation.loops]


def _differ_by_step(spec: PermutationSpec, trace: Intermediates) -> set[str]:
    """The permutations whose units are others at each step of a scan."""
    found = set()
    for equation in _maps_to_units(spec, trace):
        (result,) = equation.results
        of_steps = {name for layout in result.layouts[: equation.loops] for name in axis_names(layout)}
        found |= {name for name in result.names if of_steps.intersection((name, *spec.batched_over.get(name, ())))}
    return found & spec.sizes.keys()


def _require_seen(spec: PermutationSpec, trace: Intermediates) -> None:
    """Raises an error if there are units that linear maps inside branches, loops or entries of a stack give values."""
    for equation in trace.equations:
        inside = {inner.primitive.name for inner in inner_equations(equation.eqn)}
        units = {name for operand in equation.operands if operand for name in operand.names} & spec.sizes.keys()
        if equation.eqn.primitive.name != "scan" and units and inside.intersection(PRODUCTS):
            raise UserError(
                f"units of {min(units)} are used inside a {equation.eqn.primitive.name}, where nothing is averaged: "
                "merge by another method, or write the function without it"
            )
    seen = {
        name
        for equation in trace.equations
        for result in equation.results
        if result.depends_on_inputs
        for name in result.names
    }
    for name in spec.sizes.keys() - seen:
        if spec.fixed.keys() & set(spec.batched_over.get(name, ())):
            raise UserError(
                f"units of {name} are in entries of a stack that are read one by one, where nothing is averaged: "
                "merge by another method, or give each entry a leaf of its own"
            )


def _likeness(
    spec: PermutationSpec, networks: Sequence[Params], apply: Apply, inputs: Inputs
) -> dict[str, Float[np.ndarray, "..."]]:
    """How well the networks match: for each permutation in each unit, and for each leaf in the weights of no unit."""
    likeness: dict[str, Any] = {}
    if spec.sizes:
        pairs = [correlations(spec, a, b, apply, inputs) for a, b in combinations(networks, 2)]
        likeness = {name: np.mean([pair[name] for pair in pairs], axis=0) for name in spec.sizes}
        if any((values == 0).any() for values in likeness.values()):
            themselves = [correlations(spec, network, network, apply, inputs) for network in networks]
            seen = unit_activations(spec, list_intermediates(spec, apply, networks[0], inputs))
            for name in seen:
                never_changes = np.all([own[name] == 0 for own in themselves], axis=0)
                likeness[name] = np.where(never_changes, 1, likeness[name])
    leaves = [named_leaves(network) for network in networks]
    no_ranks = {name: np.zeros(spec.shape(name), np.int32) for name in spec.sizes}
    for name, leaf in _floats(networks[0]).items():
        without = _first_rank(spec, no_ranks, name, leaf) == NEVER
        if without.any():
            values = np.stack([np.asarray(own[name], np.complex128)[without] for own in leaves])
            norms = np.linalg.norm(values, axis=1, keepdims=True)
            units = values / np.where(norms == 0, 1, norms)
            cosines = (units @ units.conj().T).real[np.triu_indices(len(networks), 1)]
            likeness[_rest_of(name)] = np.asarray(cosines.mean() if norms.any() else 1.0)
    return likeness


def _ranks(likeness: Mapping[str, Float[np.ndarray, "..."]], together: Collection[str]) -> Ranks:
    """The ranks, of the lowest likeness first; of the mean of those that come apart together."""
    groups: Ranks = {}
    scores: list[float] = []
    for name, values in likeness.items():
        own = values.mean(keepdims=True) if name in together else values
        groups[name] = np.broadcast_to(len(scores) + np.arange(own.size).reshape(own.shape), values.shape)
        scores += own.ravel().tolist()
    ranks = np.argsort(np.argsort(scores, kind="stable")).astype(np.int32)
    return {name: np.asarray(ranks[index]) for name, index in groups.items()}


def _first_rank(spec: PermutationSpec, ranks: Ranks, name: str, leaf: Any) -> Int[np.ndarray, "..."]:
    """For each weight of a leaf, the rank of the first of its units to come apart, or that of those without units."""
    first = np.full(np.shape(leaf), NEVER)
    for perm, index, is_unit in spec.units_of(spec.axes[name], np.shape(leaf)):
        first = np.minimum(first, np.where(is_unit, ranks[perm][index], NEVER))
    return np.where(first == NEVER, ranks.get(_rest_of(name), NEVER), first)


def _rest_of(leaf: str) -> str:
    """The name of a leaf's weights that belong to no unit."""
    return f"{leaf}/"
