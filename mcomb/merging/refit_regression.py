"""Refit every linear map of an average to the activations of the averaged networks, by least squares.

The activations of an average differ from those of the networks, increasingly so in deeper layers. Each linear map is
therefore refitted, in order of use. Its inputs are those in the merged network, in which all earlier maps are already
refitted. Its targets are the mean of the networks' outputs. RegMean (Jin et al. 2023) is similar, but regresses each
network's outputs on its own activations. The jaxpr shows where the maps are and which parameters they have.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from mcomb.errors import UserError, require_positive
from mcomb.evaluation.batch_statistics import estimate_on_batches, list_norms
from mcomb.merging.average import average_networks
from mcomb.runtime.batching import BATCH, equal_batches
from mcomb.symmetry.intermediates import ArrayId, Intermediates, LinearMap, list_intermediates, list_linear_maps
from mcomb.symmetry.spec import PermutationSpec
from mcomb.trees import (
    Apply,
    Array,
    Inputs,
    Params,
    at_least_float32,
    count_examples,
    in_dtype_of,
    is_inexact,
    keep_non_floats,
    map_named,
    named_leaves,
    require_finite_result,
)

BLOCK = 200  # examples that are processed at once
DIGIT = 256  # every float dtype represents integers below this exactly


class EntryPlace(NamedTuple):
    """The leaf that the entries of an array come from, and the position of each entry in it."""

    leaf: str
    positions: np.ndarray


class Fittable(NamedTuple):
    """A linear map whose weights and bias are entries of leaves.

    In the order of a matrix product, the kernel has the shape (inputs, outputs) and the bias (outputs,).
    """

    map: LinearMap
    kernel: EntryPlace
    bias: EntryPlace | None


def refit_average(
    apply: Apply,
    networks: Sequence[Params],
    inputs: Inputs,
    *,
    spec: PermutationSpec,
    ridge: float = 0.01,
) -> Params:
    """Return the average of the networks with each linear map fitted to the mean of their outputs."""
    here = jax.device_get(tuple(networks))  # they may be on different devices
    return refit_maps(spec, here, average_networks(apply, here, inputs), apply, inputs, ridge=ridge)


def refit_maps(
    spec: PermutationSpec,
    networks: Sequence[Params],
    merged: Params,
    apply: Apply,
    inputs: Inputs,
    *,
    ridge: float = 0.01,
) -> Params:
    """Refit each linear map of a merged network to the mean of the networks' outputs on these inputs.

    `ridge` penalises changes of the weights, relative to the mean square of their inputs. Running statistics are
    re-estimated after each map, so that later maps receive the activations of the result. A few inputs are dropped to
    make all blocks equal.

    All other parameters stay unchanged. These include norms and embeddings, maps inside scans and branches, complex
    maps, grouped convolutions, and weights that are used twice or computed from parameters.
    """
    require_positive(ridge=ridge)
    count = count_examples(inputs)
    blocks = max(1, count // BLOCK)
    size = count // blocks
    here = jax.device_get(inputs)
    split = [jax.tree.map(lambda x, i=i: x[i * size : (i + 1) * size], here) for i in range(blocks)]
    device = jax.local_devices()[0]
    every = jax.device_put(jax.device_get((merged, *networks)), device)
    traces = [list_intermediates(spec, apply, params, split[0]) for params in every]
    found = [list_fittable(trace, params) for trace, params in zip(traces, every, strict=True)]
    if len({len(maps) for maps in found}) > 1:
        raise UserError(
            "The networks have different linear maps, probably because their dtypes differ: use one dtype for all."
        )
    if not found[0]:
        raise UserError("The function has no linear map to refit: merge by another method.")
    batches = jax.device_put(equal_batches(here, BATCH), device) if list_norms(traces[0]) else None
    fitted, *others = every
    for maps in zip(*found, strict=True):
        observe = jax.jit(partial(_observe, traces, maps))
        seen = [jax.device_get(observe((fitted, *others), block)) for block in split]
        gram, residual = (sum(one[i].astype(np.float64) for one in seen) for i in (0, 1))
        require_finite_result("Activations", (gram, residual), inputs, *networks)
        gram += ridge * np.trace(gram) / len(gram) * np.eye(len(gram))
        fitted = _add(fitted, maps[0], np.linalg.lstsq(gram, residual)[0])
        if batches is not None:
            fitted = estimate_on_batches(apply, fitted, batches)
    return keep_non_floats(jax.device_get(fitted), merged)


def list_fittable(intermediates: Intermediates, params: Params) -> list[Fittable]:
    """Return the linear maps whose weights and bias are leaves that nothing else reads."""
    maps = [found for found in list_linear_maps(intermediates) if _is_plain(found)]
    operands = [operand for equation in intermediates.equations for operand in equation.operands]
    reads = Counter(operand.id for operand in operands if operand is not None)
    arrays = {array.id for found in maps for array in (found.weights, found.bias) if array and reads[array.id] == 1}
    places = find_places(intermediates, params, arrays)
    is_own = lambda place: reads[intermediates.params[place.leaf].id] == 1  # noqa: E731
    fittable = []
    for found in maps:
        weights = places.get(found.weights.id)
        if weights is None or not is_own(weights):
            continue
        own = Fittable(found, EntryPlace(weights.leaf, _matrix(found, weights.positions)), None)
        if found.bias:
            bias = places.get(found.bias.id)
            if bias is None or not is_own(bias):
                continue
            shape = found.equation.eqn.outvars[0].aval.shape  # type: ignore[attr-defined]
            samples = _rows(found, np.broadcast_to(bias.positions, shape))
            if (samples != samples[0]).any():  # it differs between samples, such as a bias for each position
                continue
            own = own._replace(bias=EntryPlace(bias.leaf, samples[0]))
        if all(len(np.unique(place.positions)) == place.positions.size for place in own[1:] if place):
            fittable.append(own)
    return fittable


def find_places(intermediates: Intermediates, params: Params, wanted: Collection[ArrayId]) -> dict[ArrayId, EntryPlace]:
    """Find the positions of the wanted arrays' entries in the parameters, for arrays with entries of a single leaf.

    It numbers all entries of the parameters, evaluates the function on the digits of these numbers, and reads the
    arrays. A second evaluation on random numbers must agree, which excludes functions such as the absolute value.
    """
    leaves = {name: np.asarray(leaf) if is_inexact(leaf) else leaf for name, leaf in named_leaves(params).items()}
    ends = np.cumsum([leaf.size for leaf in leaves.values()])
    starts = dict(zip(leaves, ends - [leaf.size for leaf in leaves.values()], strict=True))
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in intermediates.traced.in_avals[len(leaves) :]]
    blank = [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]
    tap = jax.jit(lambda params: intermediates.tap(wanted)(params, *blank)[1])

    def digit(place: int) -> Params:
        def numbered(name: str, leaf: Array) -> Any:
            numbers = (starts[name] + np.arange(leaf.size)) // DIGIT**place % DIGIT
            return numbers.reshape(leaf.shape).astype(leaf.dtype) if is_inexact(leaf) else leaf

        return map_named(numbered, params)

    numbers = {array: np.zeros((), np.int64) for array in wanted}
    for place in range(len(np.base_repr(ends[-1], 16)) // 2 + 1):
        for array, digits in jax.device_get(tap(digit(place))).items():
            numbers[array] = numbers[array] + np.asarray(digits, np.float64).astype(np.int64) * DIGIT**place
    rng = np.random.default_rng(0)
    leaves = {
        name: rng.normal(size=leaf.shape).astype(leaf.dtype) if is_inexact(leaf) else leaf
        for name, leaf in leaves.items()
    }
    places = {}
    for array, values in jax.device_get(tap(map_named(lambda name, _: leaves[name], params))).items():
        owners = np.searchsorted(ends, numbers[array].clip(0, ends[-1] - 1), side="right")
        name = list(leaves)[owners.flat[0]]
        index = numbers[array] - starts[name]
        inside = (owners == owners.flat[0]).all() and index.min() >= 0 and index.max() < leaves[name].size
        if inside and (leaves[name].ravel()[index].astype(values.dtype) == values).all():
            places[array] = EntryPlace(name, index)
    return places


def _is_plain(found: LinearMap) -> bool:
    """Return whether a map is a single real matrix product or convolution, without batches or groups."""
    p = found.equation.eqn.params
    if jnp.issubdtype(found.equation.eqn.outvars[0].aval.dtype, jnp.complexfloating):  # type: ignore[attr-defined]
        return False
    if found.equation.eqn.primitive.name == "dot_general":
        return not any(p["dimension_numbers"][1])
    return p["feature_group_count"] == p["batch_group_count"] == 1 and _of_weights(found) == 1


def _of_weights(found: LinearMap) -> int:
    """Return which of the two operands is the weights."""
    return [operand and operand.id for operand in found.equation.operands].index(found.weights.id)


def _matrix(found: LinearMap, weights: np.ndarray) -> np.ndarray:
    """Reshape the weights to a matrix (inputs, outputs)."""
    dims, side = found.equation.eqn.params["dimension_numbers"], _of_weights(found)
    if found.equation.eqn.primitive.name == "dot_general":
        summed = dims[0][side]
        order = [*summed, *(axis for axis in range(weights.ndim) if axis not in summed)]
        return weights.transpose(order).reshape(np.prod([weights.shape[axis] for axis in summed], dtype=int), -1)
    outputs, *inputs = dims.rhs_spec
    return weights.transpose(*inputs, outputs).reshape(-1, weights.shape[outputs])


def _rows(found: LinearMap, outputs: Any) -> Any:
    """Reshape the outputs to a matrix (samples, outputs)."""
    eqn = found.equation.eqn
    if eqn.primitive.name == "conv_general_dilated":
        features = eqn.params["dimension_numbers"].out_spec[1]
        order = [axis for axis in range(outputs.ndim) if axis != features]
        return outputs.transpose(*order, features).reshape(-1, outputs.shape[features])
    (left, right), side = eqn.params["dimension_numbers"][0], _of_weights(found)
    shapes = [var.aval.shape for var in eqn.invars]  # type: ignore[attr-defined]
    own = len(shapes[side]) - len((left, right)[side])  # axes of the outputs that come from the weights
    width = int(np.prod(outputs.shape[:own] if side == 0 else outputs.shape[outputs.ndim - own :]))
    return outputs.reshape(width, -1).T if side == 0 else outputs.reshape(-1, width)


def _columns(found: LinearMap, values: Any) -> Any:
    """Reshape the inputs of a map to a matrix (samples, inputs); a convolution's inputs become patches."""
    eqn, side = found.equation.eqn, 1 - _of_weights(found)
    if eqn.primitive.name == "dot_general":
        summed = eqn.params["dimension_numbers"][0][side]
        order = [*(axis for axis in range(values.ndim) if axis not in summed), *summed]
        return values.transpose(order).reshape(-1, int(np.prod([values.shape[axis] for axis in summed])))
    p, dims = eqn.params, eqn.params["dimension_numbers"]
    kernel = eqn.invars[1].aval.shape  # type: ignore[attr-defined]
    patches = jax.lax.conv_general_dilated_patches(
        values,
        [kernel[axis] for axis in dims.rhs_spec[2:]],
        p["window_strides"],
        p["padding"],
        p["lhs_dilation"],
        p["rhs_dilation"],
        dimension_numbers=dims,
        precision=jax.lax.Precision.HIGHEST,
    )
    return _rows(found, patches)


