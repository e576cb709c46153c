"""The rule of each primitive, which finds the relation of its operands and results.

Most primitives are elementwise, products or reductions. Their rules are written like an einsum, with a label for each
axis of each operand and result. Axes with the same label move together. See `facts.Relation`.
"""

from collections.abc import Callable
from typing import Any

from mcomb.symmetry.rules import control, elementwise, lookups, products, reductions, shapes
from mcomb.symmetry.rules.elementwise import BY_POSITION, Rule

SCATTERS = "scatter scatter-add scatter-mul scatter-min scatter-max scatter-sub"
POOLS = "reduce_window reduce_window_sum reduce_window_max reduce_window_min select_and_gather_add"

TABLE: list[tuple[Rule, str, str]] = [
    (
        elementwise.elementwise,
        """
        abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex
        conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt
        igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul
        mulhi name ne neg nextafter not or polygamma population_count pow real reduce_precision
        regularized_incomplete_beta rem round rsqrt select_n sharding_constraint shift_left shift_right_arithmetic
        shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta
        """,
        "",
    ),
    (
        elementwise.one_by_one,
        """
        device_put layout_constraint optimization_barrier pbroadcast pmax pmin ppermute psum psum_invariant pvary
        reshard
        """,
        "",
    ),
    (lookups.arg_reduction, "argmax argmin", "positions are used as numbers"),
    (lookups.dynamic_slice, "dynamic_slice", "it starts at a computed index"),
    (lookups.dynamic_update_slice, "dynamic_update_slice", "it starts at a computed index"),
    (lookups.gather, "gather", "entries are looked up by number"),
    (lookups.scatter, SCATTERS, "entries are written by number"),
    (lookups.sort, "sort", "ranks"),
    (lookups.top_k, "top_k", "positions are used as numbers"),
    (products.convolution, "conv_general_dilated", "positions of a window"),
    (products.dot_general, "dot_general", ""),
    (products.ragged_dot, "ragged_dot_general", ""),
    (reductions.cumulative, "cumsum cumprod cummax cummin cumlogsumexp", "each entry depends on those before it"),
    (reductions.fft, "fft", "it depends on all positions"),
    (reductions.reduce_window, f"{POOLS} select_and_scatter_add", "positions of a window"),
    (reductions.reduction, "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor", ""),
    (reductions.reverse, "rev", "it reverses the order"),
    (shapes.bitcast, "bitcast_convert_type", ""),
    (shapes.broadcast, "broadcast_in_dim", ""),
    (shapes.concatenate, "concatenate", ""),
    (shapes.iota, "iota", "it numbers the positions"),
    (shapes.pad, "pad", ""),
    (shapes.reshape, "reshape", ""),
    (shapes.slice_, "slice", ""),
    (shapes.split, "split", ""),
    (shapes.squeeze, "squeeze", ""),
    (shapes.stack, "stack", "it stacks arrays in order"),
    (shapes.tile, "tile", ""),
    (shapes.transpose, "transpose", ""),
    (shapes.unstack, "unstack", "it separates the entries"),
]
"""For each rule, the primitives, and why they depend on the order of entries, if they do."""

FROZEN_ON_PURPOSE = {
    name: why
    for why, names in {
        "random numbers differ from position to position": """
            iota_2x32_shape philox2x32 philox4x32 random_bits random_clone random_fold_in random_gamma random_seed
            random_split random_unwrap random_wrap rng_bit_generator rng_uniform threefry2x32 threefry4x32
        """,
        BY_POSITION: """
            all_gather all_gather_invariant all_gather_reduced all_to_all axis_index precv psend ragged_all_to_all
            reduce_scatter unreduced_reduce_scatter
        """,
        "mcomb does not track mutable arrays": """
            accum_grad_in_ref addupdate empty_ref free_ref freeze get new_ref run_state swap
        """,
        "it depends on the order of rows and columns": """
            cholesky custom_linear_solve eig eigh hessenberg householder_product lu qr schur svd triangular_solve
            tridiagonal
        """,
        "the reducing function may depend on the order": "reduce",
        "mcomb cannot trace code outside JAX": """
            call_exported custom_partitioning ffi_call io_callback pure_callback
        """,
    }.items()
    for name in names.split()
}
"""Primitives that deliberately have no rule, and the reason."""

RULES = {name: rule for rule, names, _ in TABLE for name in names.split()}
EXPLANATIONS = {name: why for _, names, why in TABLE for name in names.split()}
EXPLANATIONS |= FROZEN_ON_PURPOSE | {"scan": "steps follow one another"}

CALLS = {
    *("checkpoint", "closed_call", "composite", "core_call", "custom_jvp_call", "custom_vjp_call"),
    *("custom_vjp_call_jaxpr", "custom_vmap_call", "jit", "pjit", "remat2"),
}
CONTROL: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(CALLS, control.call),
    "cond": control.cond,
    "scan": control.scan,
    "shard_map": control.shard_map,
    "while": control.while_,
}
"""Functions that interpret the jaxprs inside an equation."""

MOVING_PRIMITIVES = (
    "broadcast_in_dim",
    "convert_element_type",
    "reshape",
    "slice",
    "squeeze",
    "stop_gradient",
    "transpose",
)

FACT_RULES: dict[str, Rule] = {
    **{name: lookups.move_positions(RULES[name]) for name in MOVING_PRIMITIVES},
    "add": lookups.shift_positions,
    "concatenate": lookups.join_columns,
    "eq": lookups.compare_positions,
    "lt": lookups.is_negative,
    "max": lookups.clip_positions,
    "ragged_dot_general": products.ragged_dot_of_groups,
    "select_n": lookups.choose_positions,
    "sort": lookups.sort_positions,
}
"""Rules that follow positions and counts, which take precedence over `RULES`.

If such a rule returns None, the rule in `RULES` applies, which treats positions as plain numbers.
"""
