"""Arrays inside a function: find the activations of each permutation's units, and read or edit them.

`list_intermediates` traces a function, interprets it as `derive` does, and lists its equations with the arrays that
they read and produce. The list includes equations of nested calls and of the bodies of scans. `Intermediates.tap`
evaluates the same trace, and returns or edits any of these arrays. Branches and while loops are not entered, because
their bodies may run any number of times or not at all.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from mcomb.symmetry.axes import Axis, find, flat_parts, split_product, split_segments, write_cells
from mcomb.symmetry.derive import axis_layout, infer_axes
from mcomb.symmetry.interpreter import ARGUMENTS, EqnPath, Interpreter
from mcomb.symmetry.jaxpr_walk import called_jaxpr, evaluate, split_scan
from mcomb.symmetry.rules import CALLS
from mcomb.symmetry.spec import Blocks, Layout, PermutationSpec, Segments, axis_names
from mcomb.trees import Params

PRODUCTS = ("dot_general", "conv_general_dilated")


class ArrayId(NamedTuple):
    """An array inside a trace: ArrayId((4, 1), 0) is the first result of live equation 1 inside live equation 4.

    ArrayId((ARGUMENTS,), 2) is the third argument. An id is valid only for its own trace: arguments of other shapes or
    dtypes may give other equations.
    """

    path: EqnPath
    result: int


@dataclass(frozen=True)
class Intermediate:
    """An array inside a function: the layouts of its axes, its origin and its dependencies.

    The hidden units of `jnp.tanh(x @ w)` have the layouts (None, "w"). `tanh` produces them, and they depend on the
    inputs and on the parameter "w". In the body of a scan, the array has a leading step axis for each enclosing scan.
    """

    id: ArrayId
    layouts: tuple[Layout, ...]
    shape: tuple[int, ...]  # without the step axes of scans
    made_by: str  # the primitive; conversions keep that of the converted array
    depends_on_inputs: bool
    params: frozenset[str]  # parameters that the array depends on

    @property
    def depends_on_params(self) -> bool:
        """Whether the array depends on any parameter."""
        return bool(self.params)

    @property
    def signature(self) -> tuple[Any, ...]:
        """Properties that the array shares with its counterpart in a trace with other dtypes."""
        return self.made_by, self.shape, self.layouts, self.params

    @property
    def names(self) -> set[str]:
        """The names of permutations and fixed axes in the layouts."""
        return {name for layout in self.layouts for name in axis_names(layout)}


@dataclass(frozen=True)
class Equation:
    """An equation with its operands, None for constants, and its results."""

    eqn: core.JaxprEqn
    operands: Sequence[Intermediate | None]
    results: Sequence[Intermediate]

    @property
    def params_only(self) -> list[Intermediate]:
        """The operands that depend on parameters and not on inputs."""
        operands = [operand for operand in self.operands if operand is not None]
        return [operand for operand in operands if operand.depends_on_params and not operand.depends_on_inputs]

    @property
    def loops(self) -> int:
        """The number of scans that enclose the equation."""
        pairs = zip(self.results, self.eqn.outvars, strict=True)
        return max((len(result.layouts) - len(var.aval.shape) for result, var in pairs), default=0)  # type: ignore[attr-defined]

    @property
    def contracted(self) -> Iterator[tuple[Intermediate, set[str]]]:
        """The operands of a matrix product or convolution, each with the names of its contracted axes."""
        contracted: Sequence[Sequence[int]] = ()
        if self.eqn.primitive.name == "dot_general":
            contracted = self.eqn.params["dimension_numbers"][0]
        elif self.eqn.primitive.name == "conv_general_dilated":
            dims = self.eqn.params["dimension_numbers"]
            contracted = (dims.lhs_spec[1:2], dims.rhs_spec[1:2])
        for operand, axes, var in zip(self.operands, contracted, self.eqn.invars, strict=False):
            if operand is not None:
                steps = len(operand.layouts) - len(var.aval.shape)  # type: ignore[attr-defined]
                yield operand, {name for axis in axes for name in axis_names(operand.layouts[steps + axis])}

    @property
    def dropped(self) -> Iterator[tuple[Intermediate, set[str]]]:
        """The operands, each with the names of the axes that no result has."""
        kept = {name for result in self.results for name in result.names}
        yield from ((operand, operand.names - kept) for operand in self.operands if operand is not None)


@dataclass(frozen=True)
class Intermediates:
    """A trace of a function: its parameters by name, and its equations in the order of evaluation."""

    params: Mapping[str, Intermediate]
    equations: Sequence[Equation]
    traced: core.ClosedJaxpr
    result_shapes: Any

    def tap(
        self, wanted: Collection[ArrayId], edits: Mapping[ArrayId, Callable[[Any], Any]] = MappingProxyType({})
    ) -> Callable[..., tuple[Any, dict[ArrayId, Any]]]:
        """Return a function that computes the results of the traced function, and the wanted arrays inside it.

        An edit replaces an array before any equation reads it, and applies at every step of a scan. The function takes
        arguments of the traced shapes and dtypes. Under `jit`, it computes only the arrays that the caller uses.
        """

        def run(*args: Any) -> tuple[Any, dict[ArrayId, Any]]:
            results, found = evaluator.evaluate(self.traced.jaxpr, self.traced.consts, self._leaves(args), ())
            return jax.tree.unflatten(jax.tree.structure(self.result_shapes), results), found

        evaluator = _Evaluator(frozenset(wanted), edits)
        return run

    def tap_together(
        self,
        edits: Mapping[ArrayId, Callable[[tuple[Any, ...]], tuple[Any, ...]]],
        instead: Mapping[EqnPath, Callable[..., list[tuple[Any, ...]]]] = MappingProxyType({}),
    ) -> Callable[..., list[Any]]:
        """Return a function that evaluates the traced function for several tuples of arguments in lockstep.

        An edit receives a tuple with the same array from each evaluation, in order, and may mix them. Arrays that all
        evaluations share are computed once. `instead` maps equations to functions that replace them. Such a function
        takes the operands and returns the results, each as a tuple with one array for each evaluation.
        """

        def run(*each: tuple[Any, ...]) -> list[Any]:
            evaluator = _Lockstep(len(each), edits, instead)
            consts = list(map(evaluator.constant, self.traced.consts))
            leaves = list(zip(*map(self._leaves, each), strict=True))
            results, _ = evaluator.evaluate(self.traced.jaxpr, consts, leaves, ())
            structure = jax.tree.structure(self.result_shapes)
            return [jax.tree.unflatten(structure, [result[i] for result in results]) for i in range(len(each))]

        return run

    def _leaves(self, args: tuple[Any, ...]) -> list[Any]:
        """Return the leaves of the arguments, and raise an error if shapes or dtypes differ from the trace."""
        leaves = jax.tree.leaves(args)
        for leaf, aval in zip(leaves, self.traced.in_avals, strict=True):
            if (jnp.shape(leaf), jnp.result_type(leaf)) != (aval.shape, aval.dtype):
                given = jax.typeof(leaf).str_short()
                raise ValueError(
                    f"An argument is {given}, but {aval.str_short()} was traced: trace the function again."
                )
        return leaves


def list_intermediates(spec: PermutationSpec, fn: Callable[..., Any], params: Params, *inputs: Any) -> Intermediates:
    """List the arrays inside `fn(params, *inputs)` with the names of the spec; shapes suffice as arguments."""
    # Trace from shapes alone, so that the trace is the same inside `jit`, `vmap` and `shard_map`.
    traced, result_shapes = jax.make_jaxpr(fn, return_shape=True)(*jax.tree.map(_shape, (params, *inputs)))
    leaves, interp = infer_axes(traced, params, *inputs)
    names: dict[Axis, str] = {}
    for leaf, axes in leaves.items():
        for axis, layout in zip(axes, spec.axes[leaf], strict=True):
            if axis is not None:
                _add_names(spec, axis, layout, names)
    lister = _Lister(interp, names, spec)
    known = [frozenset([leaf]) for leaf in leaves]
    arguments = [
        lister.intermediate(ArrayId((ARGUMENTS,), i), var, "argument", i >= len(leaves), *known[i : i + 1])
        for i, var in enumerate(traced.jaxpr.invars)
    ]
    lister.visit(traced.jaxpr, (), arguments)
    return Intermediates(dict(zip(leaves, arguments, strict=False)), lister.equations, traced, result_shapes)


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of an argument, without its sharding or tracer."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def unit_activations(spec: PermutationSpec, intermediates: Intermediates) -> dict[str, list[Intermediate]]:
    """Return, for each permutation, the arrays that hold its units' activations, each once, in order of use.

    These are the inputs of the next layer's weights: arrays that depend on the inputs and that a contraction sums over
    the permutation's axis. If there are none, the fallback is arrays whose axis any operation drops. The last fallback
    is any array that depends on the inputs. A permutation has no arrays if its units are used only between parameters,
    or only inside branches and while loops.
    """
    equations = intermediates.equations
    candidates: list[list[tuple[Intermediate, set[str]]]] = [
        [pair for equation in equations for pair in equation.contracted],
        [pair for equation in equations for pair in equation.dropped],
        [(result, result.names) for equation in equations for result in equation.results],
    ]
    arrays: dict[str, list[Intermediate]] = {}
    for pairs in candidates:
        chosen: dict[str, dict[ArrayId, Intermediate]] = {}
        for array, names in pairs:
            for name in names & spec.sizes.keys() - arrays.keys() if array.depends_on_inputs else ():
                chosen.setdefault(name, {})[array.id] = array
        arrays |= {name: list(by_id.values()) for name, by_id in chosen.items()}
    return {name: arrays[name] for name in spec.sizes if name in arrays}


class LinearMap(NamedTuple):
    """A matrix product or convolution of an input-dependent array with weights that depend on parameters only.

    The output includes a bias if adding that bias is the only use of the product, and the bias depends on parameters
    only.
    """

    equation: Equation
    weights: Intermediate
    bias: Intermediate | None
    output: Intermediate


def list_linear_maps(intermediates: Intermediates) -> Iterator[LinearMap]:
    """Yield the linear maps outside scans, in the order of use."""
    uses: dict[ArrayId, list[Equation]] = {}
    for equation in intermediates.equations:
        for operand in filter(None, equation.operands):
            uses.setdefault(operand.id, []).append(equation)
    for equation in intermediates.equations:
        if not is_linear_map(equation) or equation.loops:
            continue
        (output,), (weights, *_) = equation.results, equation.params_only
        match uses.get(output.id):
            case [use] if use.eqn.primitive.name == "add" and (bias := use.params_only):
                yield LinearMap(equation, weights, bias[0], use.results[0])
            case _:
                yield LinearMap(equation, weights, None, output)


def is_linear_map(equation: Equation) -> bool:
    """Return whether an equation multiplies or convolves an input-dependent array with weights."""
    product = equation.eqn.primitive.name in PRODUCTS and equation.results[0].depends_on_inputs
    return product and bool(equation.params_only)


class _Evaluator:
    """An evaluator of a jaxpr that collects the wanted arrays and applies edits."""

    def __init__(self, wanted: Collection[ArrayId], edits: Mapping[ArrayId, Callable[[Any], Any]]) -> None:
        self.wanted, self.edits = wanted, edits
        paths = {array.path for array in {*wanted, *edits}}
        self.entered = {path[:depth] for path in paths for depth in range(len(path))}

    def evaluate(
        self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any], path: EqnPath
    ) -> tuple[list[Any], dict[ArrayId, Any]]:
        """Return the results of the jaxpr at a path, and the wanted arrays inside it."""
        found: dict[ArrayId, Any] = {}

        def edit(path: EqnPath, values: Sequence[Any]) -> list[Any]:
            ids = [ArrayId(path, i) for i in range(len(values))]
            values = [self.edits[i](value) if i in self.edits else value for i, value in zip(ids, values, strict=True)]
            found.update((i, value) for i, value in zip(ids, values, strict=True) if i in self.wanted)
            return values

        def apply(index: int, eqn: core.JaxprEqn, operands: list[Any]) -> list[Any]:
            eqn_path, inner = (*path, index), dict[ArrayId, Any]()
            if eqn_path not in self.entered:
                results = self.equation(jaxpr, eqn, operands, eqn_path)
            elif eqn.primitive.name == "scan":
                results, inner = self._scan(eqn, operands, eqn_path)
            else:  # inline the call, which loses custom derivatives
                results, inner = self.evaluate(*self._inner(eqn), operands, eqn_path)
            found.update(inner)
            return edit(eqn_path, results)

        return evaluate(jaxpr, consts, edit((*path, ARGUMENTS), args), self.constant, apply), found

    def _scan(self, eqn: core.JaxprEqn, operands: Sequence[Any], path: EqnPath) -> tuple[list, dict]:
        p = eqn.params
        consts, init, xs = split_scan(eqn, operands)

        def step(carry: list[Any], x: list[Any]) -> tuple[list, tuple[list, dict]]:
            results, found = self.evaluate(*self._inner(eqn), [*consts, *carry, *x], path)
            return results[: len(carry)], (results[len(carry) :], found)

        last, (ys, found) = jax.lax.scan(step, init, xs, p["length"], p["reverse"], p["unroll"])
        return [*last, *ys], found

    def _inner(self, eqn: core.JaxprEqn) -> tuple[core.Jaxpr, list[Any]]:
        jaxpr, consts = called_jaxpr(eqn)
        return jaxpr, list(map(self.constant, consts))

    def constant(self, value: Any) -> Any:
        """Return the value that represents a constant of the jaxpr."""
        return value

    def equation(self, jaxpr: core.Jaxpr, eqn: core.JaxprEqn, operands: Sequence[Any], path: EqnPath) -> list[Any]:
        """Return the results of one equation of a jaxpr."""
        return _evaluate_equation(jaxpr, eqn, operands)


class _Lockstep(_Evaluator):
    """An evaluator for several lists of arguments at once, which represents each array by a tuple of arrays."""

    def __init__(
        self, count: int, edits: Mapping[ArrayId, Callable[[Any], Any]], instead: Mapping[EqnPath, Callable[..., Any]]
    ) -> None:
        super().__init__((), edits)
        self.count, self.instead = count, instead
        self.entered |= {path[:depth] for path in instead for depth in range(len(path))}

    def constant(self, value: Any) -> tuple[Any, ...]:
        """Return the constant once for each list of arguments."""
        return (value,) * self.count

    def equation(
        self, jaxpr: core.Jaxpr, eqn: core.JaxprEqn, operands: Sequence[tuple[Any, ...]], path: EqnPath
    ) -> list[Any]:
        """Return the results of one equation for each list of arguments."""
        if path in self.instead:
            return self.instead[path](*operands)
        if all(value is values[0] for values in operands for value in values):
            return list(map(self.constant, _evaluate_equation(jaxpr, eqn, [values[0] for values in operands])))
        each = [_evaluate_equation(jaxpr, eqn, [values[i] for values in operands]) for i in range(self.count)]
        return list(zip(*each, strict=True))


def _evaluate_equation(jaxpr: core.Jaxpr, eqn: core.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Return the results of one equation of a jaxpr."""
    args = {atom: value for atom, value in zip(eqn.invars, operands, strict=True) if isinstance(atom, core.Var)}
    alone = jaxpr.replace(constvars=[], invars=list(args), outvars=eqn.outvars, eqns=[eqn])
    return core.jaxpr_as_fun(core.ClosedJaxpr(alone, []))(*args.values())


