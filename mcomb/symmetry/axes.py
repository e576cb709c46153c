"""Axis identities: a union-find of array axes that must be permuted together.

An axis is free or frozen. A reshape can show that it is the row-major product of other axes ("blocks"). A concatenation
can show that it consists of consecutive parts ("segments"). Uniting two axes splits both as far as needed, and freezes
them if their parts do not fit. Each step can only remove freedom, so an unnecessary step is never wrong.

A group norm after a concatenation reshapes segments to groups and channels. Its channels are "cells": they have a
different identity in each segment of the groups. Five and seven channels in groups of four are

    groups    1 of the first part, 1 of both, 1 of the second part
    channels  4 of the first part, 1 of the first and 3 of the second part, 4 of the second part

Cells are meaningful only in arrays that also have the axis of their groups. `merge_cells` gives all groups one order.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(eq=False)
class Axis:
    """A node of the union-find, which only the functions of this module modify."""

    size: int
    frozen: str | None = None  # the reason, if the whole axis is known to be frozen
    kind: Literal["", "blocks", "segments", "cells"] = ""
    parts: "list[Axis]" = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # the end of each segment
    groups: "Axis | None" = None  # cells only: the axis with one segment for each part
    counts: list[int] = field(default_factory=list)  # cells only: the sizes of these segments
    parent: "Axis | None" = None  # the axis that this one was united with


def find(axis: Axis) -> Axis:
    """Return the representative of all axes united with this one."""
    while axis.parent is not None:
        axis.parent = axis.parent.parent or axis.parent  # path compression
        axis = axis.parent
    return axis


def cells(axis: Axis) -> list[tuple[Axis, Axis]]:
    """Return the segments of a cells axis's groups, each with the axis of the cells in one of its groups."""
    assert axis.groups is not None
    segments = split_segments(axis.groups, axis.counts, "")
    assert segments is not None, "groups are made of these segments"
    return list(zip(segments, axis.parts, strict=True))


def groups_of(axis: Axis) -> Axis | None:
    """Return the groups axis of cells, or None for any other axis."""
    return None if axis.groups is None else find(axis.groups)


def write_cells(factors: Sequence[Axis]) -> list[Axis]:
    """Return the factors of a product, with each pair of groups and cells replaced by segments."""
    for i, (groups, inner) in enumerate(itertools.pairwise(map(find, factors))):
        if inner.kind == "cells" and groups_of(inner) is groups:
            segments = concatenation([product(pair) for pair in cells(inner)])
            return write_cells([*factors[:i], segments, *factors[i + 2 :]])
    return list(factors)


def merge_cells(axis: Axis, reason: str) -> Axis:
    """Unite the cells of an axis into one identity for all groups, and return it; return other axes unchanged."""
    axis = find(axis)
    if axis.kind != "cells":
        return axis
    first, *others = axis.parts
    axis.kind, axis.parts, axis.parent = "", [], first
    for other in others:
        unite(first, other, reason)
    return merge_cells(first, reason)


def _is_inside(axis: Axis, other: Axis) -> bool:
    """Return whether an axis is a cell of the other, or part of one."""
    todo = [*other.parts] if other.kind == "cells" else []
    while todo:
        part = find(todo.pop())
        if part is axis:
            return True
        todo += part.parts
    return False


def product(axes: Sequence[Axis]) -> Axis:
    """Return the row-major product of axes, as flattening produces it."""
    axes = [axis for axis in axes if axis.size > 1]
    if len(axes) < 2:
        return axes[0] if axes else Axis(1)
    return Axis(math.prod(axis.size for axis in axes), kind="blocks", parts=list(axes))


def concatenation(axes: Sequence[Axis]) -> Axis:
    """Return the concatenation of axes."""
    if len(axes) == 1:
        return axes[0]
    ends = list(itertools.accumulate(axis.size for axis in axes))
    return Axis(ends[-1], kind="segments", parts=list(axes), ends=ends)


def flat_parts(axis: Axis, kind: str, keep: Collection[Axis] = ()) -> list[Axis]:
    """Return the factors ("blocks") or segments of an axis, flattening nested ones except those in `keep`.

    An axis of another kind has one part: itself.
    """
    parts, stack = [], [axis]
    while stack:
        part = find(stack.pop())
        if part.kind == kind and part not in keep:
            stack += reversed(part.parts)
        else:
            parts.append(part)
    return parts


