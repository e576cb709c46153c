"""What each primitive does to the identities of axes: the rules by which a model is read.

Most primitives are maps, products or reductions over indices, as in an einsum: their rules give each axis of each
operand and result a label, and axes with one label are one index.
"""

import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, SupportsIndex, TypeVar

from jax.extend import core

from mcomb.axes import Axis, cut, factored, row, unite
from mcomb.reader import Folded, Labels, Reader, Rule, Value, cut_axis, fold, runs

T = TypeVar("T")


def unknown(reader: Reader, eqn: core.JaxprEqn, *operands: Value) -> list[Value]:
    """Everything frozen: the primitive could do anything with positions."""
    for operand in operands:
        reader.freeze(operand)
    reader.note((operand, [(i, axis) for axis in range(len(operand))]) for i, operand in enumerate(operands))
    return [reader.fresh(_shape(var), reader.why) for var in eqn.outvars]


def elementwise(reader: Reader, eqn: core.JaxprEqn, *operands: Value) -> list[Value]:
    """One index for each axis; scalars have none."""
    rank = len(_shape(eqn.outvars[0]))
    return reader.relate([(value, range(len(value))) for value in operands], [range(rank)] * len(eqn.outvars))


def same_shape(reader: Reader, eqn: core.JaxprEqn, operand: Value) -> list[Value]:
    """A map, unless it regroups the bytes of several entries."""
    return (unknown if _shape(eqn.invars[0]) != _shape(eqn.outvars[0]) else elementwise)(reader, eqn, operand)


def one_by_one(reader: Reader, eqn: core.JaxprEqn, *operands: Value) -> list[Value]:
    """The operands themselves."""
    return list(operands)


def reduction(reader: Reader, eqn: core.JaxprEqn, operand: Value) -> list[Value]:
    """An order-blind reduction drops its axes, free or not."""
    return reader.relate([(operand, range(len(operand)))], [_without(len(operand), eqn.params["axes"])])


def arg_reduction(reader: Reader, eqn: core.JaxprEqn, operand: Value) -> list[Value]:
    """The position it returns ties the axis."""
    reader.freeze(operand[axis] for axis in eqn.params["axes"])
    return reduction(reader, eqn, operand)


def positional(reader: Reader, eqn: core.JaxprEqn, operands: Sequence[Value], touched: Iterable[int]) -> list[Value]:
    """An operation that tells positions apart along the touched axes, and is a map over all others."""
    shape, touched = _shape(eqn.outvars[0]), set(touched)
    for operand in operands:
        reader.freeze(operand[axis] for axis in touched)

    # A touched axis shares no label with its result: nothing may differ along it.
    def labels(*mark: Hashable) -> Labels:
        return [(*mark, axis) if axis in touched else axis for axis in range(len(shape))]

    return reader.relate(
        [(operand, labels("operand", i)) for i, operand in enumerate(operands)],
        [labels("result")] * len(eqn.outvars),
        {("result", axis): Axis(shape[axis], reader.why) for axis in touched},
    )


def cumulative(reader: Reader, eqn: core.JaxprEqn, operand: Value) -> list[Value]:
    return positional(reader, eqn, [operand], [eqn.params["axis"]])


def sort(reader: Reader, eqn: core.JaxprEqn, *operands: Value) -> list[Value]:
    return positional(reader, eqn, operands, [eqn.params["dimension"]])


def reverse(reader: Reader, eqn: core.JaxprEqn, operand: Value) -> list[Value]:
    return positional(reader, eqn, [operand], eqn.params["dimensions"])


def top_k(reader: Reader, eqn: core.JaxprEqn, operand: Value) -> list[Value]:
    return positional(reader, eqn, [operand], [eqn.params.get("axis", -1) % len(operand)])


def window(reader: Reader, eqn: core.JaxprEqn, *operands: Value) -> list[Value]:
    """Pooling: a map over the axes along which its window has one entry and never skips."""
    p = eqn.params
    settings = zip(
        p["window_dimensions"],
        p["window_strides"],
        p["padding"],
        p["base_dilation"],
        p["window_dilation"],
        strict=True,
    )
    touched = [axis for axis, (*ones, pad, a, b) in enumerate(settings) if {*ones, a, b} != {1} or any(pad)]
    return positional(reader, eqn, [operand for operand in operands if operand], touched)


