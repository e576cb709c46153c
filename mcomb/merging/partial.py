"""Partial merging: merge units that match well, and keep the others apart within a parameter budget.

This follows ZipIt! (Stoica et al. 2023) and PLeaS (Nasery et al. 2024), but works for any function whose spec can be
derived. The function runs as one stream for each network, all in lockstep. A merged unit has one value in all streams:
the mean over the streams of the linear map's outputs. A weight is stored once, as the average, if all units that it
connects are merged, and otherwise once for each network. If everything is merged, the result is the average network. If
nothing is merged, it is the mean of the networks' outputs.

Linear maps to units multiply each stored weight once, so that both parameters and FLOPs follow the budget. Linear maps
to outputs, products of activations (attention) and elementwise operations run once for each network.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from mcomb.symmetry.jaxpr_walk import inner_equations
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

KEPT_APART = ("unit", "layer")
VIEWS = ("transpose", "reshape", "squeeze", "convert_element_type", "copy")  # keep the entries of an array
NEVER = np.iinfo(np.int32).max
Ranks = dict[str, Int[np.ndarray, "..."]]
"""The order in which units are split, for each permutation and for the unitless weights of each leaf: 0 is first."""


@dataclass(frozen=True, repr=False)
class PartlyMerged:
    """Networks with some merged units, as one function and its parameters.

    The parameters are a tree with up to four entries. They store no weight twice:

    - `first`: a tree like each network's, with the shared weights and the first network's own. Separate units come
      last in their permutation, except for heads and their dimensions, which keep their positions.
    - `others`: for each leaf with separate units, one row of packed weights for each further network.
    - `rest`: the same for weights that belong to no unit.
    - `apart`: the separate units of each permutation, as indices into its flattened index array.

    Attributes:
        apply: The function, called as `apply(params, inputs)`.
        params: The parameters.
        weights: The number of stored weights.

    Examples:
        >>> merged = mcomb.merge(apply, (a, aligned.params), x, method=mcomb.partial(budget=1.5))
        >>> sum(leaf.size for leaf in jax.tree.leaves(a)), merged.details.weights
        (9600, 14400)
    """

    apply: Apply
    params: Params
    weights: int

    def __repr__(self) -> str:
        return f"PartlyMerged({self.weights:,} weights)"


def merge_partly(
    apply: Apply,
    networks: Sequence[Params],
    inputs: Inputs,
    *,
    spec: PermutationSpec,
    budget: float | int,
    per: str = "unit",
) -> PartlyMerged:
    """Merge aligned networks into one with at most `budget` times the weights of one network.

    Units are ranked by the correlation of their activations, averaged over all pairs of networks. The units with the
    lowest ranks in any layer stay apart; with `per="layer"`, whole permutations do. Special cases:

    - Constant units are split last, because merging them is free. Units that are constant in only some networks, or
      whose activations are not visible, have a correlation of zero.
    - Weights that belong to no unit are ranked by leaf, by the cosine similarity of the networks.
    - Units that differ between the steps of a scan stay apart together.
    - Leaves that are not floats are the first network's.
    - Running statistics are re-estimated on the inputs, unless nothing is merged.

    With a budget of 1, the result is the average network. With a budget of all networks, it is the mean of their
    outputs. In between, the parameters and their file contain at most `budget` times the weights of one network, and
    the FLOPs of a call are about proportional to the weights. Layers inside scans, linear maps to outputs, products of
    activations and elementwise operations cost as much as in all networks.
    """
    if per not in KEPT_APART:
        raise UserError(f"Cannot keep each {per!r} apart: choose from {', '.join(KEPT_APART)}.")
    average = average_networks(apply, networks, inputs)
    require_positive(budget=budget)
    if not 1 <= budget <= len(networks):
        raise UserError(f"budget is {budget}: pass a number from 1 to {len(networks)}, the number of networks.")
    count_examples(inputs)
    if not all(map(is_inexact, jax.tree.leaves(output_shapes(apply, average, inputs)))):
        raise UserError("The function returns outputs that are not floats and have no mean: return scores instead.")
    trace = list_intermediates(spec, apply, average, inputs)
    _require_seen(spec, trace)
    together = spec.sizes.keys() if per == "layer" else _differ_by_step(spec, trace)
    ranks = _ranks(_likeness(spec, networks, apply, inputs), together)
    firsts = {name: _first_rank(spec, ranks, name, leaf) for name, leaf in _floats(average).items()}
    every = np.concatenate([np.ravel(first) for first in firsts.values()])
    counts = np.bincount(every, minlength=1 + max(int(rank.max()) for rank in ranks.values()))
    weights = len(every) + (len(networks) - 1) * np.cumsum([0, *counts])  # if ranks 0, 1, … are split
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
    """Return the parameters of `PartlyMerged`, without empty entries."""

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


@cache  # the same function object for the same arguments, so that it is compiled only once
def apply_partly_merged(spec: PermutationSpec, apply: Apply) -> Apply:
    """Return the function of the parameters of `PartlyMerged`, for example of those in a file."""

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
    """Return the running statistics of each stream by name, estimated as in `estimate_statistics`."""
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
    """Return the weights of each stream; return a single stream if everything is merged."""
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
    """Return the slices of a leaf with units that are apart, or None if these units do not come last on each axis.

    The slices do not overlap. For 5 × 4 weights with 2 and 1 units apart, they are [3:, :] and [:3, 3:].
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
    """Replace the values in the slices of a leaf."""
    for slab in slabs:
        shape = tuple(part.stop - part.start for part in slab)
        now, values = jnp.split(values, [math.prod(shape)])
        leaf = jax.lax.dynamic_update_slice(leaf, now.reshape(shape), [part.start for part in slab])
    return leaf


