"""An interpreter of jaxprs whose values are what is known of arrays instead of numbers."""

import collections
import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

import numpy as np
from jax.extend import core, source_info_util

from mcomb.symmetry.arrays import Array, ArrayAxes
from mcomb.symmetry.axes import Axis, atoms, find, freeze, product, unite
from mcomb.symmetry.known import constant, fold
from mcomb.symmetry.reshapes import defer_reshape, deferrable_reshapes

Labels = Sequence[Hashable]
"""An operation's index labels for the axes of one array, as in an einsum."""

LabelledAxes = list[tuple[Hashable, Axis]]
"""The axes of one array in an operation, with their labels."""

Rule = Callable[..., Sequence[ArrayAxes]]
"""Returns the axes of an equation's results, from the interpreter, the equation and the axes of its operands."""

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


@dataclass(frozen=True)
class Grouping:
    """Rows sorted by the group that each belongs to, which is a position along an axis of groups.

        order = jnp.argsort(expert)       # of rows, of which each has an expert
        y = experts_in_turn(x[order])     # the rows of the first expert come first
        y[jnp.argsort(order)]             # put back

    A permutation of the groups permutes these rows, in an order that depends on the data. That changes nothing as long
    as any order would do, and as all arrays with the axis of rows got it from this very sort: `break_up_groupings`.
    """

    rows: Axis
    groups: Axis
    source: object  # of the positions that the rows were sorted by
    reason: str


