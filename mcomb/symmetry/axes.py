"""Axis identities: a union-find of the axes of arrays that must be permuted together.

An axis is free or frozen. A reshape can reveal that it is the row-major product of other axes ("blocks"), a
concatenation that others follow one another in it ("segments"). Uniting two axes splits both as far as needed, and
freezes them where they do not fit together. Every step only takes freedom away, so a step too many is never wrong.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

AtomPath = tuple[tuple[str, int], ...]
"""The steps from an axis to one of its atoms: (("blocks", 1), ("segments", 0)) is the first segment of factor 1."""


@dataclass(eq=False)
class Axis:
    """A node of the union-find. Only the functions of this module change it."""

    size: int
    frozen: str | None = None  # the reason, if it is frozen and has no parts
    kind: Literal["", "blocks", "segments"] = ""
    parts: tuple["Axis", ...] = ()
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
    return Axis(math.prod(axis.size for axis in axes), kind="blocks", parts=tuple(axes))


def concatenation(axes: Sequence[Axis]) -> Axis:
    """The axis in which these follow one another."""
    return axes[0] if len(axes) == 1 else Axis(sum(axis.size for axis in axes), kind="segments", parts=tuple(axes))


def flat_parts(axis: Axis, kind: str) -> list[Axis]:
    """The factors ("blocks") or segments of an axis, nested ones flattened; itself if it is of another kind."""
    axis = find(axis)
    return [inner for part in axis.parts for inner in flat_parts(part, kind)] if axis.kind == kind else [axis]


def atoms(axis: Axis, path: AtomPath = ()) -> Iterator[tuple[AtomPath, Axis]]:
    """The indivisible axes that make up an axis, each with its path."""
    axis = find(axis)
    if not axis.parts:
        yield path, axis
    for index, part in enumerate(axis.parts):
        yield from atoms(part, (*path, (axis.kind, index)))


def freeze(axis: Axis, reason: str) -> None:
    """Forbids any permutation of an axis; what is frozen already keeps its first reason."""
    for _, atom in atoms(axis):
        if atom.frozen is None:
            atom.frozen = reason


def unite(a: Axis, b: Axis, reason: str) -> None:
    """Makes two axes of one size move together; freezes both, for `reason`, where their parts do not fit."""
    a, b = find(a), find(b)
    if a is b:
        return
    if a.parts and not b.parts:
        a, b = b, a
    if not a.parts:
        if a.frozen is not None:
            freeze(b, a.frozen)
            b.frozen = b.frozen and a.frozen  # of two reasons the first
        a.parent = b
        return
    parts_b = flat_parts(b, b.kind)
    split = split_product if b.kind == "blocks" else split_segments
    parts_a = split(a, [part.size for part in parts_b], reason)
    if parts_a is None:
        freeze(a, reason)
        freeze(b, reason)
        return
    for part_a, part_b in zip(parts_a, parts_b, strict=True):
        unite(part_a, part_b, reason)
    a.parent = b


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
        axis.kind, axis.parts = "blocks", (Axis(outer, axis.frozen), Axis(inner, axis.frozen))
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
        axis.kind, axis.parts = "segments", tuple(Axis(size, axis.frozen) for size in sizes)
    queue = flat_parts(axis, "segments")
    segments = []
    for size in sizes:
        taken: list[Axis] = []
        missing = size
        while missing:
            head = find(queue.pop(0))
            if head.kind == "segments":  # split since it was queued
                queue[:0] = flat_parts(head, "segments")
                continue
            if head.size > missing:
                pair = split_segments(head, [missing, head.size - missing], reason)
                if pair is None:
                    return None
                head = pair[0]
                queue.insert(0, pair[1])
            taken.append(head)
            missing -= head.size
        segments.append(concatenation(taken))
    return segments
