"""An interpreter of jaxprs whose values are what is known of arrays instead of numbers."""

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
"""Returns the axes of an equation's results, from the `Constraints`, the equation and the axes of its operands."""

FactRule = Callable[..., Sequence[Array] | None]
"""Returns the arrays of an equation's results, from its operands; None if the primitive's `Rule` is to do it."""

EqnPath = tuple[int, ...]
"""Where an equation is in nested jaxprs: (4, 1) is live equation 1 of the jaxpr inside live equation 4."""

ARGUMENTS = -1  # as the last number of a path: the arguments of a jaxpr, as if an equation made them


@dataclass(frozen=True)
class Rules:
    """The tables of rules: see `rules`."""

    plain: Mapping[str, Rule]
    facts: Mapping[str, FactRule]
    default: Rule
    explanations: Mapping[str, str]
    distinct: Callable[[core.JaxprEqn, Sequence[Array], Sequence[ArrayAxes]], frozenset[int]]


class Interpreter(Constraints):
    """Interprets equations one after the other, and collects the constraints that their rules impose."""

    def __init__(self, rules: Rules) -> None:
        super().__init__()
        self.rules = rules
        self.results: dict[EqnPath, list[ArrayAxes]] = {}  # of each equation; enclosing scans' steps come first
        self._path: EqnPath = ()

    def interpret(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Array]) -> list[Array]:
        """Return what is known of a jaxpr's results, from its arguments."""
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
        """Return the axes of a jaxpr's results, used as any other array."""
        return [self.plain(array) for array in self.interpret(jaxpr, consts, args)]

    def interpret_step(
        self, steps: Axis, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Array], shared: Sequence[ArrayAxes]
    ) -> list[ArrayAxes]:
        """Interpret the body of a scan: all arrays in it, `shared` ones included, have the axis of its steps."""
        self.steps.append((("step", len(self.steps)), steps))
        results = self.interpret_plain(jaxpr, consts, args)
        self.record_again(shared)
        self.steps.pop()
        return results

    def interpret_shard(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Array]) -> list[ArrayAxes]:
        """Interpret what each of several devices does."""
        self.shards += 1
        results = self.interpret_plain(jaxpr, consts, args)
        self.shards -= 1
        return results

    def _apply_rule(self, eqn: core.JaxprEqn, operands: Sequence[Array]) -> list[Array]:
        """Return what is known of an equation's results."""
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
        """Blank the results that have rows sorted by group: in two networks these rows have nothing in common."""
        rows = {find(grouping.rows) for grouping in self.groupings}
        for path, arrays in self.results.items() if rows else ():
            self.results[path] = [
                axes if rows.isdisjoint(atom for axis in axes if axis for atom in atoms(axis)) else (None,) * len(axes)
                for axes in arrays
            ]

    def _store(self, path: EqnPath, results: Sequence[Array]) -> None:
        """Store an equation's results; a loop's body is interpreted several times, and the last time counts.

        Positions have no axes here, because other permutations change these numbers.
        """
        steps = tuple(axis for _, axis in self.steps)
        axes = ((None,) * len(array.axes) if array.positions else array.axes for array in results)
        self.results[path] = [(*steps, *array) for array in axes]

    def _scope(self, eqn: core.JaxprEqn) -> str:
        """Return where in the model an equation comes from: its module, or else its line."""
        outer, inner = self.scope, str(eqn.source_info.name_stack)
        while (named := re.sub(r"\w+\(\)/?", "", inner)) != inner:  # such as vmap(jvp()), which is no module
            inner = named
        if inner and outer.endswith(inner):
            return outer
        if inner:
            return f"{outer}/{inner}" if outer and ":" not in outer else inner
        return outer or PurePath(source_info_util.summarize(eqn.source_info)).name


def live_equations(jaxpr: core.Jaxpr) -> list[core.JaxprEqn]:
    """Return the equations that the results depend on, and those with side effects other than debugging."""
    needed = {atom for atom in jaxpr.outvars if not isinstance(atom, core.Literal)}
    live = []
    for eqn in reversed(jaxpr.eqns):
        has_effect = bool(eqn.effects) and not eqn.primitive.name.startswith("debug")
        if has_effect or needed.intersection(eqn.outvars):
            live.append(eqn)
            needed |= {atom for atom in eqn.invars if not isinstance(atom, core.Literal)}
    return live[::-1]
