"""Partial merging: units that match well become one, the others stay apart, as far as a number of parameters allows.

As in ZipIt! (Stoica et al. 2023) and PLeaS (Nasery et al. 2024), but for any function whose spec is derived. The
function runs as one stream for each network, all in lockstep. A merged unit is one for all of them: where a linear map
gives it a value, that is the mean over the streams. A weight is stored once, as the average, if all units that it
connects are merged, and else for each network. With everything merged this is the average network; with nothing merged,
the mean of the networks' outputs.

Linear maps to units multiply each stored weight once, so that parameters and FLOPs both follow the budget. Linear maps
to outputs, products of activations (attention) and elementwise operations run once for each network.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import combinations
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from mcomb.errors import UserError, require_positive
from mcomb.evaluation.batch_statistics import Norm, divisors_of, list_norms, normalise
from mcomb.matching.activations import correlations
from mcomb.merging.average import average_networks
from mcomb.runtime.batching import BATCH, equal_batches
from mcomb.runtime.devices import replicate
from mcomb.symmetry.intermediates import (
    PRODUCTS,
    ArrayId,
    Equation,
    Intermediate,
    Intermediates,
    is_linear_map,
    list_intermediates,
    unit_activations,
)
from mcomb.symmetry.interpreter import EqnPath
from mcomb.symmetry.jaxprs import inner_equations
from mcomb.symmetry.spec import Layout, PermutationSpec, axis_names
from mcomb.trees import (
    Apply,
    Array,
    Inputs,
    Params,
    at_least_float32,
    count_examples,
    in_dtype_of,
    is_inexact,
    map_named,
    named_leaves,
    output_shapes,
)

GRANULARITIES = ("unit", "layer")
VIEWS = ("transpose", "reshape", "squeeze", "convert_element_type", "copy")  # of an array: the same entries
NEVER = np.iinfo(np.int32).max
Ranks = dict[str, Int[np.ndarray, "..."]]
"""For each permutation, and for each leaf with weights of no unit, when its units come apart: those of 0 first."""


class PartlyMerged(NamedTuple):
    """Networks of which some units are merged: a function, its parameters, and how many of these are weights.

    The parameters hold no weight twice, and nothing else of their size. They are a tree of up to four entries:

    - `first`: a tree like each network's, with the weights that all share and, between those, the first network's own.
      The units of a permutation that are apart come last; those of heads and of their dimensions stay where they were.
    - `others`: for each leaf in which units are apart, a row for each further network with its own weights, packed.
    - `rest`: the same for the weights that belong to no unit, of leaves that are apart.
    - `apart`: for each permutation, which units of the networks are apart: indices into its flattened index array.
    """

    apply: Apply
    params: Params
    weights: int


def merge_partly(
    apply: Apply,
    networks: Sequence[Params],
    inputs: Inputs,
    *,
    spec: PermutationSpec,
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

    At a budget of 1 it is the average network; at as many as there are networks, the mean of their outputs. In between
    the parameters, and a file of them, hold at most `budget` networks' weights. A call takes about as many FLOPs as
    there are weights; layers inside scans, linear maps to outputs, products of activations and elementwise operations
    take as many as all networks.
    """
    if per not in GRANULARITIES:
        raise UserError(f"there is no merging per {per!r}: choose from {', '.join(GRANULARITIES)}")
    average = average_networks(apply, networks, inputs)
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
    apart = _with_outer(spec, {name: ranks[name] < parted for name in spec.sizes})
    order = {
        name: np.argsort(apart[name], kind="stable") if _is_alone(spec, name) else perm
        for name, perm in spec.identity().items()
    }
    average, *networks = (spec.apply(order, network) for network in (average, *networks))
    is_own = {name: spec.permute_array(order, spec.axes[name], first < parted) for name, first in firsts.items()}
    params = _split(spec, average, networks, apart, is_own)
    if 0 < parted < len(counts) and list_norms(trace):
        statistics = jax.device_get(_statistics(spec, apply, *replicate((params, equal_batches(inputs, BATCH)))))

        def replace(values: Callable[[np.ndarray], Any], params: Params) -> Params:
            new = {name: values(own) for name, own in statistics.items()}
            return map_named(lambda name, leaf: in_dtype_of(leaf, new[name]) if name in new else leaf, params)

        average = replace(lambda own: own.mean(0), average)
        networks = [replace(itemgetter(i), network) for i, network in enumerate(networks)]
        params = _split(spec, average, networks, apart, is_own)
    return PartlyMerged(apply_partly_merged(spec, apply), params, int(weights[parted]))


