"""Derive the permutation symmetries of any function that JAX can trace, from its jaxpr.

Every axis of every parameter gets an identity (`axes`). A rule for each primitive (`rules`) propagates axes from
operands to results, and unites axes that must move together. Axes of inputs, outputs and constants are frozen. A
primitive without a rule freezes all axes that it touches. Each axis that is free at the end is a symmetry.

A permutation can be batched over another axis if every array with the permuted axis also has the other axis. For
example, each head has its own order of dimensions. `_batch_axes` checks this condition.
"""

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from mcomb.errors import UserError, brief
from mcomb.symmetry.axes import Axis, atoms, cells, find, flat_parts, freeze, groups_of, merge_cells, write_cells
from mcomb.symmetry.constraints import LabelledAxes, new_axes
from mcomb.symmetry.facts import ArrayAxes, ArrayFacts
from mcomb.symmetry.interpreter import Interpreter
from mcomb.symmetry.matrix_groups import SymmetrySpec
from mcomb.symmetry.null_space import extend_spec
from mcomb.symmetry.spec import Blocks, Frozen, Layout, PermutationSpec, Segments, require_spec
from mcomb.trees import Apply, Inputs, Params, leaf_name, named_leaves, output_shapes

GROUPS = ("permutations", "all")
BY_NUMBER = "entries that are read one by one"

BatchAxes = dict[Axis, set[Axis]]
"""For each axis, the batch axes of its permutation."""


def derive_spec(apply: Apply, params: Params, inputs: Inputs, *, groups: str = "permutations") -> PermutationSpec:
    """Derive the symmetries of hidden units that leave `apply(params, inputs)` unchanged.

    mcomb reads the permutations from the function's jaxpr. Only shapes and dtypes matter, so arguments may be
    `jax.ShapeDtypeStruct`s. Each permutation is named after the first module that it acts on.

    With `groups="all"`, mcomb also evaluates the function near the given parameters, and finds the largest group that
    replaces each permutation: signs, scales, rotations or invertible matrices.

    Args:
        apply: A function that JAX can trace: Linen, NNX, Equinox, Haiku or plain JAX.
        params: Parameters: a tree of arrays.
        inputs: Example inputs: an array or a tree of arrays.
        groups: "permutations" or "all".

    Returns:
        The spec, a `SymmetrySpec` for `groups="all"`. `print(spec)` lists the axes and the number of arrangements of
        each permutation, or its group, and the operations that froze the remaining axes.

    Raises:
        UserError: JAX cannot trace the function with these arguments, or cannot evaluate and differentiate it.

    Examples:
        >>> print(mcomb.derive_spec(apply, a, x))
        permutation  size  arrangements  acts on
        up           128   10^216        bias[0] down[0] up[1]
        <BLANKLINE>
        frozen by   axes
        the output  down[1]
        input 0     up[0]
    """
    spec = derive_from(apply, params, inputs)
    if groups not in GROUPS:
        raise UserError(f"Unknown groups {brief(groups)}: choose from {', '.join(GROUPS)}.")
    return extend_spec(spec, apply, params, inputs) if groups == "all" else spec


def given_or_derived(
    spec: PermutationSpec | None, apply: Apply, params: Params, inputs: Inputs, groups: str
) -> PermutationSpec:
    """Return the spec, or derive it if it is None; raise an error if `groups` requires more than the spec has."""
    if spec is None:
        return derive_spec(apply, params, inputs, groups=groups)
    require_spec(spec)
    if groups == "all" and not isinstance(spec, SymmetrySpec):
        raise UserError('groups="all" does not apply to a spec of permutations: drop groups or spec.')
    return spec


def derive_from(function: Callable[..., Any], params: Params, *inputs: Any) -> PermutationSpec:
    """Derive the spec of a function of parameters and any number of inputs."""
    named_leaves(params)
    output_shapes(function, params, *inputs)
    return spec_of_trace(jax.make_jaxpr(function)(params, *inputs), params, *inputs)


