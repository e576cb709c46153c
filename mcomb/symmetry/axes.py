"""Axis identities: a union-find of the axes of arrays that must be permuted together.

An axis is free or frozen. A reshape can reveal that it is the row-major product of other axes ("blocks"), a
concatenation that others follow one another in it ("segments"). Uniting two axes splits both as far as needed, and
freezes them where they do not fit together. Every step only takes freedom away, so a step too many is never wrong.

A group norm after a concatenation reshapes segments to groups and channels. Its channels are "cells": they have
another identity in each segment of the groups. Five and seven channels in groups of four are

    groups    1 of the first part, 1 of both, 1 of the second part
    channels  4 of the first part, 1 of the first and 3 of the second part, 4 of the second part

Cells only make sense in arrays that also have the axis of their groups; `merge_cells` gives all groups one order.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(eq=False)
class Axis:
    """A node of the union-find. Only the functions of this module change it."""

    size: int
    frozen: str | None = None  # the reason, if all of it is known to be frozen
    kind: Literal["", "blocks", "segments", "cells"] = ""
    parts: "list[Axis]" = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # where each of its segments ends
    groups: "Axis | None" = None  # of cells: the axis whose segments have a part each
    counts: list[int] = field(default_factory=list)  # of cells: the sizes of these segments
    parent: "Axis | None" = None  # the axis that this one was united with


def find(axis: Axis) -> Axis:
    """Return the representative of all axes united with this one."""
    while axis.parent is not None:
        axis.parent = axis.parent.parent or axis.parent  # path compression
        axis = axis.parent
    return axis


def cells(axis: Axis) -> list[tuple[Axis, Axis]]:
    """Return each segment of the groups of a cells axis with the axis inside of its groups."""
    assert axis.groups is not None
    segments = split_segments(axis.groups, axis.counts, "")
    assert segments is not None, "groups are made of these segments"
    return list(zip(segments, axis.parts, strict=True))


def groups_of(axis: Axis) -> Axis | None:
    """Return the axis of the groups of cells; None for any other axis."""
    return None if axis.groups is None else find(axis.groups)


def write_cells(factors: Sequence[Axis]) -> list[Axis]:
    """Return the factors of a product, in which segments replace groups that their cells follow."""
    for i, (groups, inner) in enumerate(itertools.pairwise(map(find, factors))):
        if inner.kind == "cells" and groups_of(inner) is groups:
            segments = concatenation([product(pair) for pair in cells(inner)])
            return write_cells([*factors[:i], segments, *factors[i + 2 :]])
    return list(factors)


def merge_cells(axis: Axis, reason: str) -> Axis:
    """Return an axis that has one identity in all groups, after uniting its cells; any other as it is."""
    axis = find(axis)
    if axis.kind != "cells":
        return axis
    first, *others = axis.parts
    axis.kind, axis.parts, axis.parent = "", [], first
    for other in others:
        unite(first, other, reason)
    return merge_cells(first, reason)


def _is_inside(axis: Axis, other: Axis) -> bool:
    """Return whether an axis is one of the cells of the other, or inside of one."""
    todo = [*other.parts] if other.kind == "cells" else []
    while todo:
        part = find(todo.pop())
        if part is axis:
            return True
        todo += part.parts
    return False


def product(axes: Sequence[Axis]) -> Axis:
    """Return the axis that is the row-major product of these, as flattening makes it."""
    axes = [axis for axis in axes if axis.size > 1]
    if len(axes) < 2:
        return axes[0] if axes else Axis(1)
    return Axis(math.prod(axis.size for axis in axes), kind="blocks", parts=list(axes))


def concatenation(axes: Sequence[Axis]) -> Axis:
    """Return the axis in which these follow one another."""
    if len(axes) == 1:
        return axes[0]
    ends = list(itertools.accumulate(axis.size for axis in axes))
    return Axis(ends[-1], kind="segments", parts=list(axes), ends=ends)


def flat_parts(axis: Axis, kind: str, keep: Collection[Axis] = ()) -> list[Axis]:
    """Return the factors ("blocks") or segments of an axis, nested ones flattened except for those to keep.

    It is the axis itself if it is of another kind.
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
    """Forbid any permutation of an axis; parts that are frozen already keep their first reason."""
    stack = [axis]
    while stack:
        part = find(stack.pop())
        if part.frozen is None:
            part.frozen = reason
            stack += part.parts


def unite(a: Axis, b: Axis, reason: str) -> None:
    """Make two axes of one size move together; freeze both, for `reason`, where their parts do not fit."""
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
                    b.frozen = a.frozen  # of two reasons the first
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
    """Return the axes to unite in place of two of which one is cells, None if neither is or the other has no parts.

    Cells of the same groups are united one by one; any others are merged.
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
    """Return the parts of the other axis, and the axis split into parts of their sizes, None if that is impossible."""
    parts = flat_parts(other, other.kind)
    split = split_product if other.kind == "blocks" else split_segments
    return parts, split(axis, [part.size for part in parts], reason)


def split_product(axis: Axis, sizes: Sequence[int], reason: str) -> list[Axis] | None:
    """Split an axis into factors of these sizes, of which it is the row-major product; None if that is impossible."""
    queue = flat_parts(axis, "blocks")
    factors = []
    for size in sizes:
        taken: list[Axis] = []
        missing = size
        while missing > 1:
            head = find(queue.pop(0))
            if missing % head.size:
                head = merge_cells(head, reason)
            if head.kind == "blocks":  # split since it was queued
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
    """Split an axis into two factors, the first of size `outer`; None if that is impossible."""
    if axis.size % outer:
        return None
    inner = axis.size // outer
    if axis.kind == "":
        axis.kind, axis.parts = "blocks", [Axis(size, axis.frozen) for size in (outer, inner)]
        return axis.parts[0], axis.parts[1]
    return _split_across_segments(axis, inner, reason)


def _split_across_segments(axis: Axis, inner: int, reason: str) -> tuple[Axis, Axis] | None:
    """Split segments into groups of `inner` entries and the cells inside them; None if that is impossible."""
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
    """Split an axis into segments of these sizes, which follow one another in it; None if that is impossible."""
    if len(sizes) == 1:
        return [find(axis)]
    axis = merge_cells(axis, reason)
    if axis.kind == "blocks":
        return _cut_blocks(axis, sizes, reason)
    if not axis.parts:
        if axis.frozen is not None:  # no part of it will ever move, so it need not know them
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
    """Split a product into segments; what is inside of its first factor becomes cells, if it is one axis."""
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
    """Return where segments of these sizes end, and where the groups of `inner` entries begin and end that they cut."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return sorted({*ends, *(end // inner * inner for end in ends), *(-(-end // inner) * inner for end in ends)})


def _cut(axis: Axis, position: int, reason: str) -> int | None:
    """Cut the segment across a position in two, and return how many segments end there or before.

    None if that one cannot be cut.
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
