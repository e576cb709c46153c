"""Along which axes an array may have equal entries, of which `argmax`, `top_k` and `argsort` take the first.

Of floats that are computed from parameters none are equal, but for those that are so by construction: whole numbers,
copies, and what is constant in some rows because these were put beside others.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.lax import GatherScatterMode

from mcomb.symmetry.interpreter import Counts, Discrete, Known, Positions, equal_axes
from mcomb.symmetry.rules.common import ELEMENTWISE, other_axes, shape_of

Along = Sequence[frozenset[int]]
"""For each operand of an equation, the axes along which it may have equal entries."""


def equal_along(eqn: core.JaxprEqn, operands: Sequence[Any]) -> frozenset[int] | None:
    """The axes along which an equation's results may have equal entries; None if it is not known where they go."""
    name = eqn.primitive.name
    along = [_of_operand(*pair) for pair in zip(eqn.invars, operands, strict=True)]
    everywhere = [len(axes) == len(shape_of(atom)) for axes, atom in zip(along, eqn.invars, strict=True)]
    rank = len(shape_of(eqn.outvars[0])) if eqn.outvars else 0
    rounded = name in ROUNDINGS or (name == "reduce_precision" and eqn.params["mantissa_bits"] < FEW_BITS)
    if rounded or all(everywhere) or any(0 in shape_of(atom) for atom in eqn.invars):
        return frozenset(range(rank))
    if name in ELEMENTWISE and name != "select_n":  # where all operands have them
        return frozenset(i for i in range(rank) if all(e or i in a for a, e in zip(along, everywhere, strict=True)))
    if name in WHERE_THEY_GO:
        return frozenset(i for i in WHERE_THEY_GO[name](eqn, operands, along) if i < rank)
    return None


def _of_operand(atom: Any, operand: Any) -> frozenset[int]:
    """The axes along which an operand may have equal entries: all of whole numbers and of constants."""
    dtype = getattr(atom.aval, "dtype", np.dtype(int))
    if isinstance(operand, Known | Counts) or not jnp.issubdtype(dtype, np.inexact) or dtype.itemsize == 1:
        return frozenset(range(len(shape_of(atom))))
    return equal_axes(operand) if isinstance(operand, tuple) else frozenset()


def _select(eqn: core.JaxprEqn, operands: Sequence[Any], along: Along) -> Iterable[int]:
    """Where any case has them. One that is constant does not count, or else nothing could be masked."""
    pairs = zip(operands[1:], along[1:], strict=True)
    return [i for case, axes in pairs for i in axes if isinstance(case, Discrete) and case[i] is not None]


def _concatenate(eqn: core.JaxprEqn, operands: Sequence[Any], along: Along) -> Iterable[int]:
    """Where any operand has them, or is constant; along the axis itself such is a segment of its own."""
    joined, pairs = eqn.params["dimension"], zip(operands, along, strict=True)
    return [i for operand, axes in pairs for i in axes if i != joined or operand[i] is not None]


def _stack(eqn: core.JaxprEqn, operands: Sequence[Any], along: Along) -> Iterable[int]:
    return [i + (i >= eqn.params["axis"]) for axes in along for i in axes]


def _pad(eqn: core.JaxprEqn, operands: Sequence[Any], along: Along) -> Iterable[int]:
    """What is beside an axis that is padded is constant there; along the axis itself it is a segment."""
    padded = [axis for axis, config in enumerate(eqn.params["padding_config"]) if any(config)]
    beside = {axis for axis in range(len(operands[0])) if any(other != axis for other in padded)}
    return beside.union(axis for axis in along[0] if operands[0][axis] is not None)


def _update_slice(eqn: core.JaxprEqn, operands: Sequence[Any], along: Along) -> Iterable[int]:
    """As for a concatenation."""
    sizes = [shape_of(atom) for atom in eqn.invars[:2]]
    whole = {axis for axis, (size, updated) in enumerate(zip(*sizes, strict=True)) if size == updated}
    pairs = [*zip(operands, along, strict=True)][:2]
    return [i for operand, axes in pairs for i in axes if i in whole or operand[i] is not None]