def dynamic_slice(reader: Reader, eqn: core.JaxprEqn, operand: Value, *starts: Value) -> list[Value]:
    return positional(reader, eqn, [operand], _unequal(eqn.invars[0], eqn.outvars[0]))


def dynamic_update_slice(
    reader: Reader, eqn: core.JaxprEqn, operand: Value, update: Value, *starts: Value
) -> list[Value]:
    return positional(reader, eqn, [operand, update], _unequal(*eqn.invars[:2]))


def broadcast(reader: Reader, eqn: core.JaxprEqn, operand: Value, *sizes: Value) -> list[Value]:
    """New axes are the same at all positions."""
    return reader.relate([(operand, eqn.params["broadcast_dimensions"])], [range(len(_shape(eqn.outvars[0])))])


def transpose(reader: Reader, eqn: core.JaxprEqn, operand: Value) -> list[Value]:
    return [tuple(operand[axis] for axis in eqn.params["permutation"])]


def squeeze(reader: Reader, eqn: core.JaxprEqn, operand: Value) -> list[Value]:
    return [tuple(operand[axis] for axis in _without(len(operand), eqn.params["dimensions"]))]


def reshape(reader: Reader, eqn: core.JaxprEqn, operand: Value, *sizes: Value) -> list[Value]:
    """Joins and splits axes, within the smallest runs of them that are of one size before and after."""
    if eqn.params["dimensions"] is not None or 0 in _shape(eqn.invars[0]):
        return unknown(reader, eqn, operand)
    return [_part(reader, fold(eqn, operand))]


def _part(reader: Reader, folded: Folded, at: int = 0, start: int = 0, size: int | None = None) -> Value:
    """A reshaped array, or the `size` positions from `start` on along axis `at` of it."""
    result: list[Axis | None] = []
    for old, new in runs(folded.before, folded.after):
        joined, sizes = reader.join(folded.source[old], folded.before[old]), list(folded.after[new])
        if size is not None and folded.order[at] == new.start:
            inner = math.prod(sizes[1:])
            joined = _cut(reader, joined, [start * inner, size * inner, (sizes[0] - start - size) * inner])[1]
            sizes[0] = size
        result += reader.split(joined, sizes, factored)
    value = tuple(result[axis] for axis in folded.order)
    reader.note([(folded.source, [("before", axis) for axis in range(len(folded.source))]), (value, range(len(value)))])
    return value


def iota(reader: Reader, eqn: core.JaxprEqn, *sizes: Value) -> list[Value]:
    shape, axis = _shape(eqn.outvars[0]), eqn.params["dimension"]
    return [tuple(Axis(size, reader.why) if i == axis else None for i, size in enumerate(shape))]


def dot_general(reader: Reader, eqn: core.JaxprEqn, left: Value, right: Value) -> list[Value]:
    summed, batch = eqn.params["dimension_numbers"]
    labels = []
    for side, value in enumerate((left, right)):
        shared: dict[int, tuple[str | int, int]] = {axis: ("sum", i) for i, axis in enumerate(summed[side])}
        shared |= {axis: ("batch", i) for i, axis in enumerate(batch[side])}
        labels.append([shared.get(axis, (side, axis)) for axis in range(len(value))])
    free = [label for side, of in enumerate(labels) for label in of if label[0] == side]
    batches = [("batch", i) for i in range(len(batch[0]))]
    return reader.relate([(left, labels[0]), (right, labels[1])], [[*batches, *free]])


