"""Identities of axes: which positions of which arrays move together, refined and united as a model is read.

An axis is one identity, free or frozen; or it has turned out to be the row-major product of others (a reshape), or
others in a row (a concatenation). Uniting two axes refines both as far as needed, and freezes what does not fit
together: every step only takes freedom away, so a step too many is never wrong.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Path = tuple[tuple[str, int], ...]


@dataclass(eq=False)
class Axis:
    """The identity of an axis. Only the functions of this module change it."""

    size: int
    frozen: str | None = None  # by what, if it has no parts
    kind: Literal["", "product", "row"] = ""
    parts: tuple["Axis", ...] = ()
    same: "Axis | None" = None  # the axis that this one turned out to be


def find(axis: Axis) -> Axis:
    """The one axis that stands for all those united with this one."""
    while axis.same is not None:
        axis.same = axis.same.same or axis.same  # shortens the way for the next
        axis = axis.same
    return axis


def product(axes: Sequence[Axis]) -> Axis:
    """The axis whose positions are the row-major product of these."""
    axes = [axis for axis in axes if axis.size > 1]
    if len(axes) < 2:
        return axes[0] if axes else Axis(1)
    return Axis(math.prod(axis.size for axis in axes), kind="product", parts=tuple(axes))


def row(axes: Sequence[Axis]) -> Axis:
    """The axis in which these follow one another."""
    return axes[0] if len(axes) == 1 else Axis(sum(axis.size for axis in axes), kind="row", parts=tuple(axes))


def parts(axis: Axis, kind: str) -> list[Axis]:
    """The axes of which this one is the product, or that follow one another in it; itself if none."""
    axis = find(axis)
    return [inner for part in axis.parts for inner in parts(part, kind)] if axis.kind == kind else [axis]


def letters(axis: Axis, path: Path = ()) -> Iterator[tuple[Path, Axis]]:
    """The axes without parts that make up an axis, each with the steps that lead to it."""
    axis = find(axis)
    if not axis.parts:
        yield path, axis
    for number, part in enumerate(axis.parts):
        yield from letters(part, (*path, (axis.kind, number)))


def freeze(axis: Axis, why: str) -> None:
    """Forbids an axis to move."""
    for _, letter in letters(axis):
        if letter.frozen is None:
            letter.frozen = why


def unite(a: Axis, b: Axis, why: str) -> None:
    """Makes two axes of one size move together; freezes both, for `why`, where they do not fit together."""
    a, b = find(a), find(b)
    if a is b:
        return
    if a.parts and not b.parts:
        a, b = b, a
    if not a.parts:
        if a.frozen is not None:
            freeze(b, a.frozen)
            b.frozen = b.frozen and a.frozen  # of two reasons the first
        a.same = b
        return
    others = parts(b, b.kind)
    divide = factored if b.kind == "product" else cut
    mine = divide(a, [other.size for other in others], why)
    if mine is None:
        freeze(a, why)
        freeze(b, why)
        return
    for part, other in zip(mine, others, strict=True):
        unite(part, other, why)
    a.same = b


def factored(axis: Axis, sizes: Sequence[int], why: str) -> list[Axis] | None:
    """The axes of these sizes whose row-major product an axis is; None if it cannot be."""
    queue = parts(axis, "product")
    found = []
    for size in sizes:
        taken: list[Axis] = []
        missing = size
        while missing > 1:
            head = find(queue.pop(0))
            if head.kind == "product":  # since refined
                queue[:0] = parts(head, "product")
                continue
            if missing % head.size:
                halves = _halved(head, missing, why)
                if halves is None:
                    return None
                head = halves[0]
                queue.insert(0, halves[1])
            taken.append(head)
            missing //= head.size
        found.append(product(taken))
    return found


def _halved(axis: Axis, outer: int, why: str) -> tuple[Axis, Axis] | None:
    """The two axes whose product an axis is, the first of size `outer`; None if it cannot be."""
    if axis.size % outer:
        return None
    inner = axis.size // outer
    if axis.kind == "":
        axis.kind, axis.parts = "product", (Axis(outer, axis.frozen), Axis(inner, axis.frozen))
        return axis.parts[0], axis.parts[1]
    # Blocks in a row are a product if all are made of the same inner units.
    halves = []
    for segment in parts(axis, "row"):
        pair = None if segment.size % inner else factored(segment, [segment.size // inner, inner], why)
        if pair is None:
            return None
        halves.append(pair)
    for _, other in halves[1:]:
        unite(halves[0][1], other, why)
    return row([first for first, _ in halves]), halves[0][1]


def cut(axis: Axis, sizes: Sequence[int], why: str) -> list[Axis] | None:
    """The axes of these sizes that follow one another in an axis; None if they cannot."""
    axis = find(axis)
    if len(sizes) == 1:
        return [axis]
    if axis.kind == "product":
        first, *rest = parts(axis, "product")
        inner = axis.size // first.size
        if any(size % inner for size in sizes):
            return None
        outer = cut(first, [size // inner for size in sizes], why)
        return None if outer is None else [product([part, *rest]) for part in outer]
    if not axis.parts:
        axis.kind, axis.parts = "row", tuple(Axis(size, axis.frozen) for size in sizes)
    queue = parts(axis, "row")
    found = []
    for size in sizes:
        taken: list[Axis] = []
        missing = size
        while missing:
            head = find(queue.pop(0))
            if head.kind == "row":  # since refined
                queue[:0] = parts(head, "row")
                continue
            if head.size > missing:
                halves = cut(head, [missing, head.size - missing], why)
                if halves is None:
                    return None
                head = halves[0]
                queue.insert(0, halves[1])
            taken.append(head)
            missing -= head.size
        found.append(row(taken))
    return found