def infer_axes(traced: core.ClosedJaxpr, params: Params, *inputs: Any) -> tuple[Mapping[str, ArrayAxes], Interpreter]:
    """Interpret a traced function, and return the axes of each parameter and the interpreter."""
    interp = Interpreter()
    leaves = {name: new_axes(np.shape(leaf)) for name, leaf in named_leaves(params).items()}
    weights = [
        ArrayFacts(axes, frozenset(range(len(axes)))) for axes in leaves.values()
    ]  # floats: see `rules.distinct`
    paths = jax.tree_util.tree_flatten_with_path(inputs)[0]
    input_axes = [new_axes(np.shape(leaf), f"input {leaf_name(path)}") for path, leaf in paths]
    results = interp.interpret_plain(traced.jaxpr, traced.consts, [*weights, *map(ArrayFacts, input_axes)])
    interp.reason = "the output"
    interp.freeze(itertools.chain.from_iterable(results))
    _merge_loose_cells(interp.operations, itertools.chain.from_iterable(leaves.values()))
    interp.break_up_groupings(atom for axes in leaves.values() for axis in axes if axis for atom in atoms(axis))
    interp.hide_sorted_rows()
    used = _atoms_in_use(interp.operations)
    for atom in (atom for axes in leaves.values() for axis in axes if axis is not None for atom in atoms(axis)):
        if atom not in used:
            freeze(atom, BY_NUMBER if atom.size == 1 else "no use: the function does without it")
    return leaves, interp


def _merge_loose_cells(operations: Sequence[Sequence[LabelledAxes]], leaf_axes: Iterable[Axis | None]) -> None:
    """Unite the cells of all groups if an array has the cells without the groups.

    A product of groups and their cells can be written as segments, which any parameter may have. Cells without their
    groups have no layout. Cells that all have the same identity are replaced by that axis.
    """
    of_leaves = [axis for axis in leaf_axes if axis is not None]
    every_axis = [axis for arrays in operations for array in arrays for _, axis in array]
    cells_in_use = {axis for axis in _parts([*of_leaves, *every_axis]) if axis.kind == "cells"}
    while cells_in_use:
        segments = [axis for axis in _parts([*every_axis]) if axis.kind == "segments"]
        loose = {axis for axis in _parts([*of_leaves, *segments]) if axis.kind == "cells"}
        loose |= {axis for axis in cells_in_use if len({find(part) for part in axis.parts}) == 1}
        for arrays in operations:
            groups: dict[Hashable, list[Hashable]] = {}
            for factors in ([(i, find(axis)) for i, axis in _factors(array, write_cells)] for array in arrays):
                for index, inner in factors:
                    if inner.kind == "cells":
                        found = [other for other, outer in factors if outer is groups_of(inner)]
                        if len(found) != 1 or groups.setdefault(index, found) != found:
                            loose.add(inner)
        if not loose:
            return
        for axis in loose:
            merge_cells(axis, "reshape")
        cells_in_use = {axis for axis in _parts([*of_leaves, *every_axis]) if axis.kind == "cells"}


def _factors(array: LabelledAxes, write: Callable[[list[Axis]], list[Axis]] = list) -> list[tuple[Hashable, Axis]]:
    """Return the factors of an array's axes, optionally rewritten by `write`, each with its label and stride."""
    found: list[tuple[Hashable, Axis]] = []
    for label, axis in array:
        stride = 1
        for factor in reversed(write(flat_parts(axis, "blocks"))):
            found.append(((label, stride), factor))
            stride *= factor.size
    return found


def _parts(todo: list[Axis]) -> set[Axis]:
    """Return the axes and all their parts, with products of groups and cells written as segments."""
    seen: set[Axis] = set()
    while todo:
        axis = find(todo.pop())
        if axis not in seen:
            seen.add(axis)
            todo += write_cells(flat_parts(axis, "blocks")) if axis.kind == "blocks" else axis.parts
    return seen


def _atoms_in_use(operations: Iterable[Iterable[LabelledAxes]]) -> set[Axis]:
    """Return all atoms in the operations, after replacing concatenations of fixed entries by frozen atoms."""
    seen: set[Axis] = set()
    todo = [axis for arrays in operations for array in arrays for _, axis in array]
    while todo:
        axis = find(todo.pop())
        if axis in seen:
            continue
        seen.add(axis)
        parts = [find(part) for part in axis.parts]
        if axis.kind == "segments" and all(not part.parts and (part.size == 1 or part.frozen) for part in parts):
            reason = next((part.frozen for part in parts if part.frozen), BY_NUMBER)
            axis.kind, axis.parts, axis.frozen = "", [], reason
        todo += axis.parts
    return {axis for axis in seen if not axis.parts}


