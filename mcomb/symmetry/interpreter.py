"""Interpret jaxprs abstractly: values are facts about arrays instead of numbers."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from jax.extend import core, source_info_util

from mcomb.symmetry.arrays import Array, ArrayAxes
from mcomb.symmetry.axes import Axis, atoms, find
from mcomb.symmetry.constraints import Constraints
from mcomb.symmetry.known import constant, fold
from mcomb.symmetry.reshapes import defer_reshape, deferrable_reshapes

Rule = Callable[..., Sequence[ArrayAxes]]
"""Function of the `Constraints`, an equation and the axes of its operands that returns the axes of its results."""

FactRule = Callable[..., Sequence[Array] | None]
"""Function like `Rule` of facts instead of axes, which returns None to fall back to the primitive's `Rule`."""

EqnPath = tuple[int, ...]
"""Path of an equation in nested jaxprs: (4, 1) is live equation 1 of the jaxpr inside live equation 4."""

ARGUMENTS = -1  # last number of a path that denotes the arguments of a jaxpr


@dataclass(frozen=True)
class Rules:
    """The tables of rules; see `rules`."""

    plain: Mapping[str, Rule]
    facts: Mapping[str, FactRule]
    default: Rule
    explanations: Mapping[str, str]
    distinct: Callable[[core.JaxprEqn, Sequence[Array], Sequence[ArrayAxes]], frozenset[int]]


class Interpreter(Constraints):
    """An interpreter that applies the rule of each equation in order and collects the constraints."""

    def __init__(self, rules: Rules) -> None:
        super().__init__()
        self.rules = rules
        self.results: dict[EqnPath, list[ArrayAxes]] = {}  # by equation; step axes of enclosing scans come first
        self._path: EqnPath = ()

    def interpret(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Array]) -> list[Array]:
        """Return the facts about a jaxpr's results, given those about its arguments."""
        env: dict[Any, Array] = dict(zip(jaxpr.invars, args, strict=True))
        env |= zip(jaxpr.constvars, map(constant, consts), strict=True)

        def read(atom: Any) -> Array:
            return constant(atom.val) if isinstance(atom, core.Literal) else env[atom]

        path, eqns = self._path, live_equations(jaxpr)
        deferred = deferrable_reshapes(eqns, jaxpr.outvars)
        self._store((*path, ARGUMENTS), args)
        for index, eqn in enumerate(eqns):
            self._path = (*path, index)
            outer, self.scope = self.scope, self._scope(eqn)
            self.explain(eqn.primitive.name, self.rules.explanations.get(eqn.primitive.name))
            operands = list(map(read, eqn.invars))
            if deferred.intersection(eqn.outvars):
                results = [defer_reshape(eqn, operands[0], self.plain(operands[0]))]
            else:
                results = self._apply_rule(eqn, operands)
            env |= zip(eqn.outvars, results, strict=True)
            self._store(self._path, results)
            self.scope = outer
        self._path = path
        return [read(atom) for atom in jaxpr.outvars]

    def interpret_plain(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Array]) -> list[ArrayAxes]:
        """Return the axes of a jaxpr's results, used as plain numbers."""
        return [self.plain(array) for array in self.interpret(jaxpr, consts, args)]

    def interpret_step(
        self, steps: Axis, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Array], shared: Sequence[ArrayAxes]
    ) -> list[ArrayAxes]:
        """Interpret the body of a scan, where all arrays have the step axis, including `shared` ones."""
        self.steps.append((("step", len(self.steps)), steps))
        results = self.interpret_plain(jaxpr, consts, args)
        self.record_again(shared)
        self.steps.pop()
        return results

    def interpret_shard(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Array]) -> list[ArrayAxes]:
        """Interpret the body that each device runs."""
        self.shards += 1
        results = self.interpret_plain(jaxpr, consts, args)
        self.shards -= 1
        return results

    def _apply_rule(self, eqn: core.JaxprEqn, operands: Sequence[Array]) -> list[Array]:
        """Return the facts about an equation's results."""
        name = eqn.primitive.name
        results: Sequence[Array] | None = fold(eqn, operands)
        if results is None and name in self.rules.facts:
            results = self.rules.facts[name](self, eqn, *operands)
        if results is None:
            axes = self.rules.plain.get(name, self.rules.default)(self, eqn, *map(self.plain, operands))
            distinct = self.rules.distinct(eqn, operands, axes)
            results = [Array(array, distinct) for array in axes]
        return [
            replace(array, axes=tuple(axis if axis is not None and axis.size > 1 else None for axis in array.axes))
            for array in results
        ]

    def hide_sorted_rows(self) -> None:
        """Blank results with rows sorted by group, because such rows do not correspond between networks."""
        rows = {find(grouping.rows) for grouping in self.groupings}
        for path, arrays in self.results.items() if rows else ():
            self.results[path] = [
                axes if rows.isdisjoint(atom for axis in axes if axis for atom in atoms(axis)) else (None,) * len(axes)
                for axes in arrays
            ]

    def _store(self, path: EqnPath, results: Sequence[Array]) -> None:
        """Store an equation's results, replacing those of earlier passes over the same loop body.

        Positions are stored without axes, because other permutations change these numbers.
        """
        steps = tuple(axis for _, axis in self.steps)
        axes = ((None,) * len(array.axes) if array.positions else array.axes for array in results)
        self.results[path] = [(*steps, *array) for array in axes]

    def _scope(self, eqn: core.JaxprEqn) -> str:
        """Return the origin of an equation: its module, or otherwise its line."""
        outer, inner = self.scope, str(eqn.source_info.name_stack)
        while (named := re.sub(r"\w+\(\)/?", "", inner)) != inner:  # such as vmap(jvp()), which is not a module
            inner = named
        if inner and outer.endswith(inner):
            return outer
        if inner:
            return f"{outer}/{inner}" if outer and ":" not in outer else inner
        return outer or PurePath(source_info_util.summarize(eqn.source_info)).name


def live_equations(jaxpr: core.Jaxpr) -> list[core.JaxprEqn]:
    """Return the equations that affect the results or have side effects other than debugging."""
    needed = {atom for atom in jaxpr.outvars if not isinstance(atom, core.Literal)}
    live = []
    for eqn in reversed(jaxpr.eqns):
        has_effect = bool(eqn.effects) and not eqn.primitive.name.startswith("debug")
        if has_effect or needed.intersection(eqn.outvars):
            live.append(eqn)
            needed |= {atom for atom in eqn.invars if not isinstance(atom, core.Literal)}
    return live[::-1]