def _is_alone(spec: PermutationSpec, name: str) -> bool:
    """Return whether a permutation is standalone, unlike those of attention heads and their dimensions."""
    return (
        name in spec.sizes
        and not spec.batched_over.get(name)
        and not any(name in outer for outer in spec.batched_over.values())
    )


def _counts(spec: PermutationSpec, params: Params) -> dict[str, int]:
    """Return the number of separate units of each permutation."""
    return {name: len(params.get("apart", {}).get(_key(name), ())) for name in spec.sizes}


def _masks(spec: PermutationSpec, params: Params, xp: Any = np) -> dict[str, Bool[Array, "..."]]:
    """Return masks of the separate units, as arrays of `xp` unless they depend on the parameters."""
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
    """Extend masks to nested units: the dimensions of a head that is apart are apart too."""
    found = dict(apart)
    for name, outer in spec.batched_over.items():
        for perm, index, _ in spec.units_of((*outer, name), spec.shape(name)):
            found[name] = found[name] | apart[perm][index]
    return found


def _averaging(
    spec: PermutationSpec, params: Params, trace: Intermediates
) -> tuple[dict[ArrayId, Callable[..., Any]], dict[EqnPath, Callable[..., Any]]]:
    """Return the edits and the products that give merged units the same value in all streams.

    A product multiplies only the stored weights. If merged units and units that are apart do not split its axes, an
    edit averages its result instead.
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
    """Return the key of a permutation in a tree, in which a / would mean a branch."""
    return name.replace("/", ".")


def _floats(params: Params) -> dict[str, Any]:
    return {name: leaf for name, leaf in named_leaves(params).items() if is_inexact(leaf)}


def _mean(values: Sequence[Array]) -> Any:
    if all(value is values[0] for value in values):
        return values[0]
    first, *rest = map(at_least_float32, values)
    return in_dtype_of(values[0], sum(rest, first) / len(values))


def _average_merged(is_apart: Bool[Array, "..."], values: tuple[Array, ...]) -> tuple[Any, ...]:
    """Average the arrays of all streams where units are merged."""
    mean = _mean(values)
    return tuple(jnp.where(is_apart, value, mean) for value in values)


def _maps_to_units(spec: PermutationSpec, trace: Intermediates) -> Iterator[Equation]:
    """Yield the linear maps whose results have units, including those inside scans."""
    for equation in trace.equations:
        if is_linear_map(equation) and equation.results[0].names & spec.sizes.keys():
            yield equation


def _is_apart(spec: PermutationSpec, masks: Mapping[str, Array], equation: Equation) -> Bool[Array, "..."]:
    """Return where the result of a linear map has units that are apart; inside a scan, the same at each step."""
    layouts = equation.results[0].layouts
    shape = tuple(spec.length(layout) if layout and axis_names(layout) else 1 for layout in layouts)
    return _any_unit(spec, masks, layouts, shape)[(0,) * equation.loops]


def _any_unit(
    spec: PermutationSpec, masks: Mapping[str, Array], layouts: tuple[Layout, ...], shape: tuple[int, ...]
) -> Bool[Array, "..."]:
    """Return where an array has entries of units in the masks."""
    found: Any = np.zeros(shape, bool)
    for name, index, is_unit in spec.units_of(layouts, shape):
        found = found | (is_unit & masks[name][index])
    return found


def _has_unit(spec: PermutationSpec, name: str, shape: tuple[int, ...]) -> Bool[np.ndarray, "..."]:
    """Return which weights of a leaf belong to any unit."""
    every = {perm: np.ones(spec.shape(perm), bool) for perm in spec.sizes}
    return np.asarray(_any_unit(spec, every, spec.axes[name], shape))


class _Halves(NamedTuple):
    """The positions along an axis with merged units first, and where the units that are apart start."""

    order: Int[Array, "n"]
    split: int

    @property
    def merged(self) -> Int[Array, "m"]:
        return self.order[: self.split]

    @property
    def apart(self) -> Int[Array, "k"]:
        return self.order[self.split :]


class _Axes(NamedTuple):
    """The axes of a product of activations and weights: the summed axes, and the output axes in weights and result."""

    summed: tuple[int, int]
    output: tuple[int, int]


def _product(
    spec: PermutationSpec,
    masks: Mapping[str, Array],
    counts: Mapping[str, int],
    equation: Equation,
    leaves: Collection[ArrayId],
) -> Callable[..., list[tuple[Any, ...]]] | None:
    """Return a linear map of all streams that multiplies each stored weight once; None if its weights do not split.

    Weights between merged units are the same in all streams, and merged outputs are means over the streams. These
    weights therefore only need the mean of the inputs. Weights of units that are apart differ between networks.
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
    if inputs is None or outputs is None or equation.results[0].names - units:  # the result has units of the inputs
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
    """Apply a function to the array of each stream, once for identical arrays."""
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
    """Return the product of each stream, with the mean over the streams in merged outputs."""
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
    """Return the entries of some units, as a slice if they are known to be contiguous."""
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
    """Split the flattened positions along some axes of weights; return None if the number of either kind is unknown."""
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
        if name not in outer:  # outer units are apart only together with their nested units
            number += positions
            apart += counts[name] * int(positions.sum()) // math.prod(spec.shape(name))
    return _Halves(jnp.argsort(mask, stable=True), mask.size - apart) if (number == covered).all() else None