def spec_of_trace(traced: core.ClosedJaxpr, params: Params, *inputs: Any) -> PermutationSpec:
    """Derive the spec of a function that was traced with these arguments."""
    leaves, interp = infer_axes(traced, params, *inputs)
    first = _first_places(leaves, interp.first_use)
    order = {atom: i for i, atom in enumerate(first)}
    candidates = _batch_axes(interp.operations)
    free = [atom for atom in first if atom.frozen is None and atom.size > 1]
    batch_axes = {atom: candidates.get(atom, set()) & first.keys() for atom in free}
    while True:
        batch_axes = _ordered(batch_axes, order)
        spec, atom_of = _write_spec(leaves, first, batch_axes)
        # A leaf may have a batch axis twice, once inside a segment of another axis, which would be ambiguous.
        unclear = {pair for name in leaves for pair, _ in spec.unclear_batch_axes(name)}
        if not unclear:
            return spec
        for name, outer in unclear:
            batch_axes[atom_of[name]].discard(atom_of[outer])


def _first_places(leaves: Mapping[str, ArrayAxes], first_use: Mapping[Axis, int]) -> dict[Axis, tuple[str, int]]:
    """Return the leaf and the axis where each atom is used first, in the order of use."""

    def use(axes: ArrayAxes) -> int:
        never = len(first_use)
        return min((first_use.get(axis, never) for axis in axes if axis is not None), default=never)

    places: dict[Axis, tuple[str, int]] = {}
    for name, axes in sorted(leaves.items(), key=lambda leaf: use(leaf[1])):
        for i, axis in enumerate(axes):
            for atom in atoms(axis) if axis is not None else ():
                places.setdefault(atom, (name, i))
    return places


def _write_spec(
    leaves: Mapping[str, ArrayAxes], first: Mapping[Axis, tuple[str, int]], batch_axes: BatchAxes
) -> tuple[PermutationSpec, dict[str, Axis]]:
    """Return the spec in which the atoms of `batch_axes` are free, and the atom of each of its names."""
    order = {atom: i for i, atom in enumerate(first)}
    outer = set().union(*batch_axes.values())
    fixed = [atom for atom in first if atom in outer and atom not in batch_axes]
    stems = {atom: _module(first[atom][0]) for atom in batch_axes}
    names = _distinct(stems | {atom: "{}[{}]".format(*first[atom]) for atom in fixed})
    batched_over = {
        names[atom]: tuple(
            names[other] for other in sorted(others, key=lambda o: (len(batch_axes.get(o, ())), order[o]))
        )
        for atom, others in batch_axes.items()
        if others
    }
    all_axes = [(name, i, axis) for name, axes in leaves.items() for i, axis in enumerate(axes) if axis is not None]
    spec = PermutationSpec(
        axes={name: tuple(axis_layout(axis, names) for axis in axes) for name, axes in leaves.items()},
        sizes={names[atom]: atom.size for atom in batch_axes},
        batched_over=batched_over,
        fixed={names[atom]: atom.size for atom in fixed},
        frozen=tuple(
            Frozen(name, i, reasons[0])
            for name, i, axis in all_axes
            if (reasons := [atom.frozen for atom in atoms(axis) if atom.frozen])
        ),
    )
    return spec, {name: atom for atom, name in names.items()}


def _module(leaf: str) -> str:
    """Return the module name of a leaf, or the leaf's name; the suffix of NNX variables is dropped."""
    return leaf.removesuffix("/value").rpartition("/")[0] or leaf


def _distinct(stems: Mapping[Axis, str]) -> dict[Axis, str]:
    """Make names unique: the second name with the same stem ends in .2, and so on."""
    names: dict[Axis, str] = {}
    taken: set[str] = set()
    for atom, stem in stems.items():
        candidates = itertools.chain([stem], (f"{stem}.{i}" for i in itertools.count(2)))
        names[atom] = next(name for name in candidates if name not in taken)
        taken.add(names[atom])
    return names