def _split(
    spec: PermutationSpec,
    average: Params,
    networks: Sequence[Params],
    apart: Mapping[str, Bool[np.ndarray, "..."]],
    is_own: Mapping[str, Bool[np.ndarray, "..."]],
) -> Params:
    """The parameters of `PartlyMerged`, without entries that would be empty."""

    def first(name: str, mean: Any, own: Any) -> Any:
        return jnp.where(is_own[name], own, mean).astype(mean.dtype) if name in is_own else mean

    def pack(of_units: bool, name: str, mean: Any, *others: Any) -> Any:
        if name not in is_own:
            return None
        mask = is_own[name] & (_has_unit(spec, name, np.shape(mean)) == of_units)
        if not mask.any():
            return None
        slabs = _slabs(spec, counts, name, mean.shape) if of_units else None
        wanted = [mask] if slabs is None else slabs
        rows = [np.concatenate([np.asarray(own)[part].ravel() for part in wanted]) for own in others]
        return np.stack(rows).astype(mean.dtype)

    counts = {name: int(mask.sum()) for name, mask in apart.items()}
    parts = {
        "first": map_named(first, average, networks[0]),
        "others": map_named(partial(pack, True), average, *networks[1:]),
        "rest": map_named(partial(pack, False), average, *networks[1:]),
        "apart": {_key(name): np.flatnonzero(mask).astype(np.int32) for name, mask in apart.items() if mask.any()},
    }
    return {name: part for name, part in parts.items() if jax.tree.leaves(part)}


@cache  # the same function for the same arguments, so that it is compiled only once
def apply_partly_merged(spec: PermutationSpec, apply: Apply) -> Apply:
    """The function of the parameters of `PartlyMerged`: of those in a file, for example."""

    def run(params: Params, inputs: Inputs) -> Any:
        networks = _streams(spec, params)
        if len(networks) == 1:
            return apply(networks[0], inputs)
        trace = list_intermediates(spec, apply, networks[0], inputs)
        outputs = trace.tap_together(*_averaging(spec, params, trace))(*((network, inputs) for network in networks))
        return jax.tree.map(lambda *each: _mean(each), *outputs)

    return run


@partial(jax.jit, static_argnums=(0, 1))
def _statistics(spec: PermutationSpec, apply: Apply, params: Params, batches: Inputs) -> dict[str, Any]:
    """The running statistics of each stream by their names, estimated as `estimate_statistics` does."""
    networks = _streams(spec, params)
    leaves = list(map(named_leaves, networks))

    def of_batch(inputs: Inputs) -> dict[str, Any]:
        trace, found = list_intermediates(spec, apply, networks[0], inputs), dict[str, Any]()

        norms = list_norms(trace)
        divisors = [divisors_of(norms, trace, network, inputs) for network in networks]

        def observe(norm: Norm, values: tuple[Array, ...]) -> tuple[Array, ...]:
            each = [normalise(norm, *own) for own in zip(leaves, divisors, values, strict=True)]
            found.update({name: jnp.stack([own[name] for _, own in each]) for name in each[0][1]})
            return tuple(value for value, _ in each)

        edits, products = _averaging(spec, params, trace)
        edits |= {norm.centred: partial(observe, norm) for norm in norms}
        trace.tap_together(edits, products)(*((network, inputs) for network in networks))
        return found

    return jax.tree.map(lambda values: values.mean(0), jax.lax.map(of_batch, batches))


def _streams(spec: PermutationSpec, params: Params) -> list[Params]:
    """The weights of each stream; there is one stream if nothing is apart."""
    others, rest = named_leaves(params.get("others")), named_leaves(params.get("rest"))
    counts, masks = _counts(spec, params), _masks(spec, params, jnp)

    def unpack(row: int, name: str, leaf: Any) -> Any:
        if name in others:
            own, slabs = others[name][row], _slabs(spec, counts, name, leaf.shape)
            if slabs is None:
                mask = _any_unit(spec, masks, spec.axes[name], leaf.shape)
                place = jnp.cumsum(mask.ravel(), dtype=jnp.int32).reshape(leaf.shape) - 1
                leaf = jnp.where(mask, own[place], leaf)
            else:
                leaf = _put(leaf, slabs, own)
        if name in rest:
            without = np.nonzero(~_has_unit(spec, name, leaf.shape))
            leaf = jnp.asarray(leaf).at[without].set(rest[name][row])
        return leaf

    further = len(next(iter((others | rest).values()), ()))
    return [params["first"], *(map_named(partial(unpack, row), params["first"]) for row in range(further))]


