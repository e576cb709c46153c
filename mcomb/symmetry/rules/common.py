"""Common parts of rules: the simplest rules, and helpers for the shapes of operands."""

import itertools
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any, SupportsIndex, TypeVar

from jax.extend import core

from mcomb.symmetry.arrays import ArrayAxes, shape_of
from mcomb.symmetry.axes import Axis
from mcomb.symmetry.constraints import Constraints, Labels

T = TypeVar("T")


def freeze_everything(constraints: Constraints, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """Freeze all axes, because an unknown primitive may depend on the order of all entries."""
    constraints.explain(
        eqn.primitive.name, FROZEN_ON_PURPOSE.get(eqn.primitive.name, "how it depends on the order is not known")
    )
    for operand in operands:
        constraints.freeze(operand)
    constraints.record((operand, [(i, axis) for axis in range(len(operand))]) for i, operand in enumerate(operands))
    return [constraints.new_axes(shape_of(var), constraints.reason) for var in eqn.outvars]


def elementwise(constraints: Constraints, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """Unite the axes of all operands one by one; scalars have no axes."""
    rank = len(shape_of(eqn.outvars[0]))
    return constraints.relate([(axes, range(len(axes))) for axes in operands], [range(rank)] * len(eqn.outvars))


def pass_through(constraints: Constraints, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """Return the operands themselves."""
    return list(operands)


def positional(
    constraints: Constraints,
    eqn: core.JaxprEqn,
    operands: Sequence[ArrayAxes],
    ordered: Iterable[int],
    order_blind: bool = False,
) -> list[ArrayAxes]:
    """Freeze the `ordered` axes, along which the order of entries matters; treat all others elementwise.

    An operation that is blind to the order of its operands freezes these axes only in its results.
    """
    shape, ordered = shape_of(eqn.outvars[0]), set(ordered)
    for operand in [] if order_blind else operands:
        constraints.freeze(operand[axis] for axis in ordered)

    # An ordered axis has different labels in operand and result, so that no permutation is batched over it.
    def labels(*array: Hashable) -> Labels:
        return [(*array, axis) if axis in ordered else axis for axis in range(len(shape))]

    return constraints.relate(
        [(operand, labels("operand", 0 if order_blind else i)) for i, operand in enumerate(operands)],
        [labels("result")] * len(eqn.outvars),
        {("result", axis): Axis(shape[axis], constraints.reason) for axis in ordered},
    )


def other_axes(rank: int, axes: Collection[SupportsIndex]) -> list[int]:
    """Return the axes of an array that are not among `axes`."""
    return [axis for axis in range(rank) if axis not in axes]


def resized_axes(a: Any, b: Any) -> list[int]:
    """Return the axes along which two arrays have different sizes."""
    return [axis for axis, (n, m) in enumerate(zip(shape_of(a), shape_of(b), strict=True)) if n != m]


def split_list(values: Sequence[T], *counts: int) -> list[list[T]]:
    """Split values into consecutive lists of the given lengths, and a last list of the rest."""
    ends = [*itertools.accumulate(counts), len(values)]
    return [list(values[start:stop]) for start, stop in zip([0, *ends], ends, strict=False)]


def split_scan(eqn: core.JaxprEqn, operands: Sequence[T]) -> list[list[T]]:
    """Return the constants, the carry and the scanned arrays among the operands of a scan."""
    p = eqn.params
    if "ft_in" in p:  # JAX 0.12 and later
        return split_list(operands, *(len(list(part)) for part in p["ft_in"].unpack()[:2]))
    return split_list(operands, p["num_consts"], p["num_carry"])


def for_all(value: T, names: str) -> dict[str, T]:
    """Return a table with the same value for all names."""
    return dict.fromkeys(names.split(), value)


ELEMENTWISE = for_all(
    elementwise,
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex
    conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt
    igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul
    mulhi name ne neg nextafter not or polygamma population_count pow real reduce_precision
    regularized_incomplete_beta rem round rsqrt select_n sharding_constraint shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta
    """,
)
"""The rule of all elementwise primitives."""

BY_POSITION = "devices share the array out by position"

EXPLANATIONS: dict[str, str] = {
    **for_all("positions are used as numbers", "argmax argmin top_k"),
    **for_all("each entry depends on those before it", "cumsum cumprod cummax cummin cumlogsumexp"),
    **for_all("entries are looked up by number", "gather"),
    **for_all("it begins at a number", "dynamic_slice dynamic_update_slice"),
    **for_all("entries are written by number", "scatter scatter-add scatter-mul scatter-min scatter-max scatter-sub"),
    **for_all("positions of a window", "conv_general_dilated reduce_window reduce_window_sum reduce_window_max"),
    **for_all("positions of a window", "reduce_window_min select_and_gather_add select_and_scatter_add"),
    **for_all(
        "rows and columns follow one another", "cholesky eig eigh hessenberg householder_product lu qr schur svd"
    ),
    **for_all("rows and columns follow one another", "triangular_solve tridiagonal"),
    "fft": "it depends on all positions",
    "iota": "it counts",
    "rev": "it turns the order round",
    "scan": "steps follow one another",
    "sort": "ranks",
    "stack": "one array after the other",
    "unstack": "entries are told apart",
}
"""Why primitives with a rule depend on the order of entries, for `print(spec)`."""

FROZEN_ON_PURPOSE: dict[str, str] = {
    **for_all(
        "random numbers differ from position to position",
        """
        iota_2x32_shape philox2x32 philox4x32 random_bits random_clone random_fold_in random_gamma random_seed
        random_split random_unwrap random_wrap rng_bit_generator rng_uniform threefry2x32 threefry4x32
        """,
    ),
    **for_all(
        BY_POSITION,
        """
        all_gather all_gather_invariant all_gather_reduced all_to_all axis_index precv psend ragged_all_to_all
        reduce_scatter unreduced_reduce_scatter
        """,
    ),
    **for_all(
        "an array that is written to is not followed",
        "accum_grad_in_ref addupdate empty_ref free_ref freeze get new_ref run_state swap",
    ),
    **for_all(
        "what is not JAX cannot be looked into",
        "call_exported custom_partitioning ffi_call io_callback pure_callback",
    ),
}
"""Primitives that deliberately have no rule, and the reason."""