def _batch_axes(operations: Sequence[Sequence[LabelledAxes]]) -> BatchAxes:
    """Return, for each free atom, the atoms that its permutation can be batched over.

    Every array with the first atom must have the second atom exactly once. If several arrays of an operation share an
    index, they must agree on the index that it is batched over:

        "qhd,khd->qhk"  # the order of d may depend on h
        "qhd,kgd->qhkg"  # it may not: for q it would depend on h, for k on g

    Composite indices are decomposed into atoms. Segments are processed one by one, each with all other indices of its
    arrays. Factors are processed together. Combinations that were seen before are skipped, so that growing
    concatenations stay cheap.
    """
    batch_axes: BatchAxes = {}
    todo = [
        _having(label, arrays)
        for arrays in operations
        for label in dict.fromkeys(label for array in arrays for label, _ in array)
    ]
    seen = set()
    while todo:
        arrays = todo.pop()
        if not arrays or (key := _key(arrays)) in seen:
            continue
        seen.add(key)
        (label, axis), *_ = arrays[0]
        axis = find(axis)
        if axis.kind == "segments":
            todo += [[[(label, part), *others] for _, *others in arrays] for part in axis.parts]
        elif axis.kind == "blocks":
            factors = [((label, i), factor) for i, factor in enumerate(axis.parts)]
            apart = [[*factors, *others] for _, *others in arrays]
            todo += [_having(factor, apart) for factor, _ in factors]
        elif axis.kind == "cells":
            for part, inside in cells(axis):
                at = {groups_of(axis): part}
                todo.append([[(label, inside), *((k, at.get(find(o), o)) for k, o in others)] for _, *others in arrays])
        elif axis.frozen is None and axis.size > 1:
            allowed = _agreed([_outer_indices(axis, others) for _, *others in arrays])
            batch_axes[axis] = batch_axes.get(axis, allowed) & allowed
    return batch_axes


def _having(label: Hashable, arrays: Iterable[LabelledAxes]) -> list[LabelledAxes]:
    """Return the arrays that have an index, with that index moved to the front."""
    having = (sorted(array, key=lambda entry: entry[0] != label) for array in arrays)
    return [array for array in having if array and array[0][0] == label]


def _key(arrays: list[LabelledAxes]) -> Hashable:
    """Return a label-independent key for deduplication."""
    numbers: dict[Hashable, int] = {}
    return tuple(
        tuple((numbers.setdefault(label, len(numbers)), id(find(axis))) for label, axis in array) for array in arrays
    )


def _outer_indices(axis: Axis, others: LabelledAxes) -> dict[Axis, list[Hashable]]:
    """Return the indices of each atom that is a whole factor of another axis, and not just part of a segment."""
    indices: dict[Axis, list[Hashable]] = {}
    for index, factor in _factors(others):
        if not factor.parts and factor.size > 1 and factor is not axis:
            indices.setdefault(factor, []).append(index)
    return indices


def _agreed(arrays: list[dict[Axis, list[Hashable]]]) -> set[Axis]:
    """Return the atoms that have exactly one index, the same in all arrays."""
    first, *rest = arrays
    return {
        atom
        for atom, indices in first.items()
        if len(indices) == 1 and all(array.get(atom) == indices for array in rest)
    }


def _ordered(batch_axes: BatchAxes, order: Mapping[Axis, int]) -> BatchAxes:
    """Remove cycles and make the relation transitive: d over h is also over every batch axis of h."""
    changed = True
    while changed:
        changed = False
        for atom, others in batch_axes.items():
            for other in sorted(others, key=order.__getitem__):
                outer = batch_axes.get(other, set())
                mutual = atom in outer and order[atom] < order[other]
                if mutual or not outer - {atom} <= others:
                    others.remove(other)
                    changed = True
    return batch_axes


def axis_layout(axis: Axis | None, names: Mapping[Axis, str]) -> Layout:
    """Return the layout of an axis, given the names of the named axes."""
    layout = None if axis is None else _part_layout(axis, names)
    return None if isinstance(layout, int) else layout


def _part_layout(axis: Axis, names: Mapping[Axis, str]) -> str | int | Blocks | Segments:
    axis = find(axis)
    if not axis.parts or axis in names:
        return names.get(axis, axis.size)
    merged: list[Any] = []
    parts = flat_parts(axis, axis.kind, names.keys())
    if axis.kind == "blocks":
        parts = write_cells(parts)
    if len(parts) == 1:
        return _part_layout(parts[0], names)
    for part in parts:
        layout = _part_layout(part, names)
        if merged and isinstance(layout, int) and isinstance(merged[-1], int):
            merged[-1] = merged[-1] * layout if axis.kind == "blocks" else merged[-1] + layout
        elif axis.kind == "blocks" and isinstance(layout, Blocks):
            merged += layout.factors
        elif axis.kind == "segments" and isinstance(layout, Segments):
            merged += layout.parts
        else:
            merged.append(layout)
    if len(merged) == 1:
        return merged[0]
    return Blocks(tuple(merged)) if axis.kind == "blocks" else Segments(tuple(merged))