def _add_names(spec: PermutationSpec, axis: Axis, layout: Layout, names: dict[Axis, str]) -> None:
    """Add the named parts of an axis to `names`, given its layout in the spec."""
    if isinstance(layout, str):
        names[find(axis)] = layout
    elif isinstance(layout, Blocks | Segments):
        inner_layouts = layout.factors if isinstance(layout, Blocks) else layout.parts
        split = split_product if isinstance(layout, Blocks) else split_segments
        parts = split(axis, [spec.length(inner) for inner in inner_layouts], "the spec")
        for part, inner in zip(parts or (), inner_layouts, strict=False):
            _add_names(spec, part, inner, names)


class _Lister:
    """A collector of the equations of interpreted, nested jaxprs, with the names of a spec."""

    def __init__(self, interp: Interpreter, names: Mapping[Axis, str], spec: PermutationSpec) -> None:
        self.interp, self.names, self.spec = interp, names, spec
        self.equations: list[Equation] = []

    def visit(self, jaxpr: core.Jaxpr, path: EqnPath, args: Sequence[Intermediate | None]) -> list[Intermediate | None]:
        """List the equations of a jaxpr, and return its results."""

        def apply(index: int, eqn: core.JaxprEqn, operands: list[Intermediate | None]) -> Sequence[Intermediate | None]:
            eqn_path = (*path, index)
            if eqn.primitive.name in CALLS:
                return self.visit(called_jaxpr(eqn)[0], eqn_path, operands)
            if eqn.primitive.name == "scan":
                results = self._scan(eqn, eqn_path, operands)
            else:
                results = self._intermediates(eqn_path, eqn.outvars, eqn, [operands] * len(eqn.outvars))
            self.equations.append(Equation(eqn, operands, results))
            return results

        return evaluate(jaxpr, [None] * len(jaxpr.constvars), args, lambda value: None, apply)

    def layouts(self, path: EqnPath, index: int) -> tuple[Layout, ...]:
        """Return the layouts of an array's axes.

        An entry of a stack lacks the axis of entries, so permutations that are batched over that axis have no name in
        it.
        """
        axes, names = self.interp.results[path][index], self.names
        if any(factor.kind == "cells" for axis in axes if axis for factor in write_cells(flat_parts(axis, "blocks"))):
            return (None,) * len(axes)  # cells have no layout
        layouts = tuple(axis_layout(axis, names) for axis in axes)
        found = {name for layout in layouts for name in axis_names(layout)}
        if all(found.issuperset(self.spec.batched_over.get(name, ())) for name in found):
            return layouts
        names = {a: name for a, name in names.items() if found.issuperset(self.spec.batched_over.get(name, ()))}
        return tuple(axis_layout(axis, names) for axis in axes)

    def _scan(self, eqn: core.JaxprEqn, path: EqnPath, operands: Sequence[Intermediate | None]) -> list[Intermediate]:
        """Return the results of a scan, whose carry is assumed to depend on all operands."""
        consts, carry, xs = split_scan(eqn, operands)
        sources = [*([const] for const in consts), *[operands] * len(carry), *([x] for x in xs)]
        body = called_jaxpr(eqn)[0]
        args = self._intermediates((*path, ARGUMENTS), body.invars, eqn, sources)
        inner = self.visit(body, path, [*consts, *args[len(consts) :]])
        sources = [*[operands] * len(carry), *([y] for y in inner[len(carry) :])]
        return self._intermediates(path, eqn.outvars, eqn, sources)

    def _intermediates(
        self,
        path: EqnPath,
        variables: Sequence[Any],
        eqn: core.JaxprEqn,
        sources: Sequence[Sequence[Intermediate | None]],
    ) -> list[Intermediate]:
        """Return the results of an equation, given the arrays that each result depends on."""
        results = []
        for index, (var, arrays) in enumerate(zip(variables, sources, strict=True)):
            known = [array for array in arrays if array is not None]
            converts = eqn.primitive.name == "convert_element_type" and known
            made_by = known[0].made_by if converts else eqn.primitive.name
            on_inputs = any(array.depends_on_inputs for array in known)
            params = (array.params for array in known)
            results.append(self.intermediate(ArrayId(path, index), var, made_by, on_inputs, *params))
        return results

    def intermediate(
        self, array: ArrayId, var: Any, made_by: str, on_inputs: bool, *params: frozenset[str]
    ) -> Intermediate:
        """Return the description of an array, given the primitive that produced it and its dependencies."""
        layouts, shape = self.layouts(*array), tuple(var.aval.shape)
        return Intermediate(array, layouts, shape, made_by, on_inputs, frozenset().union(*params))