def atoms(axis: Axis) -> Iterator[Axis]:
    """Yield the indivisible axes that make up an axis, in order."""
    stack = [axis]
    while stack:
        part = find(stack.pop())
        if part.parts:
            stack += reversed(part.parts)
        else:
            yield part


def freeze(axis: Axis, reason: str) -> None:
    """Forbid any permutation of an axis; parts that are already frozen keep their first reason."""
    stack = [axis]
    while stack:
        part = find(stack.pop())
        if part.frozen is None:
            part.frozen = reason
            stack += part.parts


def unite(a: Axis, b: Axis, reason: str) -> None:
    """Make two axes of the same size move together, and freeze both if their parts do not fit."""
    pairs = [(a, b)]
    while pairs:
        a, b = map(find, pairs.pop())
        if a is b:
            continue
        if (cell_pairs := _unite_cells(a, b, reason)) is not None:
            pairs += cell_pairs
            continue
        if (a.parts and not b.parts) or (a.kind == "segments" and b.kind == "blocks"):
            a, b = b, a
        if not a.parts:
            if a.frozen is not None:
                freeze(b, a.frozen)
                if not b.parts:
                    b.frozen = a.frozen  # keep the first of two reasons
            a.parent = b
            continue
        parts_b, parts_a = _split_like(a, b, reason)
        if parts_a is None and a.kind != b.kind:
            a, b = find(b), find(a)
            parts_b, parts_a = _split_like(a, b, reason)
        if parts_a is None:
            freeze(a, reason)
            freeze(b, reason)
            continue
        if find(a) is not find(b):
            a.parent = b
        pairs += reversed(list(zip(parts_a, parts_b, strict=True)))


def _unite_cells(a: Axis, b: Axis, reason: str) -> list[tuple[Axis, Axis]] | None:
    """Return the pairs to unite in place of a pair with cells, or None if the pair needs no special treatment.

    Cells of the same groups are united one by one. All other cells are merged first.
    """
    if "cells" not in (a.kind, b.kind):
        return None
    inside = _is_inside(a, b) or _is_inside(b, a)
    if not inside and not (a.parts and b.parts):
        return None
    if not inside and a.kind == b.kind and a.counts == b.counts and groups_of(a) is groups_of(b):
        a.parent = b
        return list(zip(a.parts, b.parts, strict=True))
    return [(merge_cells(a, reason), merge_cells(b, reason))]


def _split_like(axis: Axis, other: Axis, reason: str) -> tuple[list[Axis], list[Axis] | None]:
    """Return the parts of `other`, and `axis` split into parts of the same sizes, or None if that is impossible."""
    parts = flat_parts(other, other.kind)
    split = split_product if other.kind == "blocks" else split_segments
    return parts, split(axis, [part.size for part in parts], reason)


def split_product(axis: Axis, sizes: Sequence[int], reason: str) -> list[Axis] | None:
    """Split an axis into factors of the given sizes, or return None if that is impossible."""
    queue = flat_parts(axis, "blocks")
    factors = []
    for size in sizes:
        taken: list[Axis] = []
        missing = size
        while missing > 1:
            head = find(queue.pop(0))
            if missing % head.size:
                head = merge_cells(head, reason)
            if head.kind == "blocks":  # it was split after it was queued
                queue[:0] = flat_parts(head, "blocks")
                continue
            if missing % head.size:
                pair = _split_outer(head, missing, reason)
                if pair is None:
                    return None
                head = pair[0]
                queue.insert(0, pair[1])
            taken.append(head)
            missing //= head.size
        factors.append(product(taken))
    return factors


def _split_outer(axis: Axis, outer: int, reason: str) -> tuple[Axis, Axis] | None:
    """Split an axis into two factors, the first of size `outer`, or return None if that is impossible."""
    if axis.size % outer:
        return None
    inner = axis.size // outer
    if axis.kind == "":
        axis.kind, axis.parts = "blocks", [Axis(size, axis.frozen) for size in (outer, inner)]
        return axis.parts[0], axis.parts[1]
    return _split_across_segments(axis, inner, reason)