def _slabs(
    spec: PermutationSpec, counts: Mapping[str, int], name: str, shape: tuple[int, ...]
) -> list[tuple[slice, ...]] | None:
    """The parts of a leaf with units that are apart, where these come last on each axis; None if they do not.

    Each part is beside the one before: of 5 × 4 weights with 2 and 1 units apart, they are [3:, :] and [:3, 3:].
    """
    region, slabs = [slice(0, size) for size in shape], list[tuple[slice, ...]]()
    for axis, layout in enumerate(spec.axes[name]):
        if isinstance(layout, str) and _is_alone(spec, layout):
            merged = shape[axis] - counts[layout]
            slabs.append((*region[:axis], slice(merged, shape[axis]), *region[axis + 1 :]))
            region[axis] = slice(0, merged)
        elif set(axis_names(layout)) & spec.sizes.keys():
            return None
    return slabs


def _put(leaf: Any, slabs: Sequence[tuple[slice, ...]], values: Array) -> Any:
    """The leaf with other values in its slabs."""
    for slab in slabs:
        shape = tuple(part.stop - part.start for part in slab)
        now, values = jnp.split(values, [math.prod(shape)])
        leaf = jax.lax.dynamic_update_slice(leaf, now.reshape(shape), [part.start for part in slab])
    return leaf


def _is_alone(spec: PermutationSpec, name: str) -> bool:
    """Whether a permutation is neither batched over others nor others over it, as those of heads and dimensions are."""
    return (
        name in spec.sizes
        and not spec.batched_over.get(name)
        and not any(name in outer for outer in spec.batched_over.values())
    )


def _counts(spec: PermutationSpec, params: Params) -> dict[str, int]:
    """For each permutation, how many of its units are apart."""
    return {name: len(params.get("apart", {}).get(_key(name), ())) for name in spec.sizes}


def _masks(spec: PermutationSpec, params: Params, xp: Any = np) -> dict[str, Bool[Array, "..."]]:
    """For each permutation, which of its units are apart; arrays of `xp` if that is known from their number."""
    masks = {}
    for name, count in _counts(spec, params).items():
        size = math.prod(spec.shape(name))
        if _is_alone(spec, name) or not count:
            mask = xp.arange(size) >= size - count
        else:
            mask = jnp.zeros(size, bool).at[params["apart"][_key(name)]].set(True)
        masks[name] = mask.reshape(spec.shape(name))
    return masks


def _with_outer(spec: PermutationSpec, apart: Mapping[str, Bool[np.ndarray, "..."]]) -> dict[str, Any]:
    """Masks of units that are apart; what is inside of a unit that is apart, as the dimensions of a head, is apart."""
    found = dict(apart)
    for name, outer in spec.batched_over.items():
        for perm, index, _ in spec.units_of((*outer, name), spec.shape(name)):
            found[name] = found[name] | apart[perm][index]
    return found


def _averaging(
    spec: PermutationSpec, params: Params, trace: Intermediates
) -> tuple[dict[ArrayId, Callable[..., Any]], dict[EqnPath, Callable[..., Any]]]:
    """The edits, and the products, that give merged units one value in all streams where a linear map gives them one.

    A product computes no more than is in use; where apart and merged units do not split its axes, an edit averages it.
    """
    masks, counts = _masks(spec, params), _counts(spec, params)
    leaves = _views_of_leaves(trace, named_leaves(params.get("rest")).keys())
    edits: dict[ArrayId, Callable[..., Any]] = {}
    products: dict[EqnPath, Callable[..., Any]] = {}
    for equation in _maps_to_units(spec, trace):
        result = equation.results[0].id
        if product := _product(spec, masks, counts, equation, leaves):
            products[result.path] = product
        else:
            edits[result] = partial(_average_merged, _is_apart(spec, masks, equation))
    return edits, products


def _key(name: str) -> str:
    """The key of a permutation in a tree, in which a / would be a branch."""
    return name.replace("/", ".")


def _floats(params: Params) -> dict[str, Any]:
    return {name: leaf for name, leaf in named_leaves(params).items() if is_inexact(leaf)}


def _mean(values: Sequence[Array]) -> Any:
    if all(value is values[0] for value in values):
        return values[0]
    first, *rest = map(at_least_float32, values)
    return in_dtype_of(values[0], sum(rest, first) / len(values))


def _average_merged(is_apart: Bool[Array, "..."], values: tuple[Array, ...]) -> tuple[Any, ...]:
    """An array of each stream, with the mean over the streams where units are merged."""
    mean = _mean(values)
    return tuple(jnp.where(is_apart, value, mean) for value in values)


