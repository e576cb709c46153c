"""Rules of jaxprs inside equations: calls, branches, loops, shards; and of entries that are read from a stack."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from mcomb.symmetry.axes import Axis, unite
from mcomb.symmetry.interpreter import (
    ArrayAxes,
    Discrete,
    Interpreter,
    Known,
    Positions,
    Stack,
    discrete,
    equal_axes,
    settled,
    sliced_axis,
)
from mcomb.symmetry.rules.common import BY_POSITION, other_axes, resized_axes, shape_of, split_list, split_scan


def call(interp: Interpreter, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """The results of the inner jaxpr of jit, remat or custom derivatives, in which arguments are what they were."""
    jaxpr, consts = inner_jaxpr(eqn)
    arguments = [pair for pair in zip(jaxpr.invars, eqn.invars, strict=True) if isinstance(pair[1], core.Var)]
    same = {inner: interp.expressions[outer] for inner, outer in arguments if outer in interp.expressions}
    return interp.interpret_call(jaxpr, consts, operands, same)


def inner_jaxpr(eqn: core.JaxprEqn) -> tuple[core.Jaxpr, Sequence[Any]]:
    """The one jaxpr inside an equation, and its constants."""
    return open_jaxpr(
        next(eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call") if key in eqn.params)
    )


def open_jaxpr(jaxpr: Any) -> tuple[core.Jaxpr, Sequence[Any]]:
    """A jaxpr, closed or not, and its constants."""
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, core.ClosedJaxpr) else (jaxpr, ())


def cond(interp: Interpreter, eqn: core.JaxprEqn, which: ArrayAxes, *operands: ArrayAxes) -> list[ArrayAxes]:
    """The results of all branches, united."""
    interp.plain(which)
    branches = [interp.interpret(*open_jaxpr(branch), operands) for branch in eqn.params["branches"]]
    return [unite_arrays(interp, results) for results in zip(*branches, strict=True)]


def while_(interp: Interpreter, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """What is carried, whose axes come out of each step as they went in; the condition must not depend on any order."""
    p = eqn.params
    cond_consts, body_consts, carry = split_list(operands, p["cond_nconsts"], p["body_nconsts"])
    carry = [_plain(interp, axes) for axes in carry]
    body = open_jaxpr(p["body_jaxpr"])
    carry = _loop_carry(interp, carry, lambda carry: interp.interpret(*body, [*body_consts, *carry]))
    interp.interpret(*open_jaxpr(p["cond_jaxpr"]), [*cond_consts, *carry])
    return carry


def scan(interp: Interpreter, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """The results of the body, in which all but the constants and the carry has an axis of steps.

    A result that depends on nothing but what is the same in all steps is so too. The order of steps matters if there is
    a carry, unless something is added to it in every step, or such, and it is used for nothing else: that is a sum.
    """
    consts, carry, xs = split_scan(eqn, operands)
    carry, xs = ([_plain(interp, axes) for axes in arrays] for arrays in (carry, xs))
    reason = interp.reason
    steps = Axis(eqn.params["length"], None if _accumulates(inner_jaxpr(eqn)[0], len(consts), len(carry)) else reason)
    for x in xs:
        if x[0] is not None:
            unite(steps, x[0], reason)
    ys: list[ArrayAxes] = []
    # A constant is the same in all steps. Positions that are one are recorded with the axis that they are along.
    same = [(*axes, axes.along) if isinstance(axes, Positions) else tuple(axes) for axes in consts]

    of_steps = [*(False for _ in consts), *(True for _ in carry), *(x[0] is not None for x in xs)]
    varying = _depend_on(inner_jaxpr(eqn)[0], of_steps)[len(carry) :]

    def record(arrays: Iterable[ArrayAxes]) -> None:
        for axes in arrays:
            if any(axis in interp.first_use for axis in axes):
                interp.record([(axes, range(len(axes)))])

    def body(carry: list[ArrayAxes]) -> list[ArrayAxes]:
        interp.scan_steps.append((("step", len(interp.scan_steps)), steps))
        results = interp.interpret(*inner_jaxpr(eqn), [*consts, *carry, *(_entry(x) for x in xs)])
        record(same)
        interp.scan_steps.pop()
        pairs = zip(results[len(carry) :], varying, strict=True)
        ys[:] = [discrete((steps if varies else None, *y), [0, *(i + 1 for i in equal_axes(y))]) for y, varies in pairs]
        return results[: len(carry)]

    carry = _loop_carry(interp, carry, body)
    record([*same, *xs, *ys])  # outside of the scan, constants have no axis of steps
    interp.loop_axes += [axis for y in ys for axis in y if axis is not None]
    return [*carry, *ys]


def _accumulates(jaxpr: core.Jaxpr, consts: int, carries: int) -> bool:
    """Whether all that the body of a scan carries is combined with what does not depend on it, in any order."""
    users: dict[Any, list[core.JaxprEqn | None]] = {}
    uses = [(atom, eqn) for eqn in jaxpr.eqns for atom in eqn.invars]
    for atom, user in [*uses, *((atom, None) for atom in jaxpr.outvars)]:
        if isinstance(atom, core.Var):
            users.setdefault(atom, []).append(user)

    def combined(var: Any, result: Any) -> bool:
        names = set()
        while var is not result:
            (user, *others) = users.get(var, [None])
            if others or user is None:
                return False
            before, var = var, user.outvars[0]
            if user.primitive.name != "convert_element_type" or before.aval.dtype != var.aval.dtype:
                names.add(user.primitive.name)
        return len(users[var]) == 1 and len(names) <= 1 and names <= COMBINATIONS

    return all(map(combined, jaxpr.invars[consts : consts + carries], jaxpr.outvars[:carries]))


COMBINATIONS = {"add", "add_any", "and", "max", "min", "mul", "or"}  # that may be done in any order


def _depend_on(jaxpr: core.Jaxpr, arguments: Sequence[bool]) -> list[bool]:
    """For each result of a jaxpr, whether it depends on any of the marked arguments."""
    marked = {var for var, is_marked in zip(jaxpr.invars, arguments, strict=True) if is_marked}
    for eqn in jaxpr.eqns:
        if not marked.isdisjoint(atom for atom in eqn.invars if not isinstance(atom, core.Literal)):
            marked.update(eqn.outvars)
    return [not isinstance(atom, core.Literal) and atom in marked for atom in jaxpr.outvars]


def _loop_carry(
    interp: Interpreter, carry: list[ArrayAxes], body: Callable[[list[ArrayAxes]], list[ArrayAxes]]
) -> list[ArrayAxes]:
    """The carry of a loop, its axes united with those that the body returns, until that changes nothing."""

    def state(arrays: list[ArrayAxes]) -> list[tuple[list[bool], frozenset[int]]]:
        return [([axis is not None for axis in axes], equal_axes(axes)) for axes in arrays]

    while True:
        united = [unite_arrays(interp, pair) for pair in zip(carry, body(carry), strict=True)]
        interp.loop_axes += [axis for axes in united for axis in axes if axis is not None]
        if state(united) == state(carry):
            return united
        carry = united


def unite_arrays(interp: Interpreter, arrays: Sequence[ArrayAxes]) -> ArrayAxes:
    """One array that may be any of these: their axes are united."""
    labels = range(len(arrays[0]))
    (axes,) = interp.relate([(axes, labels) for axes in arrays], [labels])
    return discrete(axes, {i for array in arrays for i in equal_axes(array)})


def _plain(interp: Interpreter, axes: ArrayAxes) -> ArrayAxes:
    """The array, of which nothing is known but where it has equal entries: a constant may be another in a next step."""
    return discrete(interp.plain(axes), equal_axes(axes))


def _entry(array: ArrayAxes) -> Discrete:
    """An entry of an array along its first axis."""
    return discrete(array[1:], [i - 1 for i in equal_axes(array) if i])


def shard_map(interp: Interpreter, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """The results of the inner jaxpr, in which the axes that devices share out are frozen."""
    interp.explain(eqn.primitive.name, BY_POSITION)
    reason, jaxpr = interp.reason, eqn.params["jaxpr"]

    def convert(axes: ArrayAxes, spec: Iterable[Any], shape: Sequence[int]) -> ArrayAxes:
        """Replaces the axes that are shared out by frozen ones of the size that they have on the other side."""
        shared = [axis for axis, names in enumerate(spec) if names is not None and names != ()]
        interp.freeze(axes[axis] for axis in shared)
        return tuple(Axis(shape[i], reason) if i in shared else axis for i, axis in enumerate(axes))

    inner = zip(operands, eqn.params["in_specs"], jaxpr.invars, strict=True)
    interp.shards += 1
    results = interp.interpret(jaxpr, (), [convert(axes, spec, shape_of(var)) for axes, spec, var in inner])
    interp.shards -= 1
    outer = zip(map(settled, results), eqn.params["out_specs"], eqn.outvars, strict=True)
    return [convert(axes, spec, shape_of(var)) for axes, spec, var in outer]


def collective(interp: Interpreter, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """Elementwise: combines or exchanges what devices have at the same position.

    An axis by number, as `vmap` makes it of a named one, is dropped: it is reduced by a sum, maximum or minimum, for
    which the order does not matter.
    """
    reduced = [axis for axis in eqn.params.get("axes", ()) if isinstance(axis, int)]
    results = [interp.relate([(axes, range(len(axes)))], [other_axes(len(axes), reduced)]) for axes in operands]
    return [result for (result,) in results]


def slice_of_stack(interp: Interpreter, eqn: core.JaxprEqn, operand: Any) -> list[ArrayAxes] | None:
    """An entry, if it is one."""
    axis = sliced_axis(eqn)
    if axis is None or shape_of(eqn.outvars[0])[axis] != 1:
        return None
    return interp.read_entry(operand, axis, int(eqn.params["start_indices"][axis]))


def split_stack(interp: Interpreter, eqn: core.JaxprEqn, operand: Any) -> list[ArrayAxes] | None:
    """All entries, if it is taken apart into them."""
    axis, count = eqn.params["axis"], shape_of(eqn.invars[0])[eqn.params["axis"]]
    if len(eqn.outvars) != count:
        return None
    entries = [interp.read_entry(operand, axis, index) for index in range(count)]
    keep = slice(axis, axis + (eqn.primitive.name == "split"))
    return None if None in entries else [(*e[:axis], *e[keep], *e[axis + 1 :]) for (e,) in filter(None, entries)]


def change_stack(interp: Interpreter, eqn: core.JaxprEqn, *operands: Any) -> list[ArrayAxes] | None:
    """The same stack, in another type or multiplied by a number: so is each entry that is read of it."""
    before, after = (atom.aval.dtype for atom in (eqn.invars[0], eqn.outvars[0]))  # type: ignore[attr-defined]
    if before != after and not all(jnp.issubdtype(t, jnp.inexact) and t.itemsize > 1 for t in (before, after)):
        return None
    stacks: list[ArrayAxes] = [operand for operand in operands if isinstance(operand, Stack)]
    others = [atom for operand, atom in zip(operands, eqn.invars, strict=True) if not isinstance(operand, Stack)]
    return stacks if len(stacks) == 1 and all(shape_of(atom) == () for atom in others) else None


def dynamic_slice_of_stack(
    interp: Interpreter, eqn: core.JaxprEqn, operand: Any, *starts: Any
) -> list[ArrayAxes] | None:
    """An entry, if it is one: by its number if that is known, or else by the expression that it is computed by.

    One at a position, as `argmax` gives it, is not read by its number: entries may move with what it was chosen by.
    """
    resized = resized_axes(eqn.invars[0], eqn.outvars[0])
    if any(isinstance(start, Positions) for start in starts):
        return None
    if len(resized) != 1 or shape_of(eqn.outvars[0])[resized[0]] != 1:
        return None
    (axis,) = resized
    start, last = starts[axis], shape_of(eqn.invars[0])[axis] - 1
    if isinstance(start, Known):
        return interp.read_entry(operand, axis, min(max(0, int(start.value)), last))
    return interp.read_entry(operand, axis, interp.expressions[eqn.invars[1 + axis]])
