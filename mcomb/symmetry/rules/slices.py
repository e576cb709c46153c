"""Reshapes that are only read in slices, such as query, key and value in one product (ViT, BLOOM).

    qkv = (x @ w).reshape(n, 3, d)
    q, v = qkv[:, 0], qkv[:, 2]

Reshaped as a whole, `qkv` would have one order of its d units. However, `q` is the reshape of the first d columns of
`x @ w`, and `v` that of the last d columns. Each may therefore have its own order.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from jax.extend import core

from mcomb.symmetry.facts import ArrayFacts, Compound, Relation, blocks, segments, shape_of
from mcomb.symmetry.rules.shapes import broadcast, reshape, squeeze, transpose

MOVE_RULES = {"broadcast_in_dim": broadcast, "squeeze": squeeze, "transpose": transpose}


def moved_axes(eqn: core.JaxprEqn) -> list[int | None] | None:
    """Return the operand's axis for each axis of the result, or None for a new axis of size one.

    Return None instead of a list unless the equation only transposes axes, or adds or removes axes of size one.
    PyTorch's `MultiheadAttention` does so between its product and its slices.
    """
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if eqn.primitive.name not in MOVE_RULES or math.prod(old) != math.prod(new):
        return None
    relation = MOVE_RULES[eqn.primitive.name](eqn, ArrayFacts((None,) * len(old)))
    (_, before), (after,) = relation.operands[0], relation.results
    return [list(before).index(label) if label in before else None for label in after]


def compose(first: Relation | None, second: Relation) -> Relation:
    """Return the relation of two operations in turn, the second of which only moves axes."""
    if first is None:
        return second
    old = dict(zip(second.operands[0][1], first.results[0], strict=True))
    return replace(first, results=[[old.get(label, ("unit", label)) for label in second.results[0]]])


def first_factor(relation: Relation, label: Hashable) -> tuple[int, Compound] | None:
    """Return the axis of the operand whose first factor has the given label, and the label of the whole axis."""
    labels = enumerate(relation.operands[0][1])
    compounds = [(axis, own) for axis, own in labels if isinstance(own, Compound) and own.parts]
    return next(((axis, own) for axis, own in compounds if own.parts[0][0] == label), None)


def deferrable_reshapes(eqns: Sequence[core.JaxprEqn], outvars: Sequence[Any]) -> set[Any]:
    """Return the results of reshapes, and of their transposes, that are only read in slices.

    The slices must be along the first of the axes that an old axis is split into.
    """
    uses: dict[Any, list[core.JaxprEqn]] = {}
    for eqn in eqns:
        for atom in eqn.invars:
            if not isinstance(atom, core.Literal):
                uses.setdefault(atom, []).append(eqn)

    def sliced_only(var: Any, axes: list[int]) -> list[Any] | None:
        """Return the variable and its transposes if all their uses are slices along these axes."""
        variables = [var]
        for eqn in uses.get(var, ()):
            if (moved := moved_axes(eqn)) is not None:
                inner = sliced_only(eqn.outvars[0], [moved.index(axis) for axis in axes])
                if inner is None:
                    return None
                variables += inner
            elif sliced_axis(eqn) not in axes:
                return None
        return variables if var not in outvars else None

    deferred: set[Any] = set()
    for eqn in eqns:
        if eqn.primitive.name == "reshape":
            relation = reshape(eqn, ArrayFacts((None,) * len(shape_of(eqn.invars[0]))))
            labels = relation.results[0] if relation else ()
            first = [axis for axis, label in enumerate(labels) if relation and first_factor(relation, label)]
            deferred |= set((first and sliced_only(eqn.outvars[0], first)) or ())
    return deferred


def sliced_axis(eqn: core.JaxprEqn) -> int | None:
    """Return the one axis that an equation slices contiguously, or None for any other equation."""
    if eqn.primitive.name in ("split", "unstack"):
        return eqn.params["axis"]
    if eqn.primitive.name != "slice" or any(stride != 1 for stride in eqn.params["strides"] or ()):
        return None
    bounds = zip(shape_of(eqn.invars[0]), eqn.params["start_indices"], eqn.params["limit_indices"], strict=True)
    sliced = [axis for axis, (size, start, stop) in enumerate(bounds) if stop - start != size]
    return sliced[0] if len(sliced) == 1 else None


def slice_reshape(eqn: core.JaxprEqn, operand: ArrayFacts) -> Relation:
    """Relate the source of a deferred reshape to the reshaped slices."""
    axis, relation, name = sliced_axis(eqn), operand.reshape, eqn.primitive.name
    assert relation is not None, "the operand is deferred"
    assert axis is not None, "a deferred reshape is only read in slices"
    ((source, labels),), (result,) = relation.operands, relation.results
    found = first_factor(relation, result[axis])
    assert found is not None, "a deferred reshape is sliced along the first factor of an axis"
    place, ((cut, count), *rest) = found[0], found[1].parts
    sizes, kept = [int(size) for size in eqn.params.get("sizes", [1] * len(eqn.outvars))], range(len(eqn.outvars))
    if name == "slice":
        start, stop = (int(eqn.params[f"{side}_indices"][axis]) for side in ("start", "limit"))
        sizes, kept = [start, stop - start, count - stop], range(1, 2)
    inner = math.prod(size for _, size in rest)

    def part(i: int, size: int) -> Hashable:
        return blocks(((cut, i), size), *(((label, i), n) for label, n in rest)) if i in kept else ("unused", i)

    slices = [(part(i, size), size * inner) for i, size in enumerate(sizes)]
    own = {cut, *(label for label, _ in rest)}
    results = [[(label, i) if label in own else label for label in result] for i in kept]
    if name == "unstack":
        results = [[*labels[:axis], *labels[axis + 1 :]] for labels in results]
    return Relation([(source, [*labels[:place], segments(*slices), *labels[place + 1 :]])], results)