def _maps_to_units(spec: PermutationSpec, trace: Intermediates) -> Iterator[Equation]:
    """The linear maps, also those inside scans, whose results have units."""
    for equation in trace.equations:
        if is_linear_map(equation) and equation.results[0].names & spec.sizes.keys():
            yield equation


def _is_apart(spec: PermutationSpec, masks: Mapping[str, Array], equation: Equation) -> Bool[Array, "..."]:
    """Where the result of a linear map has values of units that are apart; inside a scan, at each step alike."""
    layouts = equation.results[0].layouts
    shape = tuple(spec.length(layout) if layout and axis_names(layout) else 1 for layout in layouts)
    return _any_unit(spec, masks, layouts, shape)[(0,) * equation.loops]


def _any_unit(
    spec: PermutationSpec, masks: Mapping[str, Array], layouts: tuple[Layout, ...], shape: tuple[int, ...]
) -> Bool[Array, "..."]:
    """Where an array has entries of units in the masks."""
    found: Any = np.zeros(shape, bool)
    for name, index, is_unit in spec.units_of(layouts, shape):
        found = found | (is_unit & masks[name][index])
    return found


def _has_unit(spec: PermutationSpec, name: str, shape: tuple[int, ...]) -> Bool[np.ndarray, "..."]:
    """Which weights of a leaf belong to any unit."""
    every = {perm: np.ones(spec.shape(perm), bool) for perm in spec.sizes}
    return np.asarray(_any_unit(spec, every, spec.axes[name], shape))


class _Halves(NamedTuple):
    """The positions along an axis, those of merged units first, and where those of units that are apart begin."""

    order: Int[Array, "n"]
    split: int

    @property
    def merged(self) -> Int[Array, "m"]:
        return self.order[: self.split]

    @property
    def apart(self) -> Int[Array, "k"]:
        return self.order[self.split :]


class _Axes(NamedTuple):
    """The axes of a product of activations and weights: summed over in both, and the output's in weights and result."""

    summed: tuple[int, int]
    output: tuple[int, int]


