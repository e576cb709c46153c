"""Axis identities: a union-find of the axes of arrays that must be permuted together.

An axis is free or frozen. A reshape can reveal that it is the row-major product of other axes ("blocks"), a
concatenation that others follow one another in it ("segments"). Uniting two axes splits both as far as needed, and
freezes them where they do not fit together. Every step only takes freedom away, so a step too many is never wrong.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(eq=False)
class Axis:
    """A node of the union-find. Only the functions of this module change it."""

    size: int
    frozen: str | None = None  # the reason, if all of it is known to be frozen
    tied: bool = False  # whether all entries along it are equal in some array, as in copies and padding
    kind: Literal["", "blocks", "segments"] = ""
    parts: "list[Axis]" = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # where each of its segments ends
    parent: "Axis | None" = None  # the axis that this one was united with


def find(axis: Axis) -> Axis:
    """The representative of all axes united with this one."""
    while axis.parent is not None:
        axis.parent = axis.parent.parent or axis.parent  # path compression
        axis = axis.parent
    return axis


def product(axes: Sequence[Axis]) -> Axis:
    """The axis that is the row-major product of these, as flattening makes it."""
    axes = [axis for axis in axes if axis.size > 1]
    if len(axes) < 2:
        return axes[0] if axes else Axis(1)
    return Axis(math.prod(axis.size for axis in axes), kind="blocks", parts=list(axes))


def concatenation(axes: Sequence[Axis]) -> Axis:
    """The axis in which these follow one another."""
    if len(axes) == 1:
        return axes[0]
    ends = list(itertools.accumulate(axis.size for axis in axes))
    return Axis(ends[-1], kind="segments", parts=list(axes), ends=ends)


def flat_parts(axis: Axis, kind: str, keep: Collection[Axis] = ()) -> list[Axis]:
    """The factors ("blocks") or segments of an axis, nested ones flattened but for those to keep.

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
    """The indivisible axes that make up an axis, in order."""
    stack = [axis]
    while stack:
        part = find(stack.pop())
        if part.parts:
            stack += reversed(part.parts)
        else:
            yield part


def mirrored(axis: Axis) -> list[Axis]:
    """The atoms that several factors of a product have, as the rows and columns of a symmetric matrix do."""
    found = []
    for segment in flat_parts(axis, "segments"):
        factors = flat_parts(segment, "blocks")
        inside = [{*atoms(factor)} for factor in factors]
        found += [atom for one, other in itertools.combinations(inside, 2) for atom in one & other]
        found += [atom for factor in factors if factor is not segment for atom in mirrored(factor)]
    return found


def tie(axis: Axis | None) -> None:
    """Notes that in some array all entries along an axis are equal."""
    for atom in () if axis is None else atoms(axis):
        atom.tied = True


def freeze(axis: Axis, reason: str) -> None:
    """Forbids any permutation of an axis; what is frozen already keeps its first reason."""
    stack = [axis]
    while stack:
        part = find(stack.pop())
        if part.frozen is None:
            part.frozen = reason
            stack += part.parts


def unite(a: Axis, b: Axis, reason: str) -> None:
    """Makes two axes of one size move together; freezes both, for `reason`, where their parts do not fit."""
    pairs = [(a, b)]
    while pairs:
        a, b = map(find, pairs.pop())
        if a is b:
            continue
        if a.parts and not b.parts:
            a, b = b, a
        if not a.parts:
            if a.frozen is not None:
                freeze(b, a.frozen)
                if not b.parts:
                    b.frozen = a.frozen  # of two reasons the first
            if a.tied:
                tie(b)
            a.parent = b
            continue
        parts_b = flat_parts(b, b.kind)
        split = split_product if b.kind == "blocks" else split_segments
        parts_a = split(a, [part.size for part in parts_b], reason)
        if parts_a is None:
            freeze(a, reason)
            freeze(b, reason)
            continue
        if find(a) is not find(b):
            a.parent = b
        pairs += reversed(list(zip(parts_a, parts_b, strict=True)))


def split_product(axis: Axis, sizes: Sequence[int], reason: str) -> list[Axis] | None:
    """Splits an axis into factors of these sizes, of which it is the row-major product; None if that is impossible."""
    queue = flat_parts(axis, "blocks")
    factors = []
    for size in sizes:
        taken: list[Axis] = []
        missing = size
        while missing > 1:
            head = find(queue.pop(0))
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
    """Splits an axis into two factors, the first of size `outer`; None if that is impossible."""
    if axis.size % outer:
        return None
    inner = axis.size // outer
    if axis.kind == "":
        axis.kind, axis.parts = "blocks", [Axis(size, axis.frozen, axis.tied) for size in (outer, inner)]
        return axis.parts[0], axis.parts[1]
    # A concatenation of products is itself a product if all of them have the same inner factor.
    pairs = []
    for segment in flat_parts(axis, "segments"):
        pair = None if segment.size % inner else split_product(segment, [segment.size // inner, inner], reason)
        if pair is None:
            return None
        pairs.append(pair)
    for _, other in pairs[1:]:
        unite(pairs[0][1], other, reason)
    return concatenation([first for first, _ in pairs]), pairs[0][1]


def split_segments(axis: Axis, sizes: Sequence[int], reason: str) -> list[Axis] | None:
    """Splits an axis into segments of these sizes, which follow one another in it; None if that is impossible."""
    axis = find(axis)
    if len(sizes) == 1:
        return [axis]
    if axis.kind == "blocks":
        first, *rest = flat_parts(axis, "blocks")
        inner = axis.size // first.size
        if any(size % inner for size in sizes):
            return None
        outer = split_segments(first, [size // inner for size in sizes], reason)
        return None if outer is None else [product([part, *rest]) for part in outer]
    if not axis.parts:
        if axis.frozen is not None:  # no part of it will ever move, so it need not know them
            return [Axis(size, axis.frozen) for size in sizes]
        axis.kind, axis.parts = "segments", [Axis(size, tied=axis.tied) for size in sizes]
        axis.ends = list(itertools.accumulate(sizes))
    segments, start = [], 0
    for end in itertools.accumulate(sizes):
        stop = _cut(axis, end, reason)
        if stop is None:
            return None
        segments.append(slice(start, stop))
        start = stop
    return [concatenation(axis.parts[segment]) for segment in segments]


def _cut(axis: Axis, position: int, reason: str) -> int | None:
    """How many segments of an axis end at a position or before, after the one across it was cut in two.

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
