"""Carries the identities of axes through a jaxpr, equation by equation."""

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.extend import core, source_info_util

from mcomb.axes import Axis, freeze, product, unite

Value = tuple[Axis | None, ...]
"""The axes of an array; None for one along which all entries are equal."""

Labels = Sequence[Hashable]
Term = list[tuple[Hashable, Axis]]
"""An array as one operation sees it: its axes by their labels."""

Rule = Callable[..., Sequence[Value]]
"""The axes of a primitive's results, from the reader, the equation and the axes of its operands."""

Way = tuple[int, ...]
"""The numbers, among the live ones, of the equations that lead to one: each is inside the one before."""

ARGUMENTS = -1  # the number, in a way, of what makes a jaxpr's arguments


@dataclass(frozen=True)
class Folded:
    """An array that is only used in parts: what it is a reshape of, and the order its axes were then put in.

    A part of it is the reshape of a part. Reading it so keeps apart what the parts share no use of, as query and
    value do when both are cut from one product.
    """

    source: Value
    before: tuple[int, ...]
    after: tuple[int, ...]
    order: tuple[int, ...]


class Reader:
    """The state of reading a model: what each operation relates, and where we are."""

    def __init__(self, rules: Mapping[str, Rule], otherwise: Rule) -> None:
        self.rules, self.otherwise = rules, otherwise
        self.why = ""  # what to blame when an axis freezes
        self.operations: list[list[Term]] = []
        self.used: dict[Axis, int] = {}  # axes in the order in which operations first had them
        self.loops: Term = []  # the steps of the scans that we are inside of
        self.made: dict[Way, list[Value]] = {}  # what equations make, at all steps of the scans around them
        self._way: Way = ()
        self._scopes = [""]

    def read(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Value]) -> list[Value]:
        """The axes of a jaxpr's results, from those of its arguments."""
        values: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
        values |= zip(jaxpr.constvars, map(self.constant, consts), strict=True)

        def look_up(atom: Any) -> Any:
            return self.constant(atom.val) if isinstance(atom, core.Literal) else values[atom]

        way, eqns = self._way, live(jaxpr)
        self._keep((*way, ARGUMENTS), args)
        folded = _used_in_parts(eqns, jaxpr.outvars)
        for number, eqn in enumerate(eqns):
            if folded.intersection(eqn.outvars):
                values[eqn.outvars[0]] = folding = fold(eqn, look_up(eqn.invars[0]))
                self._keep((*way, number), [(None,) * len(folding.order)])  # only its parts are read
                continue
            self._way = (*way, number)
            self._scopes.append(self._scope(eqn))
            self.why = f"{eqn.primitive.name} in {self._scopes[-1]}"
            rule = self.rules.get(eqn.primitive.name, self.otherwise)
            results = rule(self, eqn, *map(look_up, eqn.invars))
            results = [tuple(axis if axis is not None and axis.size > 1 else None for axis in r) for r in results]
            values |= zip(eqn.outvars, results, strict=True)
            self._keep(self._way, results)
            self._scopes.pop()
        self._way = way
        return [look_up(atom) for atom in jaxpr.outvars]

    def _keep(self, way: Way, values: Sequence[Value]) -> None:
        """Notes what an equation makes; the last reading of a loop's body replaces those before."""
        steps = tuple(axis for _, axis in self.loops)
        self.made[way] = [(*steps, *value) for value in values]

    def fresh(self, shape: Sequence[int], frozen: str | None = None) -> Value:
        """New axes of the given sizes."""
        return tuple(Axis(size, frozen) if size > 1 else None for size in shape)

    def constant(self, value: Any) -> Value:
        """The axes of a known array, frozen where its entries differ."""
        shape = np.shape(value)
        if jax.dtypes.issubdtype(getattr(value, "dtype", None), jax.dtypes.extended) or not math.prod(shape):
            return self.fresh(shape, "a constant")
        array = np.asarray(value)
        differs = [np.any(array != array.take([0], axis)) for axis in range(array.ndim)]
        return tuple(Axis(size, "a constant") if d else None for size, d in zip(shape, differs, strict=True))

    def freeze(self, axes: Iterable[Axis | None]) -> None:
        """Forbids axes to move, and blames the current operation."""
        for axis in axes:
            if axis is not None:
                freeze(axis, self.why)

    def relate(
        self,
        operands: Sequence[tuple[Value, Labels]],
        results: Sequence[Labels],
        made: Mapping[Any, Axis | None] = MappingProxyType({}),
    ) -> list[Value]:
        """The results of an operation for which axes with one label are one index; `made` has new axes."""
        axes = {label: axis for label, axis in made.items() if axis is not None}
        for value, labels in operands:
            for axis, label in zip(value, labels, strict=True):
                if axis is not None:
                    unite(axes.setdefault(label, axis), axis, self.why)
        values = [tuple(axes.get(label) for label in labels) for labels in results]
        self.note([*operands, *zip(values, results, strict=True)])
        return values

    def note(self, arrays: Iterable[tuple[Value, Labels]]) -> None:
        """Keeps which arrays an operation relates, and by which indices."""
        terms = [
            [(label, axis) for axis, label in zip(value, labels, strict=True) if axis is not None]
            for value, labels in arrays
        ]
        for _, axis in itertools.chain.from_iterable(terms):
            self.used.setdefault(axis, len(self.used))
        self.operations.append([self.loops + term for term in terms])

    def split(self, axis: Axis | None, sizes: Sequence[int], divide: Callable[..., list[Axis] | None]) -> Value:
        """The parts into which `divide` divides an axis; if it cannot, the axis is frozen and they are new."""
        if axis is None:
            return (None,) * len(sizes)
        self.used.setdefault(axis, len(self.used))
        parts = divide(axis, sizes, self.why)
        if parts is None:
            self.freeze([axis])
            return self.fresh(sizes, self.why)
        return tuple(part if part.size > 1 else None for part in parts)

    def join(self, axes: Sequence[Axis | None], sizes: Sequence[int]) -> Axis | None:
        """The product of axes; equal entries along some of them are free to move."""
        if all(axis is None for axis in axes):
            return None
        return product([axis or Axis(size) for axis, size in zip(axes, sizes, strict=True)])

    def _scope(self, eqn: core.JaxprEqn) -> str:
        """Where in the model an equation comes from: its module, or else its line."""
        outer, inner = self._scopes[-1], str(eqn.source_info.name_stack)
        if inner and outer.endswith(inner):
            return outer
        if inner:
            return f"{outer}/{inner}" if outer and ":" not in outer else inner
        return outer or PurePath(source_info_util.summarize(eqn.source_info)).name


