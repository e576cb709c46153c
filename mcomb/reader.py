"""Carries the identities of axes through a jaxpr, equation by equation."""

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
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


class Reader:
    """The state of reading a model: what each operation relates, and where we are."""

    def __init__(self, rules: Mapping[str, Rule], otherwise: Rule) -> None:
        self.rules, self.otherwise = rules, otherwise
        self.why = ""  # what to blame when an axis freezes
        self.operations: list[list[Term]] = []
        self.used: dict[Axis, int] = {}  # axes in the order in which operations first had them
        self.loops: Term = []  # the steps of the scans that we are inside of
        self._scopes = [""]

    def read(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Value]) -> list[Value]:
        """The axes of a jaxpr's results, from those of its arguments."""
        values: dict[Any, Value] = dict(zip(jaxpr.invars, args, strict=True))
        values |= zip(jaxpr.constvars, map(self.constant, consts), strict=True)

        def look_up(atom: Any) -> Value:
            return self.constant(atom.val) if isinstance(atom, core.Literal) else values[atom]

        for eqn in _live(jaxpr):
            self._scopes.append(self._scope(eqn))
            self.why = f"{eqn.primitive.name} in {self._scopes[-1]}"
            rule = self.rules.get(eqn.primitive.name, self.otherwise)
            results = rule(self, eqn, *map(look_up, eqn.invars))
            for var, result in zip(eqn.outvars, results, strict=True):
                values[var] = tuple(axis if axis is not None and axis.size > 1 else None for axis in result)
            self._scopes.pop()
        return [look_up(atom) for atom in jaxpr.outvars]

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


def _live(jaxpr: core.Jaxpr) -> list[core.JaxprEqn]:
    """The equations that the results depend on."""
    needed = {atom for atom in jaxpr.outvars if not isinstance(atom, core.Literal)}
    live = []
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            live.append(eqn)
            needed |= {atom for atom in eqn.invars if not isinstance(atom, core.Literal)}
    return live[::-1]