def _views_of_leaves(trace: Intermediates, without: Collection[str]) -> Collection[ArrayId]:
    """Return the leaves and their transposed or reshaped views, except for leaves in `without`."""
    found = {leaf.id: leaf.names for name, leaf in trace.params.items() if name not in without}
    for equation in trace.equations:
        for operand in equation.operands if equation.eqn.primitive.name in VIEWS else ():
            (result,) = equation.results
            if operand and found.get(operand.id) == result.names:
                found[result.id] = result.names
    return found.keys()


def _differ_by_step(spec: PermutationSpec, trace: Intermediates) -> set[str]:
    """Return the permutations whose units differ between the steps of a scan."""
    found = set()
    for equation in _maps_to_units(spec, trace):
        (result,) = equation.results
        of_steps = {name for layout in result.layouts[: equation.loops] for name in axis_names(layout)}
        found |= {name for name in result.names if of_steps.intersection((name, *spec.batched_over.get(name, ())))}
    return found & spec.sizes.keys()


def _require_seen(spec: PermutationSpec, trace: Intermediates) -> None:
    """Raise an error if linear maps to units are inside branches, loops or entries of a stack."""
    for equation in trace.equations:
        inside = {inner.primitive.name for inner in inner_equations(equation.eqn)}
        units = {name for operand in equation.operands if operand for name in operand.names} & spec.sizes.keys()
        if equation.eqn.primitive.name != "scan" and units and inside.intersection(PRODUCTS):
            raise UserError(
                f"Cannot merge units of {min(units)} inside a {equation.eqn.primitive.name}: "
                "merge by another method, or write the function without it."
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
                f"Cannot merge units of {name} in entries of a stack that are read separately: "
                "merge by another method, or use a separate leaf for each entry."
            )


def _likeness(
    spec: PermutationSpec, networks: Sequence[Params], apply: Apply, inputs: Inputs
) -> dict[str, Float[np.ndarray, "..."]]:
    """Return how well the networks match, for each unit and for the unitless weights of each leaf."""
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
    """Rank units by likeness, lowest first; units that are split together have the rank of their mean."""
    groups: Ranks = {}
    scores: list[float] = []
    for name, values in likeness.items():
        own = values.mean(keepdims=True) if name in together else values
        groups[name] = np.broadcast_to(len(scores) + np.arange(own.size).reshape(own.shape), values.shape)
        scores += own.ravel().tolist()
    ranks = np.argsort(np.argsort(scores, kind="stable")).astype(np.int32)
    return {name: np.asarray(ranks[index]) for name, index in groups.items()}


def _first_rank(spec: PermutationSpec, ranks: Ranks, name: str, leaf: Any) -> Int[np.ndarray, "..."]:
    """Return the lowest rank among the units of each weight of a leaf, or the rank of the leaf's unitless weights."""
    first = np.full(np.shape(leaf), NEVER)
    for perm, index, is_unit in spec.units_of(spec.axes[name], np.shape(leaf)):
        first = np.minimum(first, np.where(is_unit, ranks[perm][index], NEVER))
    return np.where(first == NEVER, ranks.get(_rest_of(name), NEVER), first)


def _rest_of(leaf: str) -> str:
    """Return the name of a leaf's unitless weights."""
    return f"{leaf}/"