def _scatter(eqn: core.JaxprEqn, operands: Sequence[Any], along: Along) -> Iterable[int]:
    """Where the array has them that is written to; and where updates have them, unless they are added to it.

    Those that are constant do not count where single entries are written, or else nothing could be masked.
    """
    dims = eqn.params["dimension_numbers"]
    kept = other_axes(len(shape_of(eqn.invars[0])), [*dims.inserted_window_dims, *dims.operand_batching_dims])
    windows = zip(kept, dims.update_window_dims, strict=True)
    sizes, update_sizes = (shape_of(eqn.invars[i]) for i in (0, 2))
    found = [axis for axis, i in windows if i in along[2] and sizes[axis] == update_sizes[i]]
    updates = operands[2]
    if any(i not in dims.update_window_dims and updates[i] is not None for i in along[2]):
        found += [*dims.inserted_window_dims, *dims.operand_batching_dims]
    return along[0].union([] if eqn.primitive.name in ("scatter-add", "scatter-sub") else found)


def _gather(eqn: core.JaxprEqn, operands: Sequence[Any], along: Along) -> Iterable[int]:
    """Where the array has them, and where several indices may be the same; and in rows that are not there."""
    dims = eqn.params["dimension_numbers"]
    if eqn.params["mode"] == GatherScatterMode.FILL_OR_DROP and not _in_bounds(eqn, operands[1]):
        along = [frozenset(range(len(shape_of(eqn.invars[0])))), along[1]]
    kept = other_axes(len(shape_of(eqn.invars[0])), [*dims.collapsed_slice_dims, *dims.operand_batching_dims])
    of_index = other_axes(len(shape_of(eqn.outvars[0])), dims.offset_dims)
    of_batch = dict(zip(dims.start_indices_batching_dims, dims.operand_batching_dims, strict=True))
    copies = [i for axis, i in enumerate(of_index) if axis not in of_batch or of_batch[axis] in along[0]]
    return [*copies, *(i for i, axis in zip(dims.offset_dims, kept, strict=True) if axis in along[0])]


def _in_bounds(eqn: core.JaxprEqn, indices: Any) -> bool:
    """Whether there is an entry at all indices that are looked up."""
    if not isinstance(indices, Known):
        return isinstance(indices, Positions)
    shape, sizes = shape_of(eqn.invars[0]), eqn.params["slice_sizes"]
    last = [shape[axis] - sizes[axis] for axis in eqn.params["dimension_numbers"].start_index_map]
    return bool(((indices.value >= 0) & (indices.value <= np.array(last))).all())


def _dot(eqn: core.JaxprEqn, operands: Sequence[Any], along: Along) -> Iterable[int]:
    """Along a batch where both sides have them, and along other axes where their side does.

    And where the other side is a constant with a row of zeros.
    """
    contracted, batch = eqn.params["dimension_numbers"]
    for side, operand in enumerate(operands):
        if isinstance(operand, Known) and not operand.value.any(tuple(contracted[side])).all():
            along = [axes if i == side else frozenset(range(len(operands[i]))) for i, axes in enumerate(along)]
    found = [i for i, pair in enumerate(zip(*batch, strict=True)) if all(map(frozenset.__contains__, along, pair))]
    start = len(batch[0])
    for side in (0, 1):
        kept = other_axes(len(shape_of(eqn.invars[side])), [*contracted[side], *batch[side]])
        found += [start + i for i, axis in enumerate(kept) if axis in along[side]]
        start += len(kept)
    return found


def _convolution(eqn: core.JaxprEqn, operands: Sequence[Any], along: Along) -> Iterable[int]:
    """Along images and filters that have them; in windows of padding alone, anywhere."""
    p, dims = eqn.params, eqn.params["dimension_numbers"]
    (batch, channels), filters = dims.lhs_spec[:2], dims.rhs_spec[0]
    sizes = [shape_of(eqn.invars[1])[axis] for axis in dims.rhs_spec[2:]]
    grouped = channels in along[0] and p["feature_group_count"] > 1
    if grouped or _is_empty(sizes, p["rhs_dilation"], p["lhs_dilation"], p["padding"]):
        return range(len(shape_of(eqn.outvars[0])))
    where = zip(dims.out_spec, (batch in along[0], filters in along[1]), strict=False)
    return [axis for axis, found in where if found]


