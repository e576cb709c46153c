"""Places: the axes of parts of leaves that belong to a permutation's units."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from mcomb.symmetry.spec import Blocks, Layout, PermutationSpec, Segments, axis_names


class Place(NamedTuple):
    """An axis of a part of a leaf; `PermutationSpec.simple_parts` lists the parts."""

    leaf: str
    part: int
    axis: int


def places_of(spec: PermutationSpec, name: str) -> dict[Place, tuple[Layout, ...]]:
    """Return the places of a permutation, each with the labels of its part."""
    return {
        Place(leaf, index, axis): labels
        for leaf, layouts in spec.axes.items()
        if any(name in axis_names(layout) for layout in layouts)
        for index, (labels, _) in enumerate(spec.simple_parts(layouts, None))
        for axis, label in enumerate(labels)
        if label == name
    }


def part_at(spec: PermutationSpec, place: Place, leaf: Any) -> Any:
    """Return the part of a leaf at a place."""
    return labelled_part_at(spec, place, leaf)[1]


def labelled_part_at(spec: PermutationSpec, place: Place, leaf: Any) -> tuple[tuple[Layout, ...], Any]:
    """Return the labels of the part at a place, and the part."""
    return next(itertools.islice(spec.simple_parts(spec.axes[place.leaf], leaf), place.part, None))


def unit_axes(spec: PermutationSpec, labels: tuple[Layout, ...], axis: int) -> list[int]:
    """Return the axes of a part that index the units on `axis`: those of its batch axes, then `axis` itself."""
    return [*map(labels.index, spec.batched_over.get(str(labels[axis]), ())), axis]


def unit_rows(spec: PermutationSpec, place: Place, leaf: Any) -> Float[np.ndarray, "batch n weights"]:
    """Return the part at a place with a row for each unit, and the batch axes of its permutation merged."""
    labels, part = labelled_part_at(spec, place, np.asarray(leaf))
    front = unit_axes(spec, labels, place.axis)
    first = np.moveaxis(part, front, range(len(front)))
    return first.reshape(-1, first.shape[len(front) - 1], int(np.prod(first.shape[len(front) :])))


def map_parts(spec: PermutationSpec, layouts: tuple[Layout, ...], value: Any, change: Callable[..., Any]) -> Any:
    """Return an array with `change(index, labels, part)` in place of each of its parts."""
    xp: Any = np if isinstance(value, np.ndarray) else jnp
    count = itertools.count()

    def visit(layouts: tuple[Layout, ...], value: Any) -> Any:
        for axis, layout in enumerate(layouts):
            before, after = layouts[:axis], layouts[axis + 1 :]
            if isinstance(layout, Blocks):
                lengths = tuple(spec.length(factor) for factor in layout.factors)
                apart = value.reshape(value.shape[:axis] + lengths + value.shape[axis + 1 :])
                return visit(before + layout.factors + after, apart).reshape(value.shape)
            if isinstance(layout, Segments):
                ends = np.cumsum([spec.length(part) for part in layout.parts])[:-1]
                segments = zip(layout.parts, xp.split(value, ends, axis), strict=True)
                return xp.concatenate([visit((*before, part, *after), own) for part, own in segments], axis)
        return change(next(count), layouts, value)

    return visit(layouts, value)