def _observe(
    traces: Sequence[Intermediates], maps: Sequence[Fittable], every: Sequence[Params], inputs: Inputs
) -> tuple[Float[Array, "i i"], Float[Array, "i o"]]:
    """Return XᵀX and Xᵀ(Y − Z) for inputs X, target outputs Y and outputs Z of the merged map.

    `every` has the merged network first.
    """

    def tapped(trace: Intermediates, own: Fittable, params: Params, wanted: Sequence[ArrayId]) -> list[Any]:
        found = trace.tap(wanted)(params, inputs)[1]
        return [found[array].astype(jnp.float32) for array in wanted]

    own, *theirs = maps
    (into,) = (operand for operand in own.map.equation.operands if operand and operand.id != own.map.weights.id)
    values, outputs = tapped(traces[0], own, every[0], [into.id, own.map.output.id])
    goals = [
        tapped(trace, one, params, [one.map.output.id])[0]
        for trace, one, params in zip(traces[1:], theirs, every[1:], strict=True)
    ]
    x = _columns(own.map, values)
    if own.bias:
        x = jnp.concatenate([x, jnp.ones((len(x), 1))], axis=1)
    lacking = _rows(own.map, sum(goals) / len(goals) - outputs)
    return jnp.matmul(x.T, x, precision="highest"), jnp.matmul(x.T, lacking, precision="highest")


def _add(params: Params, own: Fittable, change: np.ndarray) -> Params:
    """Add a change of shape (inputs, outputs), with a last row for the bias, to the parameters of a map."""
    changes = {own.kernel.leaf: (own.kernel.positions, change[: len(own.kernel.positions)])}
    if own.bias:
        changes[own.bias.leaf] = (own.bias.positions, change[-1])

    def add(name: str, leaf: Array) -> Any:
        if name not in changes:
            return leaf
        index, amount = changes[name]
        flat = np.array(at_least_float32(leaf)).ravel()
        flat[index] += amount.astype(flat.dtype)
        return in_dtype_of(leaf, flat.reshape(np.shape(leaf)))

    return map_named(add, params)
