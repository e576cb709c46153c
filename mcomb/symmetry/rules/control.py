"""Interpret equations that contain jaxprs: calls, branches, loops and shards."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from jax.extend import core

from mcomb.symmetry.axes import Axis, unite
from mcomb.symmetry.facts import ArrayAxes, ArrayFacts, Relation, shape_of
from mcomb.symmetry.jaxpr_walk import called_jaxpr, open_jaxpr, split_list, split_scan
from mcomb.symmetry.rules.elementwise import BY_POSITION

if TYPE_CHECKING:
    from mcomb.symmetry.interpreter import Interpreter


def call(interp: "Interpreter", eqn: core.JaxprEqn, *operands: ArrayFacts) -> list[ArrayFacts]:
    """Interpret the inner jaxpr of jit, remat or custom derivatives, keeping all facts about the arguments."""
    return interp.interpret(*called_jaxpr(eqn), operands)


def cond(interp: "Interpreter", eqn: core.JaxprEqn, which: ArrayFacts, *operands: ArrayFacts) -> list[ArrayFacts]:
    """Unite the results of all branches."""
    interp.plain(which)
    branches = [interp.interpret_plain(*open_jaxpr(branch), operands) for branch in eqn.params["branches"]]
    return [ArrayFacts(_unite(interp, results)) for results in zip(*branches, strict=True)]


def while_(interp: "Interpreter", eqn: core.JaxprEqn, *operands: ArrayFacts) -> list[ArrayFacts]:
    """Return the carry, with the same axes before and after each step, and apply the constraints of the condition."""
    p = eqn.params
    cond_consts, body_consts, first = split_list(operands, p["cond_nconsts"], p["body_nconsts"])
    body = open_jaxpr(p["body_jaxpr"])
    carry = _loop_carry(interp, first, lambda carry: interp.interpret_plain(*body, [*body_consts, *carry]))
    interp.interpret_plain(*open_jaxpr(p["cond_jaxpr"]), [*cond_consts, *carry])
    return carry


def scan(interp: "Interpreter", eqn: core.JaxprEqn, *operands: ArrayFacts) -> list[ArrayFacts]:
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
    entries = [ArrayFacts(x.axes[1:], frozenset(i - 1 for i in x.distinct if i)) for x in xs]
    # A constant is the same in all steps. Positions are recorded with the axis that they index.
    same = [(*array.axes, array.positions.along) if array.positions else array.axes for array in consts]
    ys: list[ArrayAxes] = []

    def body(carry: list[ArrayFacts]) -> list[ArrayAxes]:
        results = interp.interpret_step(steps, *called_jaxpr(eqn), [*consts, *carry, *entries], same)
        ys[:] = [(steps, *y) for y in results[len(carry) :]]
        return results[: len(carry)]

    carry = _loop_carry(interp, first, body)
    interp.record_again([*same, *scanned, *ys])  # outside the scan, constants have no step axis
    interp.record_loop(ys)
    return [*carry, *map(ArrayFacts, ys)]


def _loop_carry(
    interp: "Interpreter", first: Sequence[ArrayFacts], body: Callable[[list[ArrayFacts]], list[ArrayAxes]]
) -> list[ArrayFacts]:
    """Return the carry of a loop, after uniting its axes with those that the body returns until nothing changes."""
    carry = [interp.plain(array) for array in first]
    while True:
        pairs = zip(carry, body([*map(ArrayFacts, carry)]), strict=True)
        united = [_unite(interp, pair) for pair in pairs]
        interp.record_loop(united)
        if [[axis is None for axis in axes] for axes in united] == [[axis is None for axis in axes] for axes in carry]:
            return [*map(ArrayFacts, united)]
        carry = united


def _unite(interp: "Interpreter", arrays: Sequence[ArrayAxes]) -> ArrayAxes:
    """Return an array that may be any of the given ones, after uniting their axes."""
    labels = range(len(arrays[0]))
    return interp.relate(Relation([(axes, labels) for axes in arrays], [labels]), [labels])[0]


def shard_map(interp: "Interpreter", eqn: core.JaxprEqn, *operands: ArrayFacts) -> list[ArrayFacts]:
    """Interpret the inner jaxpr with sharded axes frozen."""
    interp.explain(eqn.primitive.name, BY_POSITION)
    reason, jaxpr = interp.reason, eqn.params["jaxpr"]

    def convert(axes: ArrayAxes, spec: Iterable[Any], shape: Sequence[int]) -> ArrayFacts:
        """Replace sharded axes by frozen axes of the size on the other side."""
        shared = [axis for axis, names in enumerate(spec) if names is not None and names != ()]
        interp.freeze(axes[axis] for axis in shared)
        return ArrayFacts(tuple(Axis(shape[i], reason) if i in shared else axis for i, axis in enumerate(axes)))

    inner = zip(map(interp.plain, operands), eqn.params["in_specs"], map(shape_of, jaxpr.invars), strict=True)
    interp.shards += 1
    results = interp.interpret_plain(jaxpr, (), [convert(*array) for array in inner])
    interp.shards -= 1
    outer = zip(results, eqn.params["out_specs"], map(shape_of, eqn.outvars), strict=True)
    return [convert(*array) for array in outer]