def convolution(reader: Reader, eqn: core.JaxprEqn, image: Value, kernel: Value) -> list[Value]:
    """A product over channels, group by group; the window ties positions in space."""
    if eqn.params["batch_group_count"] != 1:
        return unknown(reader, eqn, image, kernel)
    groups = eqn.params["feature_group_count"]
    at = eqn.params["dimension_numbers"]
    outputs, inputs = (_shape(eqn.invars[1])[axis] for axis in at.rhs_spec[:2])
    reader.freeze(image[axis] for axis in at.lhs_spec[2:])
    reader.freeze(kernel[axis] for axis in at.rhs_spec[2:])
    batch, channels = (image[axis] for axis in at.lhs_spec[:2])
    filters, depth = (kernel[axis] for axis in at.rhs_spec[:2])
    inner = (groups, outputs // groups)
    (result,) = reader.relate(
        [
            ((batch, *reader.split(channels, (groups, inputs), factored)), ("batch", "group", "in")),
            ((*reader.split(filters, inner, factored), depth), ("group", "out", "in")),
        ],
        [("batch", "group", "out")],
    )
    shape = _shape(eqn.outvars[0])
    axes = dict(zip(at.out_spec, (result[0], reader.join(result[1:], inner)), strict=False))
    return [tuple(axes.get(axis, Axis(size, reader.why)) for axis, size in enumerate(shape))]


def concatenate(reader: Reader, eqn: core.JaxprEqn, *operands: Value) -> list[Value]:
    at, rank = eqn.params["dimension"], len(operands[0])
    sizes = [_shape(atom)[at] for atom in eqn.invars]
    parts = [operand[at] or Axis(size) for operand, size in zip(operands, sizes, strict=True) if size]
    labelled = [
        (operand, [("part", i) if axis == at else axis for axis in range(rank)]) for i, operand in enumerate(operands)
    ]
    return reader.relate(labelled, [["row" if axis == at else axis for axis in range(rank)]], {"row": row(parts)})


def split(reader: Reader, eqn: core.JaxprEqn, operand: Value | Folded) -> list[Value]:
    at = eqn.params["axis"]
    if isinstance(operand, Folded):
        ends = itertools.accumulate(eqn.params["sizes"])
        return [
            _part(reader, operand, at, int(end - n), int(n)) for n, end in zip(eqn.params["sizes"], ends, strict=True)
        ]
    return _parts(reader, operand, at, _cut(reader, operand[at], eqn.params["sizes"]))


def slice_(reader: Reader, eqn: core.JaxprEqn, operand: Value | Folded) -> list[Value]:
    """A stretch of an axis is a part of it; every second entry is not."""
    p, shape = eqn.params, _shape(eqn.invars[0])
    if isinstance(operand, Folded):
        at = cut_axis(eqn)
        assert at is not None
        return [_part(reader, operand, at, int(p["start_indices"][at]), _shape(eqn.outvars[0])[at])]
    strides = p["strides"] or (1,) * len(shape)
    for axis, (size, start, stop, stride) in enumerate(
        zip(shape, p["start_indices"], p["limit_indices"], strides, strict=True)
    ):
        if stop - start == size and stride == 1:
            continue
        if stride == 1:
            part = _cut(reader, operand[axis], [start, stop - start, size - stop])[1]
        else:
            reader.freeze([operand[axis]])
            part = None if operand[axis] is None else Axis(len(range(start, stop, stride)), reader.why)
        (operand,) = _parts(reader, operand, axis, [part])
    return [operand]


def pad(reader: Reader, eqn: core.JaxprEqn, operand: Value, filler: Value) -> list[Value]:
    """Equal entries before and after a free axis are parts of their own."""
    for axis, (low, high, between) in enumerate(eqn.params["padding_config"]):
        size = _shape(eqn.invars[0])[axis]
        if between or low < 0 or high < 0:
            reader.freeze([operand[axis]])
            part = Axis(_shape(eqn.outvars[0])[axis], reader.why)
        elif low or high:
            ends = [Axis(int(low)), operand[axis] or Axis(size), Axis(int(high))]
            part = row([end for end in ends if end.size])
        else:
            continue
        (operand,) = _parts(reader, operand, axis, [part])
    return [operand]


def _cut(reader: Reader, axis: Axis | None, sizes: Iterable[SupportsIndex]) -> Value:
    """The segments of an axis, of which some may be empty."""
    lengths = [int(size) for size in sizes]
    parts = iter(reader.split(axis, [length for length in lengths if length], cut))
    return tuple(next(parts) if length else None for length in lengths)


def _parts(reader: Reader, operand: Value, at: int, parts: Sequence[Axis | None]) -> list[Value]:
    """An array with one of its axes replaced by each of `parts`."""

    def labels(mark: Hashable) -> Labels:
        return [mark if axis == at else axis for axis in range(len(operand))]

    made = {("part", i): part for i, part in enumerate(parts)}
    return reader.relate([(operand, labels("whole"))], [labels(part) for part in made], made)


def gather(reader: Reader, eqn: core.JaxprEqn, operand: Value, indices: Value) -> list[Value]:
    """A map over the axes of which every slice takes all; indices tie the positions of the others."""
    at, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape, result = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    collapsed, batched = at.collapsed_slice_dims, [*at.operand_batching_dims]
    tied = [a for a, n in enumerate(shape) if a not in batched and (a in collapsed or sizes[a] != n)]
    reader.freeze(operand[axis] for axis in tied)
    reader.freeze(indices[-1:])
    names: dict[int, Hashable] = {axis: ("before", axis) for axis in tied}
    names |= {a: ("index", i) for a, i in zip(batched, at.start_indices_batching_dims, strict=True)}
    kept = [axis for axis in range(len(shape)) if axis not in collapsed and axis not in batched]
    offsets = dict(zip(at.offset_dims, kept, strict=True))
    after = {i: ("after", axis) if axis in tied else axis for i, axis in offsets.items()}
    numbers = iter(range(len(indices)))
    return reader.relate(
        [
            (operand, [names.get(axis, axis) for axis in range(len(shape))]),
            (indices, [("index", i) for i in range(len(indices))]),
        ],
        [[after[i] if i in after else ("index", next(numbers)) for i in range(len(result))]],
        {("after", axis): Axis(sizes[axis], reader.why) for axis in tied},
    )


def scatter(reader: Reader, eqn: core.JaxprEqn, operand: Value, indices: Value, updates: Value) -> list[Value]:
    """A map over the axes that every update covers; all others are tied."""
    at = eqn.params["dimension_numbers"]
    shape, update_shape = _shape(eqn.invars[0]), _shape(eqn.invars[2])
    hidden = {*at.inserted_window_dims, *at.operand_batching_dims}
    windows = dict(zip([axis for axis in range(len(shape)) if axis not in hidden], at.update_window_dims, strict=True))
    whole = {axis: i for axis, i in windows.items() if update_shape[i] == shape[axis]}
    covered = {i: axis for axis, i in whole.items()}
    reader.freeze(indices)
    reader.freeze(axis for i, axis in enumerate(updates) if i not in covered)
    reader.freeze(value for axis, value in enumerate(operand) if axis not in whole)
    return reader.relate(
        [
            (operand, [axis if axis in whole else ("before", axis) for axis in range(len(shape))]),
            (updates, [covered.get(i, ("update", i)) for i in range(len(updates))]),
            (indices, [("index", i) for i in range(len(indices))]),
        ],
        [[axis if axis in whole else ("after", axis) for axis in range(len(shape))]],
        {("after", axis): Axis(size, reader.why) for axis, size in enumerate(shape)},
    )


def region(reader: Reader, eqn: core.JaxprEqn, *operands: Value) -> list[Value]:
    """What the jaxpr inside does: jit, remat, custom derivatives."""
    return reader.read(*inside(eqn), operands)


def inside(eqn: core.JaxprEqn) -> tuple[core.Jaxpr, Sequence[Any]]:
    """The one jaxpr inside an equation, and its constants."""
    return _opened(next(eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params))


def _opened(jaxpr: Any) -> tuple[core.Jaxpr, Sequence[Any]]:
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, core.ClosedJaxpr) else (jaxpr, ())


