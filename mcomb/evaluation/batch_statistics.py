"""Find and estimate running statistics: the means and variances of activations that a BatchNorm stores.

The activations of a combination differ from those of the networks, so the average of the networks' statistics does not
fit it. mcomb therefore estimates statistics on data after combining weights, and never averages them.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from mcomb.combination import Draw
from mcomb.errors import UserError
from mcomb.runtime.batching import BATCH, equal_batches
from mcomb.runtime.devices import replicate
from mcomb.symmetry.intermediates import ArrayId, Equation, Intermediate, Intermediates, list_intermediates
from mcomb.symmetry.interpreter import ARGUMENTS
from mcomb.symmetry.jaxpr_walk import all_equations
from mcomb.symmetry.spec import PermutationSpec
from mcomb.trees import (
    Apply,
    Array,
    Inputs,
    Params,
    at_least_float32,
    in_dtype_of,
    keep_non_floats,
    map_named,
    named_leaves,
    output_shapes,
    require_finite_result,
)

# Primitives that keep entries unchanged, and at most repeat them or reorder their axes.
SAME = (
    *("convert_element_type", "copy", "reduce_precision", "sharding_constraint"),
    *("transpose", "squeeze", "broadcast_in_dim", "reshape"),
)
STATISTICS_NAMES = r"(^|/)batch_stats/|(^|[/._])(running_(mean|var)|(mean|var)_ema)($|[/.])"


class Norm(NamedTuple):
    """A normalisation of an array by two leaves: (x − mean) / √(variance + epsilon)."""

    mean: str
    variance: str
    epsilon: float
    centred: ArrayId  # x − mean
    axes: tuple[int | None, ...]  # for each of its axes, the axis of the leaves; None along samples
    divisors: tuple[ArrayId | None, ArrayId | None]  # numbers that divide the leaves first, as in Equinox


class Origin(NamedTuple):
    """The leaf that an array's entries come from, and the leaf's axis for each axis of the array.

    Added axes have None. The entries may have been divided by a number.
    """

    leaf: str
    axes: tuple[int | None, ...]
    divisor: ArrayId | None = None


def estimate_statistics(apply: Apply, params: Params, inputs: Inputs, *, batch_size: int = BATCH) -> Params:
    """Re-estimate the running statistics (BatchNorm) of a network on the inputs.

    Each batch is normalised by its own mean and (biased) variance, as in training, and these are averaged over batches.
    A few inputs are dropped to make all batches equal.

    Statistics are found in the jaxpr, so that any framework works. They are two leaves of one shape: the first is
    subtracted from an array, and the square root of the second, plus an epsilon, divides the difference. Branches and
    while loops are not searched.

    Args:
        apply: The function, called as `apply(params, inputs)`.
        params: The network's parameters, including running statistics.
        inputs: Inputs with examples along the first axis.
        batch_size: Largest number of inputs in a batch.

    Returns:
        The parameters with new running statistics, or unchanged if there are none.

    Raises:
        UserError: The function does not fit the inputs, or statistics are inside a scan or used twice.

    Examples:
        >>> def normalised(params, x):
        ...     centred = x @ params["up"] - params["mean"]
        ...     scaled = centred / jnp.sqrt(params["variance"] + 1e-5)
        ...     return jax.nn.relu(scaled) @ params["down"]
        >>> params = {**a, "mean": jnp.zeros(128), "variance": jnp.ones(128)}
        >>> params = mcomb.estimate_statistics(normalised, params, x)
        >>> round(float(params["mean"].mean()), 2), round(float(params["variance"].mean()), 2)
        (0.6, 0.3)
    """
    batches = equal_batches(inputs, batch_size)
    first = jax.tree.map(lambda x: x[0], batches)
    output_shapes(apply, params, first)
    if not (names := statistics_of(apply, params, first)):
        return params
    estimated = keep_non_floats(estimate_on_batches(apply, *replicate((params, batches))), params)
    require_finite_result("Activations", [named_leaves(estimated)[name] for name in names], inputs, params)
    return estimated


def statistics_of(apply: Apply, params: Params, inputs: Inputs) -> list[str]:
    """Return the names of the leaves that are running statistics, given arrays or their shapes."""
    traced = jax.make_jaxpr(apply)(params, inputs)
    if not {"sqrt", "rsqrt"} & {eqn.primitive.name for eqn in all_equations(traced)}:  # most networks have none
        return []
    return [name for norm in list_norms(_trace(apply, params, inputs)) for name in (norm.mean, norm.variance)]


def names_of_statistics(params: Params) -> list[str]:
    """Return the leaves whose names mark them as running statistics, for use without the function.

    These are Flax's `batch_stats`, PyTorch's `running_mean` and `running_var`, and Haiku's `mean_ema` and `var_ema`.
    """
    return [name for name in named_leaves(params) if re.search(STATISTICS_NAMES, name)]


def normalise_by_batch(apply: Apply, params: Params, inputs: Inputs) -> tuple[Any, dict[str, Array]]:
    """Evaluate the function with the statistics of these inputs; return the outputs and the statistics by leaf name.

    The stored statistics do not matter. When a combination extrapolates, its variances may even be negative.
    """
    trace, found = _trace(apply, params, inputs), dict[str, Array]()
    norms = list_norms(trace)
    variances = {norm.variance for norm in norms}
    params = map_named(lambda name, leaf: jnp.ones_like(leaf) if name in variances else leaf, params)
    leaves = named_leaves(params)
    divisors = divisors_of(norms, trace, params, inputs)

    def edit(norm: Norm, centred: Array) -> Array:
        centred, statistics = normalise(norm, leaves, divisors, centred)
        found.update(statistics)
        return centred

    edits = {norm.centred: partial(edit, norm) for norm in norms}
    return trace.tap((), edits)(params, inputs)[0], found


def divisors_of(norms: Sequence[Norm], trace: Intermediates, params: Params, inputs: Inputs) -> dict[str, Array]:
    """Return the numbers that divide statistics before use, by the names of their leaves."""
    pairs = [(name, i) for norm in norms for name, i in zip(norm[:2], norm.divisors, strict=True) if i is not None]
    found = trace.tap({i for _, i in pairs})(params, inputs)[1] if pairs else {}
    return {name: found[i].reshape(()) for name, i in pairs}


def normalise(
    norm: Norm, leaves: Mapping[str, Any], divisors: Mapping[str, Array], centred: Array
) -> tuple[Array, dict[str, Array]]:
    """Replace `x − mean` so that batch statistics apply, and return those statistics."""
    mean, variance = (at_least_float32(jnp.asarray(leaves[name])) / divisors.get(name, 1) for name in norm[:2])
    exact, samples = at_least_float32(centred), tuple(i for i, axis in enumerate(norm.axes) if axis is None)
    shift = exact.mean(samples, keepdims=True)
    own = jnp.square(exact - shift).mean(samples, keepdims=True)
    order = [axis for axis in norm.axes if axis is not None]  # the leaves' axes in the order of the array
    sizes = [mean.shape[axis] for axis in order]
    back = [sorted(order).index(axis) for axis in order]

    def of_leaf(values: Array) -> Array:
        return values.reshape(sizes).transpose(np.argsort(back)).reshape(mean.shape).astype(mean.dtype)

    assumed = variance.reshape([mean.shape[axis] for axis in sorted(order)]).transpose(back).reshape(own.shape)
    factor = jnp.sqrt((assumed + norm.epsilon) / (own + norm.epsilon))
    statistics = {norm.mean: mean + of_leaf(shift), norm.variance: of_leaf(own)}
    statistics = {name: value * divisors.get(name, 1) for name, value in statistics.items()}
    return ((exact - shift) * factor).astype(centred.dtype), statistics


@cache
def draw_with_statistics(apply: Apply, draw: Draw) -> Draw:
    """Return a draw whose last argument, after the networks, is batches of inputs for estimating statistics."""

    def run(key: Any, parameter: Any, *args: Any) -> Params:
        *networks, batches = args
        return estimate_on_batches(apply, draw(key, parameter, *networks), batches)

    return run


@partial(jax.jit, static_argnums=0)
def estimate_on_batches(apply: Apply, params: Params, batches: Inputs) -> Params:
    """Return the network with its running statistics estimated on batches of inputs, in one compiled call."""
    found = jax.lax.map(lambda batch: normalise_by_batch(apply, params, batch)[1], batches)
    return map_named(lambda name, leaf: in_dtype_of(leaf, found[name].mean(0)) if name in found else leaf, params)


def list_norms(trace: Intermediates) -> list[Norm]:
    """Return all normalisations by running statistics, in order of use."""
    graph = _Graph(trace)
    shapes = {name: aval.shape for name, aval in zip(trace.params, trace.traced.in_avals, strict=False)}
    norms = []
    for equation in trace.equations:
        if equation.eqn.primitive.name != "sub":
            continue
        x, subtracted = equation.operands
        mean = graph.origins.get(subtracted.id) if x and subtracted and x.depends_on_inputs else None
        variance = graph.divided_by(equation.results[0]) if mean else None
        if not mean or not variance or shapes.get(mean.leaf) != shapes.get(variance[0].leaf):
            continue
        if equation.loops:
            raise UserError("Cannot estimate running statistics inside a scan: write the function without the scan.")
        given, result = (var.aval.shape for var in (equation.eqn.invars[1], equation.eqn.outvars[0]))  # type: ignore[attr-defined]
        axes = tuple(axis if given[i] == result[i] else None for i, axis in enumerate(mean.axes))
        (other, epsilon), own = variance, equation.results[0].id
        norms.append(Norm(mean.leaf, other.leaf, epsilon, own, axes, (mean.divisor, other.divisor)))
    names = [name for norm in norms for name in (norm.mean, norm.variance)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"The running statistics {twice[0]} are used twice: use separate statistics for each norm.")
    return norms


class _Graph:
    """The producer and the users of each array, and the arrays that hold the entries of a leaf."""

    def __init__(self, trace: Intermediates) -> None:
        self.makers: dict[ArrayId, Equation] = {}
        self.uses: dict[ArrayId, list[Equation]] = {}
        self.origins = {own.id: Origin(name, tuple(range(len(own.layouts)))) for name, own in trace.params.items()}
        for equation in trace.equations:
            for operand, var in zip(equation.operands, equation.eqn.invars, strict=True):
                if operand is None:
                    continue
                self.uses.setdefault(operand.id, []).append(equation)
                if equation.loops and operand.id.path[-1] == ARGUMENTS and not operand.depends_on_inputs:
                    own = tuple(range(len(var.aval.shape)))  # type: ignore[attr-defined]
                    self.origins.setdefault(operand.id, Origin("", own))  # read by a scan at each step
            self.makers |= {result.id: equation for result in equation.results}
            first = equation.operands[0] if equation.operands and equation.results else None
            origin = self.origins.get(first.id) if first else None
            if origin and (moved := self._moved(equation, origin)):
                self.origins[equation.results[0].id] = moved

    def _moved(self, equation: Equation, origin: Origin) -> Origin | None:
        """Return the origin of an equation's result if it keeps a leaf's entries or divides them by a number."""
        if equation.eqn.primitive.name == "div" and origin.divisor is None:
            divisor, size = equation.operands[1], math.prod(equation.eqn.invars[1].aval.shape)  # type: ignore[attr-defined]
            is_number = divisor and size == 1 and not divisor.depends_on_inputs
            return origin._replace(divisor=divisor.id) if divisor and is_number else None
        axes = _moved_axes(equation.eqn, origin.axes)
        return None if axes is None else origin._replace(axes=axes)

    def divided_by(self, array: Intermediate) -> tuple[Origin, float] | None:
        """Return the leaf and the epsilon if every use of an array divides it by √(leaf + epsilon)."""
        found = set()
        for equation in self._uses(array):
            left, right = (*equation.operands, None)[:2]
            match equation.eqn.primitive.name:
                case "mul" if left and right:
                    found.add(self._root(right if left.depends_on_inputs else left, -1))
                case "div" if right and not right.depends_on_inputs:
                    found.add(self._root(right, 1))
                case _:
                    return None
        return found.pop() if len(found) == 1 else None

    def _uses(self, array: Intermediate) -> Iterator[Equation]:
        for equation in self.uses.get(array.id, ()):
            if equation.eqn.primitive.name == "convert_element_type":
                yield from self._uses(equation.results[0])
            else:
                yield equation

    def _root(self, array: Intermediate, sign: int) -> tuple[Origin, float] | None:
        """Return the leaf and the epsilon if √(leaf + epsilon), to the power of `sign`, is a factor of an array."""
        equation = self.makers.get(array.id)
        if equation is None or array.depends_on_inputs:
            return None
        operands, name = equation.operands, equation.eqn.primitive.name
        if name == {1: "sqrt", -1: "rsqrt"}[sign] and operands[0]:
            return self._sum(operands[0])
        if name not in ("mul", "div", *SAME):
            return None
        signs = (sign, -sign if name == "div" else sign)
        roots = [self._root(operand, sign) for operand, sign in zip(operands, signs, strict=False) if operand]
        return next(filter(None, roots), None)

    def _sum(self, array: Intermediate) -> tuple[Origin, float] | None:
        """Return the leaf and the epsilon if an array is their sum."""
        equation = self.makers.get(array.id)
        if array.id in self.origins:
            return self.origins[array.id], 0.0
        if equation is None:
            return None
        if equation.eqn.primitive.name in SAME and equation.operands[0]:
            return self._sum(equation.operands[0])
        if equation.eqn.primitive.name == "add":
            for operand, other in zip(equation.operands, reversed(equation.eqn.invars), strict=True):
                if operand and operand.id in self.origins and isinstance(other, core.Literal):
                    return self.origins[operand.id], float(other.val)
        return None


def _moved_axes(eqn: core.JaxprEqn, axes: tuple[int | None, ...]) -> tuple[int | None, ...] | None:
    """Return the leaf's axes in an equation's result, given those in its operand; None if the entries change."""
    given, result = (var.aval.shape for var in (eqn.invars[0], eqn.outvars[0]))  # type: ignore[attr-defined]
    p = eqn.params
    match eqn.primitive.name:
        case "convert_element_type" | "copy" | "reduce_precision" | "sharding_constraint":
            return axes
        case "transpose":
            return tuple(axes[i] for i in p["permutation"])
        case "squeeze":
            return tuple(axis for i, axis in enumerate(axes) if i not in p["dimensions"])
        case "broadcast_in_dim":
            came = dict(zip(p["broadcast_dimensions"], zip(axes, given, strict=True), strict=True))
            return tuple(came[i][0] if i in came and came[i][1] == size else None for i, size in enumerate(result))
        case "reshape" if [size for size in given if size > 1] == [size for size in result if size > 1]:
            kept = iter([axis for axis, size in zip(axes, given, strict=True) if size > 1])
            return tuple(next(kept) if size > 1 else None for size in result)
    return None


def _trace(apply: Apply, params: Params, inputs: Inputs) -> Intermediates:
    """Trace the function without any permutations."""
    spec = PermutationSpec({name: (None,) * jnp.ndim(leaf) for name, leaf in named_leaves(params).items()}, {})
    return list_intermediates(spec, apply, params, inputs)
