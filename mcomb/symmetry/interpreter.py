"""Interpret jaxprs abstractly: values are facts about arrays instead of numbers."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from jax.extend import core, source_info_util

from mcomb.symmetry.axes import Axis, find
from mcomb.symmetry.constants import constant, fold
from mcomb.symmetry.constraints import Constraints, atoms_of
from mcomb.symmetry.facts import ArrayAxes, ArrayFacts, Relation, shape_of
from mcomb.symmetry.jaxpr_walk import evaluate, live_equations
from mcomb.symmetry.rules import CONTROL, EXPLANATIONS, FACT_RULES, RULES
from mcomb.symmetry.rules.distinct import distinct_axes
from mcomb.symmetry.rules.elementwise import freeze_everything
from mcomb.symmetry.rules.slices import compose, deferrable_reshapes, slice_reshape

EqnPath = tuple[int, ...]
"""Path of an equation in nested jaxprs: (4, 1) is live equation 1 of the jaxpr inside live equation 4."""

UNKNOWN_ORDER = "its dependence on the order is unknown"
ARGUMENTS = -1  # last number of a path that denotes the arguments of a jaxpr


class Interpreter(Constraints):
    """An interpreter that applies the rule of each equation in order, and imposes the relation that it finds."""

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[EqnPath, list[ArrayAxes]] = {}  # by equation; step axes of enclosing scans come first
        self._path: EqnPath = ()

    def interpret(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[ArrayFacts]) -> list[ArrayFacts]:
        """Return the facts about a jaxpr's results, given those about its arguments."""
        path, outer = self._path, self.scope
        deferred = deferrable_reshapes(live_equations(jaxpr), jaxpr.outvars)

        def apply(index: int, eqn: core.JaxprEqn, operands: list[ArrayFacts]) -> list[ArrayFacts]:
            self._path, self.scope = (*path, index), _origin(outer, eqn)
            self.explain(eqn.primitive.name, EXPLANATIONS.get(eqn.primitive.name))
            results = self._apply_rule(eqn, operands, not deferred.isdisjoint(eqn.outvars))
            self._path, self.scope = path, outer
            self._store((*path, index), results)
            return results

        self._store((*path, ARGUMENTS), args)
        return evaluate(jaxpr, map(constant, consts), args, constant, apply)

    def interpret_plain(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[ArrayFacts]) -> list[ArrayAxes]:
        """Return the axes of a jaxpr's results, used as plain numbers."""
        return [self.plain(array) for array in self.interpret(jaxpr, consts, args)]

    def interpret_step(
        self,
        steps: Axis,
        jaxpr: core.Jaxpr,
        consts: Sequence[Any],
        args: Sequence[ArrayFacts],
        shared: Sequence[ArrayAxes],
    ) -> list[ArrayAxes]:
        """Interpret the body of a scan, where all arrays have the step axis, including `shared` ones."""
        self.steps.append((("step", len(self.steps)), steps))
        results = self.interpret_plain(jaxpr, consts, args)
        self.record_again(shared)
        self.steps.pop()
        return results

    def _apply_rule(self, eqn: core.JaxprEqn, operands: Sequence[ArrayFacts], is_deferred: bool) -> list[ArrayFacts]:
        """Return the facts about an equation's results."""
        name = eqn.primitive.name
        results: Sequence[ArrayFacts] | None = fold(eqn, operands)
        if name in CONTROL:
            results = CONTROL[name](self, eqn, *operands)
        elif is_deferred:
            results = [self._defer(eqn, operands[0])]
        elif results is None:
            relation = slice_reshape(eqn, operands[0]) if operands and operands[0].reshape else None
            if relation is None and name in FACT_RULES:
                relation = FACT_RULES[name](eqn, *operands)
            if relation and relation.grouped and not self.is_grouped(*relation.grouped):
                relation = None
            if relation is None and name in RULES:
                relation = RULES[name](eqn, *operands)
            results = self._impose(
                eqn,
                operands,
                relation or freeze_everything(eqn, operands, "" if EXPLANATIONS.get(name) else UNKNOWN_ORDER),
            )
        return [
            replace(array, axes=tuple(axis if axis is not None and axis.size > 1 else None for axis in array.axes))
            for array in results
        ]

    def _defer(self, eqn: core.JaxprEqn, operand: ArrayFacts) -> ArrayFacts:
        """Return the result of a reshape that is only read in slices, or of a transpose of one."""
        self.plain(operand)
        relation = RULES[eqn.primitive.name](eqn, operand)
        assert relation is not None, "it was possible to defer the reshape"
        return ArrayFacts((None,) * len(relation.results[0]), reshape=compose(operand.reshape, relation))

    def _impose(self, eqn: core.JaxprEqn, operands: Sequence[ArrayFacts], relation: Relation) -> list[ArrayFacts]:
        """Impose the relation of an equation, and return the facts about its results."""
        for i, operand in enumerate(operands):
            if i not in relation.positions:
                self.plain(operand)
        if relation.why:
            self.explain(eqn.primitive.name, relation.why)
        if relation.sort:
            self.group(relation.sort)
        results = self.relate(relation, map(shape_of, eqn.outvars))
        if not relation.facts:
            distinct = distinct_axes(eqn, operands, relation, results)
            return [ArrayFacts(axes, where) for axes, where in zip(results, distinct, strict=True)]
        return [
            replace(
                fact,
                axes=axes,
                positions=fact.positions and replace(fact.positions, reason=fact.positions.reason or self.reason),
            )
            for fact, axes in zip(relation.facts, results, strict=True)
        ]

    def hide_sorted_rows(self) -> None:
        """Blank results with rows sorted by group, because such rows do not correspond between networks."""
        rows = {find(grouping.rows) for grouping in self.groupings}
        for path, arrays in self.results.items() if rows else ():
            self.results[path] = [axes if rows.isdisjoint(atoms_of([axes])) else (None,) * len(axes) for axes in arrays]

    def _store(self, path: EqnPath, results: Sequence[ArrayFacts]) -> None:
        """Store an equation's results, replacing those of earlier passes over the same loop body.

        Positions are stored without axes, because other permutations change these numbers.
        """
        steps = tuple(axis for _, axis in self.steps)
        axes = ((None,) * len(array.axes) if array.positions else array.axes for array in results)
        self.results[path] = [(*steps, *array) for array in axes]


def _origin(outer: str, eqn: core.JaxprEqn) -> str:
    """Return the origin of an equation: its module, or otherwise its line."""
    inner = str(eqn.source_info.name_stack)
    while (named := re.sub(r"\w+\(\)/?", "", inner)) != inner:  # such as vmap(jvp()), which is not a module
        inner = named
    if not inner or outer.endswith(inner):
        return outer or PurePath(source_info_util.summarize(eqn.source_info)).name
    return f"{outer}/{inner}" if outer and ":" not in outer else inner