def cond(reader: Reader, eqn: core.JaxprEqn, which: Value, *operands: Value) -> list[Value]:
    """What all branches agree on."""
    branches = [reader.read(*_opened(branch), operands) for branch in eqn.params["branches"]]
    return [_together(reader, results) for results in zip(*branches, strict=True)]


def while_(reader: Reader, eqn: core.JaxprEqn, *operands: Value) -> list[Value]:
    p = eqn.params
    test, body, carry = divided(operands, p["cond_nconsts"], p["body_nconsts"])
    carry = _steady(reader, carry, lambda carry: reader.read(*_opened(p["body_jaxpr"]), [*body, *carry]))
    reader.read(*_opened(p["cond_jaxpr"]), [*test, *carry])
    return carry


def scan(reader: Reader, eqn: core.JaxprEqn, *operands: Value) -> list[Value]:
    """The body, in which all may differ from step to step but constants and the carry."""
    p = eqn.params
    consts, carry, xs = divided(operands, p["num_consts"], p["num_carry"])
    why = reader.why
    steps = Axis(p["length"], why if carry else None)
    for x in xs:
        if x[0] is not None:
            unite(steps, x[0], why)
    ys: list[Value] = []

    def body(carry: list[Value]) -> list[Value]:
        reader.loops.append((("step", len(reader.loops)), steps))
        results = reader.read(*inside(eqn), [*consts, *carry, *(x[1:] for x in xs)])
        reader.loops.pop()
        ys[:] = [(steps, *y) for y in results[len(carry) :]]
        return results[: len(carry)]

    carry = _steady(reader, carry, body)
    for value in (*consts, *xs):
        if any(axis in reader.used for axis in value):  # seen from outside, constants have no axis of steps
            reader.note([(value, range(len(value)))])
    return [*carry, *ys]