def _split_across_segments(axis: Axis, inner: int, reason: str) -> tuple[Axis, Axis] | None:
    """Split segments into groups of `inner` entries and their cells, or return None if that is impossible."""
    cuts = _cuts([part.size for part in flat_parts(axis, "segments")], inner)
    pieces = split_segments(axis, [stop - start for start, stop in itertools.pairwise(cuts)], reason)
    if pieces is None:
        return None
    pairs = []
    for _, group in itertools.groupby(zip(cuts, pieces, strict=False), lambda cut: cut[0] // inner):
        piece = concatenation([piece for _, piece in group])  # whole groups of one segment, or one group of several
        pair = split_product(piece, [piece.size // inner, inner], reason)
        if pair is None:
            return None
        pairs.append(pair)
    groups = concatenation([outer for outer, _ in pairs])
    counts = [outer.size for outer, _ in pairs]
    if len(pairs) == 1:
        return groups, pairs[0][1]
    return groups, Axis(inner, kind="cells", parts=[part for _, part in pairs], groups=groups, counts=counts)


def split_segments(axis: Axis, sizes: Sequence[int], reason: str) -> list[Axis] | None:
    """Split an axis into consecutive segments of the given sizes, or return None if that is impossible."""
    if len(sizes) == 1:
        return [find(axis)]
    axis = merge_cells(axis, reason)
    if axis.kind == "blocks":
        return _cut_blocks(axis, sizes, reason)
    if not axis.parts:
        if axis.frozen is not None:  # its parts never move, so they need not be recorded
            return [Axis(size, axis.frozen) for size in sizes]
        axis.kind, axis.parts = "segments", [Axis(size) for size in sizes]
        axis.ends = list(itertools.accumulate(sizes))
    segments, start = [], 0
    for end in itertools.accumulate(sizes):
        stop = _cut(axis, end, reason)
        if stop is None:
            return None
        segments.append(slice(start, stop))
        start = stop
    return [concatenation(axis.parts[segment]) for segment in segments]


def _cut_blocks(axis: Axis, sizes: Sequence[int], reason: str) -> list[Axis] | None:
    """Split a product into segments; a single axis inside its first factor becomes cells."""
    first, *rest = write_cells(flat_parts(axis, "blocks"))
    if not rest:
        return split_segments(first, sizes, reason)
    inner = axis.size // first.size
    if len(rest) == 1 and not rest[0].parts and rest[0] not in atoms(first):
        cuts = _cuts(sizes, inner)
        counts = [(stop - start) // inner or 1 for start, stop in itertools.pairwise(cuts) if start % inner == 0]
        if split_segments(first, counts, reason) is None:
            return None
        (atom,) = rest
        atom.kind, atom.groups, atom.counts = "cells", first, counts
        atom.parts = [Axis(inner, atom.frozen) for _ in counts]
        return _cut_blocks(axis, sizes, reason)
    if any(size % inner for size in sizes):
        return None
    outer = split_segments(first, [size // inner for size in sizes], reason)
    return None if outer is None else [product([part, *rest]) for part in outer]


def _cuts(sizes: Iterable[int], inner: int) -> list[int]:
    """Return the ends of segments of these sizes, and the bounds of the groups of `inner` entries that they cut."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return sorted({*ends, *(end // inner * inner for end in ends), *(-(-end // inner) * inner for end in ends)})


def _cut(axis: Axis, position: int, reason: str) -> int | None:
    """Cut the segment at a position in two, and return the number of segments that end at or before it.

    Return None if the segment cannot be cut.
    """
    while True:
        index = bisect_left(axis.ends, position)
        end, part = axis.ends[index], find(axis.parts[index])
        if end == position:
            return index + 1
        start = end - part.size
        if part.kind == "segments":
            inner = part.parts
        else:
            pair = split_segments(part, [position - start, end - position], reason)
            if pair is None:
                return None
            inner = pair
        axis.parts[index : index + 1] = inner
        axis.ends[index : index + 1] = itertools.accumulate((part.size for part in inner), initial=start)
        del axis.ends[index]