class Interpreter:
    """Interprets equations one after the other, and collects the constraints that their rules impose.

    Rules call `relate`, `freeze`, `split`, `join` and `record`; they change nothing else.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.reason = ""  # the current operation, to blame if an axis freezes
        self.operations: list[list[LabelledAxes]] = []  # the arrays that each operation relates
        self.first_use: dict[Axis, int] = {}  # axes, numbered in the order in which operations first use them
        self.results: dict[EqnPath, list[ArrayAxes]] = {}  # of each equation; enclosing scans' steps come first
        self.loop_axes: list[Axis] = []  # of what loops carry from step to step, or return
        self.groupings: list[Grouping] = []
        self._steps: LabelledAxes = []  # an axis for the steps of each scan that encloses the current equation
        self._shards = 0  # how many `shard_map`s enclose the current equation
        self._path: EqnPath = ()
        self._scopes = [""]

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
            self._scopes.append(self._scope(eqn))
            self.explain(eqn.primitive.name, self.rules.explanations.get(eqn.primitive.name))
            operands = list(map(read, eqn.invars))
            if deferred.intersection(eqn.outvars):
                results = [defer_reshape(eqn, operands[0], self.plain(operands[0]))]
            else:
                results = self._apply_rule(eqn, operands)
            env |= zip(eqn.outvars, results, strict=True)
            self._store(self._path, results)
            self._scopes.pop()
        self._path = path
        return [read(atom) for atom in jaxpr.outvars]

    def interpret_plain(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Array]) -> list[ArrayAxes]:
        """Return the axes of a jaxpr's results, used as any other array."""
        return [self.plain(array) for array in self.interpret(jaxpr, consts, args)]

    def interpret_step(
        self, steps: Axis, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Array], shared: Sequence[ArrayAxes]
    ) -> list[ArrayAxes]:
        """Interpret the body of a scan: all arrays in it, `shared` ones included, have the axis of its steps."""
        self._steps.append((("step", len(self._steps)), steps))
        results = self.interpret_plain(jaxpr, consts, args)
        self.record_again(shared)
        self._steps.pop()
        return results

    def interpret_shard(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Array]) -> list[ArrayAxes]:
        """Interpret what each of several devices does."""
        self._shards += 1
        results = self.interpret_plain(jaxpr, consts, args)
        self._shards -= 1
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

    def plain(self, array: Array) -> ArrayAxes:
        """Return the axes of an array that is used as any other: positions are numbers, which freezes their axis."""
        if array.positions is not None:
            freeze(array.positions.along, array.positions.reason)
        for column in array.columns:
            self.plain(column)
        return array.axes

    def _store(self, path: EqnPath, results: Sequence[Array]) -> None:
        """Store an equation's results; a loop's body is interpreted several times, and the last time counts.

        Positions have no axes here, because other permutations change these numbers.
        """
        steps = tuple(axis for _, axis in self._steps)
        axes = ((None,) * len(array.axes) if array.positions else array.axes for array in results)
        self.results[path] = [(*steps, *array) for array in axes]

    def new_axes(self, shape: Sequence[int], frozen: str | None = None) -> ArrayAxes:
        """Return new axes of the given sizes."""
        return tuple(Axis(size, frozen) if size > 1 else None for size in shape)

    def explain(self, primitive: str, why: str | None) -> None:
        """Say what is to blame for what freezes now: the primitive, and how it depends on the order."""
        self.reason = f"{primitive} ({why}) in {self._scopes[-1]}" if why else f"{primitive} in {self._scopes[-1]}"

    def freeze(self, axes: Iterable[Axis | None]) -> None:
        """Forbid any permutation of these axes, and blame the current operation."""
        for axis in axes:
            if axis is not None:
                freeze(axis, self.reason)

    def relate(
        self,
        operands: Sequence[tuple[ArrayAxes, Labels]],
        results: Sequence[Labels],
        new: Mapping[Any, Axis | None] = MappingProxyType({}),
    ) -> list[ArrayAxes]:
        """Return the results of an operation that is written like an einsum: axes with the same label are united.

            relate([(x, "ij"), (y, "jk")], ["ik"])  # a matrix product: the last axis of x moves with the first of y

        A label that no operand has stands for an axis of `new`, or for one along which all entries are equal.
        """
        axes = {label: axis for label, axis in new.items() if axis is not None}
        for operand, labels in operands:
            for axis, label in zip(operand, labels, strict=True):
                if axis is not None:
                    unite(axes.setdefault(label, axis), axis, self.reason)
        result_axes = [tuple(axes.get(label) for label in labels) for labels in results]
        self.record([*operands, *zip(result_axes, results, strict=True)])
        return result_axes

    def record(self, arrays: Iterable[tuple[ArrayAxes, Labels]]) -> None:
        """Record the arrays that an operation relates, with the labels of their axes."""
        labelled = [
            [
                (int(label) if isinstance(label, np.integer) else label, axis)  # to compare with any other
                for axis, label in zip(axes, labels, strict=True)
                if axis is not None
            ]
            for axes, labels in arrays
        ]
        for _, axis in itertools.chain.from_iterable(labelled):
            self.first_use.setdefault(axis, len(self.first_use))
        self.operations.append([self._steps + axes for axes in labelled])

    def record_again(self, arrays: Iterable[ArrayAxes]) -> None:
        """Record arrays that some operation used, inside or outside of a scan."""
        for axes in arrays:
            if any(axis in self.first_use for axis in axes):
                self.record([(axes, range(len(axes)))])

    def record_loop(self, arrays: Iterable[ArrayAxes]) -> None:
        """Record arrays that a loop carries from step to step, or returns."""
        self.loop_axes += [axis for axes in arrays for axis in axes if axis is not None]

    def group(self, keys: Axis, groups: Axis, source: object) -> Axis:
        """Return the axis of rows that are sorted by their groups; rows of one group stay in their order."""
        self.record([((groups,), ["groups"]), ((keys,), ["rows"])])
        self.explain("sort", "rows of one group stay in their order")
        self.freeze([keys, *([groups] if self._shards else [])])
        rows = Axis(keys.size)
        self.groupings.append(Grouping(rows, groups, source, self.reason))
        return rows

    def break_up_groupings(self, others: Iterable[Axis]) -> None:
        """Freeze the groups by which rows were sorted, if the order of the rows matters or others move with them.

        A loop may carry sorted rows from one step to another, which sorts them in another order. And of two networks
        the sorted rows have nothing in common, so that no units are to be found in them.
        """
        sorts = collections.Counter(find(grouping.rows) for grouping in self.groupings)
        others = {*map(find, others), *(atom for axis in self.loop_axes for atom in atoms(axis))} if sorts else set()
        for grouping in self.groupings * len(self.groupings):  # groups may be rows that were sorted before
            rows = find(grouping.rows)
            if rows.frozen or rows.parts or rows in others or sorts[rows] > 1:
                freeze(rows, grouping.reason)
                freeze(grouping.groups, rows.frozen or grouping.reason)
        for path, arrays in self.results.items() if sorts else ():
            self.results[path] = [
                axes if sorts.keys().isdisjoint(_atoms_of(axes)) else (None,) * len(axes) for axes in arrays
            ]

    def split(self, axis: Axis | None, sizes: Sequence[int], split: Callable[..., list[Axis] | None]) -> ArrayAxes:
        """Return the parts of an axis by `split_product` or `split_segments`; where it cannot be split it is frozen."""
        if axis is None:
            return (None,) * len(sizes)
        self.first_use.setdefault(axis, len(self.first_use))
        parts = split(axis, sizes, self.reason)
        if parts is None:
            self.explain(self.reason.split()[0], "its parts end where those of a product or a concatenation do not")
            self.freeze([axis])
            return self.new_axes(sizes, self.reason)
        return tuple(part if part.size > 1 else None for part in parts)

    def join(self, axes: Sequence[Axis | None], sizes: Sequence[int]) -> Axis | None:
        """Return the product of axes; one along which all entries are equal is a free factor."""
        if all(axis is None for axis in axes):
            return None
        return product([axis or Axis(size) for axis, size in zip(axes, sizes, strict=True)])

    def _scope(self, eqn: core.JaxprEqn) -> str:
        """Return where in the model an equation comes from: its module, or else its line."""
        outer, inner = self._scopes[-1], str(eqn.source_info.name_stack)
        while (named := re.sub(r"\w+\(\)/?", "", inner)) != inner:  # such as vmap(jvp()), which is no module
            inner = named
        if inner and outer.endswith(inner):
            return outer
        if inner:
            return f"{outer}/{inner}" if outer and ":" not in outer else inner
        return outer or PurePath(source_info_util.summarize(eqn.source_info)).name


def _atoms_of(axes: ArrayAxes) -> Iterator[Axis]:
    """Yield the atoms of all axes of an array."""
    return (atom for axis in axes if axis is not None for atom in atoms(axis))


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
