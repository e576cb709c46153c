"""Constraints that rules impose: axes that move together, frozen axes, and the arrays of each operation."""

import collections
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from mcomb.symmetry.arrays import Array, ArrayAxes
from mcomb.symmetry.axes import Axis, atoms, find, freeze, product, unite

Labels = Sequence[Hashable]
"""An operation's index labels for the axes of one array, as in an einsum."""

LabelledAxes = list[tuple[Hashable, Axis]]
"""The axes of one array in an operation, with their labels."""


@dataclass(frozen=True)
class Grouping:
    """Rows sorted by group, where each row's group is a position along an axis of groups.

        order = jnp.argsort(expert)       # sort rows, each of which has an expert
        y = experts_in_turn(x[order])     # the rows of the first expert come first
        y[jnp.argsort(order)]             # restore the order

    A permutation of the groups also permutes these rows, in an order that depends on the data. This is safe if the
    order of the rows does not matter, and all arrays with this axis of rows come from this sort. See
    `break_up_groupings`.
    """

    rows: Axis
    groups: Axis
    source: object  # source of the positions that the rows were sorted by
    reason: str


class Constraints:
    """A collection of the constraints that all rules impose.

    Rules map facts about their operands to facts about their results. They impose constraints with `relate`, `freeze`,
    `split`, `join`, `record` and `group`. These methods can only remove freedom.
    """

    def __init__(self) -> None:
        self.reason = ""  # the current operation, which is the reason if an axis freezes
        self.scope = ""  # the module or line of the current operation
        self.operations: list[list[LabelledAxes]] = []  # the arrays that each operation relates
        self.first_use: dict[Axis, int] = {}  # axes, numbered in the order in which operations first use them
        self.loop_axes: list[Axis] = []  # axes of arrays that loops carry from step to step or return
        self.groupings: list[Grouping] = []
        self.steps: LabelledAxes = []  # the step axis of each scan that encloses the current operation
        self.shards = 0  # number of `shard_map`s that enclose the current operation

    def plain(self, array: Array) -> ArrayAxes:
        """Return the axes of an array that is used as plain numbers, which freezes the axis of any positions."""
        if array.positions is not None:
            freeze(array.positions.along, array.positions.reason)
        for column in array.columns:
            self.plain(column)
        return array.axes

    def new_axes(self, shape: Sequence[int], frozen: str | None = None) -> ArrayAxes:
        """Return new axes of the given sizes."""
        return tuple(Axis(size, frozen) if size > 1 else None for size in shape)

    def explain(self, primitive: str, why: str | None) -> None:
        """Set the reason for axes that freeze next: the primitive, and how it depends on the order."""
        self.reason = f"{primitive} ({why}) in {self.scope}" if why else f"{primitive} in {self.scope}"

    def freeze(self, axes: Iterable[Axis | None]) -> None:
        """Forbid any permutation of these axes, and record the current operation as the reason."""
        for axis in axes:
            if axis is not None:
                freeze(axis, self.reason)

    def relate(
        self,
        operands: Sequence[tuple[ArrayAxes, Labels]],
        results: Sequence[Labels],
        new: Mapping[Any, Axis | None] = MappingProxyType({}),
    ) -> list[ArrayAxes]:
        """Return the results of an operation written like an einsum, after uniting axes with the same label.

            relate([(x, "ij"), (y, "jk")], ["ik"])  # a matrix product: the last axis of x moves with the first of y

        A label that no operand has denotes an axis of `new`, or otherwise an axis along which all entries are equal.
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
                (int(label) if isinstance(label, np.integer) else label, axis)  # comparable with other types
                for axis, label in zip(axes, labels, strict=True)
                if axis is not None
            ]
            for axes, labels in arrays
        ]
        for _, axis in itertools.chain.from_iterable(labelled):
            self.first_use.setdefault(axis, len(self.first_use))
        self.operations.append([self.steps + axes for axes in labelled])

    def record_again(self, arrays: Iterable[ArrayAxes]) -> None:
        """Record arrays that an earlier operation used, inside or outside a scan."""
        for axes in arrays:
            if any(axis in self.first_use for axis in axes):
                self.record([(axes, range(len(axes)))])

    def record_loop(self, arrays: Iterable[ArrayAxes]) -> None:
        """Record arrays that a loop carries from step to step or returns."""
        self.loop_axes += [axis for axes in arrays for axis in axes if axis is not None]

    def group(self, keys: Axis, groups: Axis, source: object) -> Axis:
        """Return the axis of rows after a stable sort by group."""
        self.record([((groups,), ["groups"]), ((keys,), ["rows"])])
        self.explain("sort", "rows of one group stay in their order")
        self.freeze([keys, *([groups] if self.shards else [])])
        rows = Axis(keys.size)
        self.groupings.append(Grouping(rows, groups, source, self.reason))
        return rows

    def break_up_groupings(self, others: Iterable[Axis]) -> None:
        """Freeze the groups of sorted rows if the order of the rows matters or other axes move with them.

        A loop may carry sorted rows to another step, which sorts them in another order.
        """
        sorts = collections.Counter(find(grouping.rows) for grouping in self.groupings)
        others = {*map(find, others), *(atom for axis in self.loop_axes for atom in atoms(axis))} if sorts else set()
        for grouping in self.groupings * len(self.groupings):  # groups may themselves be sorted rows
            rows = find(grouping.rows)
            if rows.frozen or rows.parts or rows in others or sorts[rows] > 1:
                freeze(rows, grouping.reason)
                freeze(grouping.groups, rows.frozen or grouping.reason)

    def split(self, axis: Axis | None, sizes: Sequence[int], split: Callable[..., list[Axis] | None]) -> ArrayAxes:
        """Split an axis with `split_product` or `split_segments`, or freeze it if that is impossible."""
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
        """Return the product of axes, with a free factor for each axis along which all entries are equal."""
        if all(axis is None for axis in axes):
            return None
        return product([axis or Axis(size) for axis, size in zip(axes, sizes, strict=True)])


def _atoms_of(axes: ArrayAxes) -> Iterator[Axis]:
    """Yield the atoms of all axes of an array."""
    return (atom for axis in axes if axis is not None for atom in atoms(axis))
