"""Impose the relations that rules find: unite and freeze axes, and record the arrays of each operation."""

import collections
import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from mcomb.symmetry.axes import Axis, atoms, concatenation, find, freeze, product, split_product, split_segments, unite
from mcomb.symmetry.facts import ArrayAxes, ArrayFacts, Compound, Grouping, Relation

LabelledAxes = list[tuple[Hashable, Axis]]
"""The axes of one array in an operation, with their labels."""


class Constraints:
    """The constraints of all operations so far. Each method can only remove freedom."""

    def __init__(self) -> None:
        self.reason = ""  # the current operation, which is the reason if an axis freezes
        self.scope = ""  # the module or line of the current operation
        self.operations: list[list[LabelledAxes]] = []  # the arrays that each operation relates
        self.first_use: dict[Axis, int] = {}  # axes, numbered in the order in which operations first use them
        self.loop_axes: list[Axis] = []  # axes of arrays that loops carry from step to step or return
        self.groupings: list[Grouping] = []
        self.steps: LabelledAxes = []  # the step axis of each scan that encloses the current operation
        self.shards = 0  # number of `shard_map`s that enclose the current operation

    def explain(self, primitive: str, why: str | None) -> None:
        """Set the reason for axes that freeze next: the primitive, and how it depends on the order."""
        self.reason = f"{primitive} ({why}) in {self.scope}" if why else f"{primitive} in {self.scope}"

    def freeze(self, axes: Iterable[Axis | None]) -> None:
        """Forbid any permutation of these axes, and record the current operation as the reason."""
        for axis in axes:
            if axis is not None:
                freeze(axis, self.reason)

    def plain(self, array: ArrayFacts) -> ArrayAxes:
        """Return the axes of an array that is used as plain numbers, which freezes the axis of any positions."""
        if array.positions is not None:
            freeze(array.positions.along, array.positions.reason)
        for column in array.columns:
            self.plain(column)
        return array.axes

    def relate(self, relation: Relation, shapes: Iterable[Sequence[int]]) -> list[ArrayAxes]:
        """Impose a relation, and return the axes of its results, which have these shapes."""
        axes: dict[Hashable, Axis] = dict(relation.new)
        operands: list[LabelledAxes] = []
        for array, labels in relation.operands:
            self._number(axis for axis in array if axis is not None)
            pairs = zip(array, labels, strict=True)
            operands.append([part for axis, label in pairs if axis is not None for part in self._split(axis, label)])
            for label, axis in operands[-1]:
                self.freeze([axis] if label in relation.frozen else [])
                unite(axes.setdefault(label, axis), axis, self.reason)

        def join(label: Hashable, size: int) -> Axis | None:
            if not isinstance(label, Compound):
                return axes.setdefault(label, Axis(size, self.reason)) if label in relation.frozen else axes.get(label)
            parts = [join(inner, size) for inner, size in label.parts]
            if not parts or (label.kind == "blocks" and all(part is None for part in parts)):
                return None
            combine = product if label.kind == "blocks" else concatenation
            return combine([part or Axis(size) for part, (_, size) in zip(parts, label.parts, strict=True)])

        results = [tuple(map(join, labels, shape)) for labels, shape in zip(relation.results, shapes, strict=True)]
        labelled: list[LabelledAxes] = []
        for labels, result in zip(relation.results, results, strict=True):
            found: LabelledAxes = []
            for label, whole in zip(labels, result, strict=True):
                if isinstance(label, Compound) and label.kind == "blocks":
                    found += [(inner, axes[inner]) for inner, _ in label.parts if inner in axes]
                elif whole is not None:
                    found.append((label, whole))
            labelled.append(found)
        if any(isinstance(at, Compound) and at.kind == "segments" for _, labels in relation.operands for at in labels):
            for one in labelled:  # slices, without the unused rest
                self.record([one])
        else:
            self.record([*operands, *labelled])
        return results

    def _split(self, axis: Axis, label: Hashable) -> LabelledAxes:
        """Return the parts of an axis with a compound label, after freezing it if it cannot be split."""
        if not isinstance(label, Compound):
            return [(label, axis)]
        split = split_product if label.kind == "blocks" else split_segments
        parts = split(axis, [size for _, size in label.parts], self.reason)
        if parts is None:
            self.explain(self.reason.split()[0], "its parts end where those of a product or a concatenation do not")
            freeze(axis, self.reason)
            parts = [Axis(size, self.reason) for _, size in label.parts]
        pairs = zip(parts, label.parts, strict=True)
        return [found for part, (inner, _) in pairs if part.size > 1 for found in self._split(part, inner)]

    def _number(self, axes: Iterable[Axis]) -> None:
        for axis in axes:
            self.first_use.setdefault(axis, len(self.first_use))

    def record(self, arrays: Iterable[LabelledAxes]) -> None:
        """Record the arrays that an operation relates."""
        # Integers of NumPy cannot be compared with labels of other types.
        arrays = [[(int(at) if isinstance(at, np.integer) else at, axis) for at, axis in array] for array in arrays]
        self._number(axis for array in arrays for _, axis in array)
        self.operations.append([self.steps + array for array in arrays])

    def record_again(self, arrays: Iterable[ArrayAxes]) -> None:
        """Record arrays that an earlier operation used, inside or outside a scan."""
        for axes in arrays:
            if any(axis in self.first_use for axis in axes):
                self.record([[(i, axis) for i, axis in enumerate(axes) if axis is not None]])

    def record_loop(self, arrays: Iterable[ArrayAxes]) -> None:
        """Record arrays that a loop carries from step to step or returns."""
        self.loop_axes += [axis for axes in arrays for axis in axes if axis is not None]

    def group(self, sort: Grouping) -> None:
        """Record a sort of rows by group; inside a `shard_map`, freeze the groups, because devices sort separately."""
        self.freeze([sort.groups] if self.shards else [])
        self.groupings.append(replace(sort, reason=self.reason))

    def is_grouped(self, rows: Axis, source: object, matrices: Axis) -> bool:
        """Unite the groups of rows with the matrices if these positions sorted the rows; return whether they did."""
        for sort in self.groupings:
            if find(sort.rows) is find(rows) and sort.source is source:
                unite(sort.groups, matrices, self.reason)
                return True
        return False

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


def new_axes(shape: Sequence[int], frozen: str | None = None) -> ArrayAxes:
    """Return new axes of the given sizes."""
    return tuple(Axis(size, frozen) if size > 1 else None for size in shape)


def atoms_of(arrays: Iterable[ArrayAxes]) -> set[Axis]:
    """Return the atoms of all axes of these arrays."""
    return {atom for axis in itertools.chain.from_iterable(arrays) if axis is not None for atom in atoms(axis)}