def _product(
    spec: PermutationSpec,
    masks: Mapping[str, Array],
    counts: Mapping[str, int],
    equation: Equation,
    leaves: Collection[ArrayId],
) -> Callable[..., list[tuple[Any, ...]]] | None:
    """A linear map of all streams that multiplies each weight in use once; None if its weights do not split so.

    Weights between merged units are the same in all streams, and merged outputs are means over the streams. So these
    weights only need the mean of the inputs. The weights into and out of units that are apart are each network's own.
    """
    params, name = equation.eqn.params, equation.eqn.primitive.name
    x_at, w_at = (0, 1) if equation.operands[1] in equation.params_only else (1, 0)
    weights = equation.operands[w_at]
    if weights is None or weights.id not in leaves:
        return None
    if name == "dot_general":
        summed, batch = params["dimension_numbers"]
        inner, outer = summed[w_at], tuple(i for i in range(len(weights.shape)) if i not in summed[w_at])
        if batch[0]:
            return None
    else:
        dims = params["dimension_numbers"]
        inner, outer = dims.rhs_spec[1:2], dims.rhs_spec[:1]
        if w_at == 0 or params["feature_group_count"] > 1 or params["batch_group_count"] > 1:
            return None
    units = {name for axis in outer for name in axis_names(weights.layouts[axis])}
    inputs, outputs = (_split_axes(spec, masks, counts, weights, axes) for axes in (inner, outer))
    if inputs is None or outputs is None or equation.results[0].names - units:  # the last are units of the inputs
        return None

    def of_convolution(*operands: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        axes = _Axes((dims.lhs_spec[1], inner[0]), (outer[0], dims.out_spec[1]))
        multiply = partial(equation.eqn.primitive.bind, **params)
        return [_multiply_packed(multiply, axes, inputs, outputs, *operands)]

    def of_matrices(*operands: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        def rows(x: Array) -> Array:
            last = jnp.moveaxis(x, summed[x_at], range(x.ndim - len(inner), x.ndim))
            return last.reshape(*last.shape[: x.ndim - len(inner)], -1)

        def matrix(w: Array) -> Array:
            return w.transpose(*inner, *outer).reshape(len(inputs.order), -1)

        def restore(y: Array) -> Array:
            y = y.reshape(*y.shape[:-1], *(weights.shape[axis] for axis in outer))
            units = range(y.ndim - len(outer), y.ndim)
            return y if w_at else jnp.moveaxis(y, units, range(len(outer)))

        how = {name: params[name] for name in ("precision", "preferred_element_type")}
        xs, ws = _each(rows, operands[x_at]), _each(matrix, operands[w_at])
        multiply = partial(jnp.matmul, **how)
        return [_each(restore, _multiply_packed(multiply, _Axes((-1, 0), (1, -1)), inputs, outputs, xs, ws))]

    return of_matrices if name == "dot_general" else of_convolution


def _each(function: Callable[[Any], Any], values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The function of an array of each stream, computed once for arrays that are the same."""
    found = {id(value): function(value) for value in {id(value): value for value in values}.values()}
    return tuple(found[id(value)] for value in values)


def _multiply_packed(
    multiply: Callable[[Any, Any], Any],
    axes: _Axes,
    inputs: _Halves,
    outputs: _Halves,
    xs: tuple[Any, ...],
    ws: tuple[Any, ...],
) -> tuple[Any, ...]:
    """The product of each stream, with the mean over the streams in merged outputs."""
    found = []
    if len(outputs.merged):
        kernels = [_take(w, outputs.merged, axes.output[0]) for w in ws]
        blocks = [(_mean(xs), kernels[0], inputs.merged)]
        blocks += [(x / len(xs), kernel, inputs.apart) for x, kernel in zip(xs, kernels, strict=True)]
        blocks = [block for block in blocks if len(block[2])]
        merged = multiply(
            jnp.concatenate([_take(x, units, axes.summed[0]) for x, _, units in blocks], axes.summed[0]),
            jnp.concatenate([_take(kernel, units, axes.summed[1]) for _, kernel, units in blocks], axes.summed[1]),
        )
        found.append((merged,) * len(xs))
    if len(outputs.apart):
        found.append(tuple(multiply(x, _take(w, outputs.apart, axes.output[0])) for x, w in zip(xs, ws, strict=True)))
    if len(found) == 1:
        return found[0]
    back = jnp.argsort(order) if isinstance(order := outputs.order, jax.Array) else np.argsort(order)
    return tuple(
        _take(jnp.concatenate(parts, axes.output[1]), back, axes.output[1]) for parts in zip(*found, strict=True)
    )


def _take(array: Array, units: Int[Array, "k"], axis: int) -> Any:
    """The entries of some units; where they are known to follow one another, a slice."""
    if isinstance(units, np.ndarray) and len(units) and (np.diff(units) == 1).all():
        return jax.lax.slice_in_dim(array, int(units[0]), int(units[-1]) + 1, axis=axis % np.ndim(array))
    return jnp.take(array, units, axis)


def _split_axes(
    spec: PermutationSpec,
    masks: Mapping[str, Array],
    counts: Mapping[str, int],
    weights: Intermediate,
    axes: Sequence[int],
) -> _Halves | None:
    """The positions along some axes of weights, flattened; None if the number of either kind is not known."""
    layouts, shape = tuple(weights.layouts[axis] for axis in axes), tuple(weights.shape[axis] for axis in axes)
    names = {name for layout in layouts for name in axis_names(layout)}
    if not all(names.issuperset(spec.batched_over.get(name, ())) for name in names):
        return None
    mask = _any_unit(spec, masks, layouts, shape).ravel()
    if isinstance(mask, np.ndarray):
        return _Halves(np.argsort(mask, kind="stable"), int((~mask).sum()))
    outer = {name for perm in names for name in spec.batched_over.get(perm, ())}
    number, covered, apart = np.zeros(shape, int), np.zeros(shape, bool), 0
    for name, _, is_unit in spec.units_of(layouts, shape):
        positions = np.broadcast_to(is_unit, shape)
        covered |= positions
        if name not in outer:  # for its units are apart only with those inside of them
            number += positions
            apart += counts[name] * int(positions.sum()) // math.prod(spec.shape(name))
    return _Halves(jnp.argsort(mask, stable=True), mask.size - apart) if (number == covered).all() else None


def _views_of_leaves(trace: Intermediates, without: Collection[str]) -> Collection[ArrayId]:
    """The leaves, and what has their entries in another order or shape; not of leaves with weights of no unit apart."""
    found = {leaf.id: leaf.names for name, leaf in trace.params.items() if name not in without}
    for equation in trace.equations:
        for operand in equation.operands if equation.eqn.primitive.name in VIEWS else ():
            (result,) = equation.results
            if operand and found.get(operand.id) == result.names:
                found[result.id] = result.names
    return found.keys()


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