def _steady(reader: Reader, carry: list[Value], body: Callable[[list[Value]], list[Value]]) -> list[Value]:
    """The carry of a loop: what goes in and what comes out are one."""
    while True:
        together = [_together(reader, pair) for pair in zip(carry, body(carry), strict=True)]
        if [[a is None for a in value] for value in together] == [[a is None for a in value] for value in carry]:
            return together
        carry = together


def _together(reader: Reader, values: Sequence[Value]) -> Value:
    """One value that may be any of several."""
    labels = range(len(values[0]))
    return reader.relate([(value, labels) for value in values], [labels])[0]


def divided(values: Sequence[T], *counts: int) -> list[list[T]]:
    """Values in consecutive lists, the last of which has the rest."""
    ends = [*itertools.accumulate(counts), len(values)]
    return [list(values[start:stop]) for start, stop in zip([0, *ends], ends, strict=False)]


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _without(rank: int, axes: Collection[SupportsIndex]) -> list[int]:
    return [axis for axis in range(rank) if axis not in axes]


def _unequal(a: Any, b: Any) -> list[int]:
    """The axes along which two arrays have different sizes."""
    return [axis for axis, (n, m) in enumerate(zip(_shape(a), _shape(b), strict=True)) if n != m]


def _rules(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: dict[str, Rule] = {
    **_rules(
        elementwise,
        """
        abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
        clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf
        erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag integer_pow is_finite le le_to
        lgamma log log1p logistic lt lt_to max min mul name ne neg nextafter not or polygamma
        population_count pow real reduce_precision regularized_incomplete_beta rem round rsqrt
        select_n sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin
        sinh sqrt square stop_gradient sub tan tanh xor zeta
        """,
    ),
    **_rules(region, "jit pjit closed_call core_call remat2 checkpoint composite"),
    **_rules(region, "custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr"),
    **_rules(reduction, "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor"),
    **_rules(arg_reduction, "argmax argmin"),
    **_rules(cumulative, "cumsum cumprod cummax cummin cumlogsumexp"),
    **_rules(window, "reduce_window reduce_window_sum reduce_window_max reduce_window_min"),
    **_rules(scatter, "scatter scatter-add scatter-mul scatter-min scatter-max"),
    **_rules(one_by_one, "optimization_barrier device_put"),
    "bitcast_convert_type": same_shape,
    "broadcast_in_dim": broadcast,
    "concatenate": concatenate,
    "cond": cond,
    "conv_general_dilated": convolution,
    "dot_general": dot_general,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "gather": gather,
    "iota": iota,
    "pad": pad,
    "reshape": reshape,
    "rev": reverse,
    "scan": scan,
    "slice": slice_,
    "sort": sort,
    "split": split,
    "squeeze": squeeze,
    "top_k": top_k,
    "transpose": transpose,
    "while": while_,
}