def _pool(eqn: core.JaxprEqn, operands: Sequence[Any], along: Along) -> Iterable[int]:
    """Where the operand has them; in windows of padding alone, anywhere."""
    p = eqn.params
    windows = (p[name] for name in ("window_dimensions", "window_dilation", "base_dilation", "padding"))
    return range(len(shape_of(eqn.outvars[0]))) if _is_empty(*windows) else along[0]


def _is_empty(
    sizes: Sequence[int], dilations: Sequence[int], gaps: Sequence[int], paddings: Sequence[tuple[int, int]]
) -> bool:
    """Whether windows of these sizes may have nothing but padding or gaps in them."""
    for size, step, gap, padding in zip(sizes, dilations, gaps, paddings, strict=True):
        outside = max(gap - 1, *padding)
        if outside > (size - 1) * step or (step > 1 and outside > 0):
            return True
    return False


def _ragged(eqn: core.JaxprEqn, operands: Sequence[Any], along: Along) -> Iterable[int]:
    """Along rows that have them; anywhere, unless each row is known to be in a group: if it is in none it is zero."""
    columns = len(shape_of(eqn.invars[1])) - 1
    some = [0, 1] if columns in along[1] else [0]
    return some if isinstance(operands[2], Counts) else range(len(shape_of(eqn.outvars[0])))


def _without(key: str) -> Callable[..., Iterable[int]]:
    """The same axes, of which some are dropped."""

    def where(eqn: core.JaxprEqn, operands: Sequence[Any], along: Along) -> Iterable[int]:
        kept = other_axes(len(shape_of(eqn.invars[0])), eqn.params[key])
        return [i for i, axis in enumerate(kept) if axis in along[0]]

    return where


def _transpose(eqn: core.JaxprEqn, operands: Sequence[Any], along: Along) -> Iterable[int]:
    return [i for i, axis in enumerate(eqn.params["permutation"]) if axis in along[0]]


def _broadcast(eqn: core.JaxprEqn, operands: Sequence[Any], along: Along) -> Iterable[int]:
    kept = eqn.params["broadcast_dimensions"]
    new = other_axes(len(shape_of(eqn.outvars[0])), kept)
    return [*new, *(i for axis, i in enumerate(kept) if axis in along[0])]


def _reshape(eqn: core.JaxprEqn, operands: Sequence[Any], along: Along) -> Iterable[int]:
    """Anywhere, if there are any at all: axes of one entry have none, nor has what is constant along a factor."""
    found = [axis for axis in along[0] if operands[0][axis] is not None]
    return range(len(shape_of(eqn.outvars[0]))) if found else ()


def _anywhere(eqn: core.JaxprEqn, operands: Sequence[Any], along: Along) -> Iterable[int]:
    return frozenset().union(*along)


def _the_same(eqn: core.JaxprEqn, operands: Sequence[Any], along: Along) -> Iterable[int]:
    return along[0]


ROUNDINGS = {"ceil", "floor", "round", "sign"}  # of floats, whose results are whole numbers
FEW_BITS = 7  # of a mantissa: fewer are taken for few numbers

WHERE_THEY_GO: dict[str, Callable[..., Iterable[int]]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "conv_general_dilated": _convolution,
    "dot_general": _dot,
    "dynamic_update_slice": _update_slice,
    "gather": _gather,
    "pad": _pad,
    "ragged_dot_general": _ragged,
    "reshape": _reshape,
    "select_n": _select,
    "squeeze": _without("dimensions"),
    "stack": _stack,
    "transpose": _transpose,
    **dict.fromkeys(("sort", "top_k"), _anywhere),
    **dict.fromkeys(("reduce_window_max", "reduce_window_min", "reduce_window_sum"), _pool),
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"), _without("axes")),
    **dict.fromkeys(("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"), _scatter),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "dynamic_slice", "rev", "slice", "split"), _the_same),
}
"""The axes of the result along which an operation may have equal entries, from those of its operands."""
