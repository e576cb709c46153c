"""The permutation symmetries of any function that JAX can trace, read off its jaxpr.

Every axis of every parameter gets an identity (`axes`). A rule for each primitive (`primitives`) carries the
identities of its operands' axes to its results and unites those that must move together. The axes of inputs,
outputs and constants are frozen, and so is whatever meets a primitive without a rule. What is free at the end is a
symmetry.

A permutation may differ along another axis, as that of the dimensions inside a head may from head to head, if
wherever the one goes, the other goes with it: `_families` checks that.
"""

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from mcomb.axes import Axis, Path, find, letters
from mcomb.base import Params, leaf_name, named_leaves
from mcomb.permute import Blocks, Frozen, Layout, PermutationSpec, Segments
from mcomb.primitives import RULES, unknown
from mcomb.reader import Reader, Term, Value

Along = dict[Axis, set[Axis]]
"""For each axis, the axes that its permutation differs along."""


def permutation_spec(fn: Callable[..., Any], params: Params, *inputs: Any) -> PermutationSpec:
    """All permutations of hidden units that leave `fn(params, *inputs)` as it is, from arrays or their shapes.

    `print(spec)` shows what each permutation acts on, and what is frozen by which operation. A permutation's name
    is that of the first module it acts on.
    """
    return _spec(*read(jax.make_jaxpr(fn)(params, *inputs), params, *inputs))


def read(traced: core.ClosedJaxpr, params: Params, *inputs: Any) -> tuple[dict[str, Value], Reader]:
    """The axes of each parameter, and what was noted on the way, after reading a function of these arguments."""
    reader = Reader(RULES, otherwise=unknown)
    leaves = {name: reader.fresh(np.shape(leaf)) for name, leaf in named_leaves(params).items()}
    paths = jax.tree_util.tree_flatten_with_path(inputs)[0]
    given = [reader.fresh(np.shape(leaf), f"input {leaf_name(path)}") for path, leaf in paths]
    results = reader.read(traced.jaxpr, traced.consts, [*leaves.values(), *given])
    reader.why = "the output"
    reader.freeze(itertools.chain.from_iterable(results))
    reader.why = "no use: the function does without it"
    reader.freeze(axis for value in leaves.values() for axis in value if axis not in reader.used)
    return leaves, reader


def _spec(leaves: Mapping[str, Value], reader: Reader) -> PermutationSpec:
    """The spec of the axes that are still free."""
    places = [
        (name, number, axis) for name, value in leaves.items() for number, axis in enumerate(value) if axis is not None
    ]
    first_use = {
        name: min((reader.used.get(axis, math.inf) for axis in value if axis is not None), default=math.inf)
        for name, value in leaves.items()
    }
    first: dict[Axis, tuple[str, int]] = {}
    for name, number, axis in sorted(places, key=lambda place: first_use[place[0]]):
        for _, letter in letters(axis):
            first.setdefault(letter, (name, number))
    order = {letter: i for i, letter in enumerate(first)}
    free = [letter for letter in first if letter.frozen is None and letter.size > 1]
    found = _families(reader.operations)
    along = _ordered({letter: found.get(letter, set()) & first.keys() for letter in free}, order)
    fixed = [letter for letter in first if letter not in free and any(letter in others for others in along.values())]
    stems = {letter: _module(first[letter][0]) for letter in free}
    names = _distinct(stems | {letter: "{}[{}]".format(*first[letter]) for letter in fixed})
    families = {
        letter: sorted(along[letter], key=lambda other: (len(along.get(other, ())), order[other])) for letter in free
    }
    return PermutationSpec(
        axes={name: tuple(layout_of(axis, names) for axis in value) for name, value in leaves.items()},
        sizes={names[letter]: letter.size for letter in free},
        families={names[letter]: tuple(names[o] for o in others) for letter, others in families.items() if others},
        fixed={names[letter]: letter.size for letter in fixed},
        frozen=tuple(
            Frozen(name, number, reasons[0])
            for name, number, axis in places
            if (reasons := [letter.frozen for _, letter in letters(axis) if letter.frozen])
        ),
    )


def _module(leaf: str) -> str:
    """The name of the module that has a leaf, or the leaf's own; an NNX leaf is the value of a variable."""
    return leaf.removesuffix("/value").rpartition("/")[0] or leaf


def _distinct(stems: Mapping[Axis, str]) -> dict[Axis, str]:
    """Names that are all different: of those with one stem, the second has .2 added, and so on."""
    names: dict[Axis, str] = {}
    for letter, stem in stems.items():
        candidates = itertools.chain([stem], (f"{stem}.{i}" for i in itertools.count(2)))
        names[letter] = next(name for name in candidates if name not in names.values())
    return names


def _families(operations: Sequence[Sequence[Term]]) -> Along:
    """For each free axis, the axes that its permutation may differ along.

    Wherever the one is found there must be the other, once; and an index that several arrays of an operation share
    must differ along one index in all of them.
    """
    along: Along = {}
    for terms in operations:
        agreed: dict[tuple[Any, Axis], Any] = {}
        for term in terms:
            found = [((label, path), letter) for label, axis in term for path, letter in letters(axis)]
            found = [(place, letter) for place, letter in found if letter.size > 1]
            for place, letter in found:
                if letter.frozen is not None:
                    continue
                others: dict[Axis, list[Any]] = {}
                for elsewhere, other in found:
                    if other is not letter and _reaches(elsewhere, place):
                        others.setdefault(other, []).append(elsewhere)
                once = {
                    other
                    for other, places in others.items()
                    if len(places) == 1 and agreed.setdefault((place, other), places[0]) == places[0]
                }
                along[letter] = along.get(letter, once) & once
    return along


def _reaches(place: tuple[Hashable, Path], other: tuple[Hashable, Path]) -> bool:
    """Whether an index has a value wherever another has: it is in no segment that the other is not in."""
    (label, path), (other_label, other_path) = place, other
    last = max((i for i, (kind, _) in enumerate(path, 1) if kind == "row"), default=0)
    return last == 0 or (label == other_label and path[:last] == other_path[:last])


def _ordered(along: Along, order: Mapping[Axis, int]) -> Along:
    """The same without cycles, and closed: what differs along an axis differs along all that this one does."""
    changed = True
    while changed:
        changed = False
        for letter, others in along.items():
            for other in sorted(others, key=order.__getitem__):
                theirs = along.get(other, set())
                mutual = letter in theirs and order[letter] < order[other]
                if mutual or not theirs - {letter} <= others:
                    others.remove(other)
                    changed = True
    return along


def layout_of(axis: Axis | None, names: Mapping[Axis, str]) -> Layout:
    """How an axis moves, in the spec's terms."""
    layout = None if axis is None else _part(axis, names)
    return None if isinstance(layout, int) else layout


def _part(axis: Axis, names: Mapping[Axis, str]) -> str | int | Blocks | Segments:
    axis = find(axis)
    if not axis.parts or axis in names:
        return names.get(axis, axis.size)
    merged: list[Any] = []
    for part in axis.parts:
        layout = _part(part, names)
        if merged and isinstance(layout, int) and isinstance(merged[-1], int):
            merged[-1] = merged[-1] * layout if axis.kind == "product" else merged[-1] + layout
        elif axis.kind == "product" and isinstance(layout, Blocks):
            merged += layout.factors
        elif axis.kind == "row" and isinstance(layout, Segments):
            merged += layout.parts
        else:
            merged.append(layout)
    if len(merged) == 1:
        return merged[0]
    return Blocks(tuple(merged)) if axis.kind == "product" else Segments(tuple(merged))