def runs(before: Sequence[int], after: Sequence[int]) -> list[tuple[slice, slice]]:
    """For a reshape, the smallest runs of axes that are of one size before and after; none of an empty array."""
    if 0 in before:
        return []
    found, i, j = [], 0, 0
    while i < len(before) or j < len(after):
        start, old, new = (i, j), 1, 1
        while True:
            if old <= new and i < len(before):
                old, i = old * before[i], i + 1
            else:
                new, j = new * after[j], j + 1
            if old == new:
                break
        found.append((slice(start[0], i), slice(start[1], j)))
    return found


def fold(eqn: core.JaxprEqn, operand: Any) -> Folded:
    """The result of a reshape, or of a transpose of one, before it is known which parts of it are used."""
    if eqn.primitive.name == "transpose":
        return replace(operand, order=tuple(operand.order[axis] for axis in eqn.params["permutation"]))
    before, after = (atom.aval.shape for atom in (eqn.invars[0], eqn.outvars[0]))  # type: ignore[attr-defined]
    return Folded(operand, before, after, tuple(range(len(after))))


def _used_in_parts(eqns: Sequence[core.JaxprEqn], outvars: Sequence[Any]) -> set[Any]:
    """The results of reshapes, and their transposes, that are only used in stretches of a block's first axis."""
    uses: dict[Any, list[core.JaxprEqn]] = {}
    for eqn in eqns:
        for atom in eqn.invars:
            if not isinstance(atom, core.Literal):
                uses.setdefault(atom, []).append(eqn)

    def in_parts(var: Any, first: list[int]) -> list[Any] | None:
        found = [var]
        for eqn in uses.get(var, ()):
            if eqn.primitive.name == "transpose":
                inner = in_parts(eqn.outvars[0], [eqn.params["permutation"].index(axis) for axis in first])
                if inner is None:
                    return None
                found += inner
            elif cut_axis(eqn) not in first:
                return None
        return found if var not in outvars else None

    folded: set[Any] = set()
    for eqn in eqns:
        if eqn.primitive.name == "reshape" and eqn.params["dimensions"] is None:
            folding = fold(eqn, ())
            blocks = [new for _, new in runs(folding.before, folding.after) if new.stop - new.start > 1]
            folded |= set(in_parts(eqn.outvars[0], [block.start for block in blocks]) or ())
    return folded


def cut_axis(eqn: core.JaxprEqn) -> int | None:
    """The one axis along which an equation takes stretches of its operand, if that is what it does."""
    if eqn.primitive.name == "split":
        return eqn.params["axis"]
    if eqn.primitive.name != "slice" or any(stride != 1 for stride in eqn.params["strides"] or ()):
        return None
    shape = eqn.invars[0].aval.shape  # type: ignore[attr-defined]
    stretches = zip(shape, eqn.params["start_indices"], eqn.params["limit_indices"], strict=True)
    cut = [axis for axis, (size, start, stop) in enumerate(stretches) if stop - start != size]
    return cut[0] if len(cut) == 1 else None


def live(jaxpr: core.Jaxpr) -> list[core.JaxprEqn]:
    """The equations that the results depend on, and those that write to what others may read."""
    needed = {atom for atom in jaxpr.outvars if not isinstance(atom, core.Literal)}
    found = []
    for eqn in reversed(jaxpr.eqns):
        writes = bool(eqn.effects) and not eqn.primitive.name.startswith("debug")
        if writes or needed.intersection(eqn.outvars):
            found.append(eqn)
            needed |= {atom for atom in eqn.invars if not isinstance(atom, core.Literal)}
    return found[::-1]
