"""Rules of equations that contain jaxprs: calls, branches, loops and shards."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend import core

from mcomb.symmetry.arrays import Array, ArrayAxes, shape_of
from mcomb.symmetry.axes import Axis, unite
from mcomb.symmetry.constraints import Constraints
from mcomb.symmetry.interpreter import Interpreter
from mcomb.symmetry.rules.common import BY_POSITION, other_axes, split_list, split_scan


def call(interp: Interpreter, eqn: core.JaxprEqn, *operands: Array) -> list[Array]:
    """Interpret the inner jaxpr of jit, remat or custom derivatives, keeping all facts about the arguments."""
    return interp.interpret(*inner_jaxpr(eqn), operands)


def inner_jaxpr(eqn: core.JaxprEqn) -> tuple[core.Jaxpr, Sequence[Any]]:
    """Return the one jaxpr inside an equation, and its constants."""
    return open_jaxpr(
        next(eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call") if key in eqn.params)
    )


def open_jaxpr(jaxpr: Any) -> tuple[core.Jaxpr, Sequence[Any]]:
    """Return a jaxpr, closed or not, and its constants."""
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, core.ClosedJaxpr) else (jaxpr, ())


def linear_solve(interp: Interpreter, eqn: core.JaxprEqn, *operands: Array) -> list[Array]:
    """Interpret the inner function that solves linear equations."""
    lengths = eqn.params["const_lengths"]
    _, consts, _, known = split_list(operands, lengths.matvec + lengths.vecmat, lengths.solve, lengths.transpose_solve)
    return interp.interpret(*open_jaxpr(eqn.params["jaxprs"].solve), [*consts, *known])


def cond(interp: Interpreter, eqn: core.JaxprEqn, which: Array, *operands: Array) -> list[Array]:
    """Unite the results of all branches."""
    interp.plain(which)
    branches = [interp.interpret_plain(*open_jaxpr(branch), operands) for branch in eqn.params["branches"]]
    return [Array(unite_arrays(interp, results)) for results in zip(*branches, strict=True)]


def while_(interp: Interpreter, eqn: core.JaxprEqn, *operands: Array) -> list[Array]:
    """Return the carry, with the same axes before and after each step, and apply the constraints of the condition."""
    p = eqn.params
    cond_consts, body_consts, first = split_list(operands, p["cond_nconsts"], p["body_nconsts"])
    body = open_jaxpr(p["body_jaxpr"])
    carry = _loop_carry(interp, first, lambda carry: interp.interpret_plain(*body, [*body_consts, *carry]))
    interp.interpret_plain(*open_jaxpr(p["cond_jaxpr"]), [*cond_consts, *carry])
    return carry


def scan(interp: Interpreter, eqn: core.JaxprEqn, *operands: Array) -> list[Array]:
    """Interpret the body, in which all arrays except the constants and the carry have a step axis.

    The layers of a scanned transformer keep separate orders, because each step reads its own weights. The order of the
    steps matters if there is a carry.
    """
    consts, first, xs = split_scan(eqn, operands)
    scanned = [interp.plain(x) for x in xs]
    reason = interp.reason
    steps = Axis(eqn.params["length"], reason if first else None)
    for axes in scanned:
        if axes[0] is not None:
            unite(steps, axes[0], reason)
    entries = [Array(x.axes[1:], frozenset(i - 1 for i in x.distinct if i)) for x in xs]
    # A constant is the same in all steps. Positions are recorded with the axis that they index.
    same = [(*array.axes, array.positions.along) if array.positions else array.axes for array in consts]
    ys: list[ArrayAxes] = []

    def body(carry: list[Array]) -> list[ArrayAxes]:
        results = interp.interpret_step(steps, *inner_jaxpr(eqn), [*consts, *carry, *entries], same)
        ys[:] = [(steps, *y) for y in results[len(carry) :]]
        return results[: len(carry)]

    carry = _loop_carry(interp, first, body)
    interp.record_again([*same, *scanned, *ys])  # outside the scan, constants have no step axis
    interp.record_loop(ys)
    return [*carry, *map(Array, ys)]


def _loop_carry(
    interp: Interpreter, first: Sequence[Array], body: Callable[[list[Array]], list[ArrayAxes]]
) -> list[Array]:
    """Return the carry of a loop, after uniting its axes with those that the body returns until nothing changes."""
    carry = [interp.plain(array) for array in first]
    while True:
        pairs = zip(carry, body([*map(Array, carry)]), strict=True)
        united = [unite_arrays(interp, pair) for pair in pairs]
        interp.record_loop(united)
        if [[axis is None for axis in axes] for axes in united] == [[axis is None for axis in axes] for axes in carry]:
            return [*map(Array, united)]
        carry = united


def unite_arrays(constraints: Constraints, arrays: Sequence[ArrayAxes]) -> ArrayAxes:
    """Return an array that may be any of the given ones, after uniting their axes."""
    labels = range(len(arrays[0]))
    return constraints.relate([(axes, labels) for axes in arrays], [labels])[0]


def shard_map(interp: Interpreter, eqn: core.JaxprEqn, *operands: Array) -> list[Array]:
    """Interpret the inner jaxpr with sharded axes frozen.

    Inside, rows cannot be sorted by free groups, because each device would sort only its own rows.
    """
    interp.explain(eqn.primitive.name, BY_POSITION)
    reason, jaxpr = interp.reason, eqn.params["jaxpr"]

    def convert(axes: ArrayAxes, spec: Iterable[Any], shape: Sequence[int]) -> ArrayAxes:
        """Replace sharded axes by frozen axes of the size on the other side."""
        shared = [axis for axis, names in enumerate(spec) if names is not None and names != ()]
        interp.freeze(axes[axis] for axis in shared)
        return tuple(Axis(shape[i], reason) if i in shared else axis for i, axis in enumerate(axes))

    inner = zip(map(interp.plain, operands), eqn.params["in_specs"], jaxpr.invars, strict=True)
    results = interp.interpret_shard(jaxpr, (), [Array(convert(a, spec, shape_of(var))) for a, spec, var in inner])
    outer = zip(results, eqn.params["out_specs"], eqn.outvars, strict=True)
    return [Array(convert(axes, spec, shape_of(var))) for axes, spec, var in outer]


def collective(constraints: Constraints, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """Combine or exchange the entries of several devices elementwise.

    `vmap` turns a named axis into a numbered one. Such an axis is dropped, because a sum, maximum or minimum reduces it
    and the order does not matter.
    """
    reduced = [axis for axis in eqn.params.get("axes", ()) if isinstance(axis, int)]
    results = [constraints.relate([(axes, range(len(axes)))], [other_axes(len(axes), reduced)]) for axes in operands]
    return [result for (result,) in results]
