"""The rule of each primitive, which computes the axes of its results.

Most primitives are elementwise, products or reductions. Their rules are written like an einsum, with a label for each
axis of each operand and result. `Constraints.relate` unites the axes with the same label.
"""

from mcomb.symmetry.interpreter import FactRule, Rule
from mcomb.symmetry.rules.common import ELEMENTWISE, for_all, pass_through
from mcomb.symmetry.rules.control import call, collective, cond, linear_solve, scan, shard_map, while_
from mcomb.symmetry.rules.lookups import (
    arg_reduction,
    choose_positions,
    clip_positions,
    compare_positions,
    dynamic_slice,
    dynamic_update_slice,
    gather,
    is_negative,
    join_columns,
    move_positions,
    scatter,
    scatter_at,
    shift_positions,
    sort,
    sort_positions,
    top_k,
)
from mcomb.symmetry.rules.products import (
    convolution,
    dot_general,
    factorisation,
    ragged_dot,
    ragged_dot_of_groups,
)
from mcomb.symmetry.rules.reductions import (
    cumulative,
    fft,
    general_reduction,
    reduce_window,
    reduction,
    reverse,
    select_in_window,
)
from mcomb.symmetry.rules.shapes import (
    bitcast,
    broadcast,
    concatenate,
    iota,
    pad,
    reshape,
    slice_,
    slice_reshape,
    split,
    squeeze,
    stack,
    tile,
    transpose,
    unstack,
)

SCATTERS = "scatter scatter-add scatter-mul scatter-min scatter-max scatter-sub"
WINDOWS = "reduce_window reduce_window_sum reduce_window_max reduce_window_min"
FACTORISATIONS = "cholesky eig eigh hessenberg householder_product lu qr schur svd triangular_solve tridiagonal"

RULES: dict[str, Rule] = {
    **ELEMENTWISE,
    **for_all(reduction, "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor"),
    **for_all(cumulative, "cumsum cumprod cummax cummin cumlogsumexp"),
    **for_all(reduce_window, WINDOWS),
    **for_all(select_in_window, "select_and_gather_add select_and_scatter_add"),
    **for_all(scatter, SCATTERS),
    **for_all(pass_through, "optimization_barrier device_put reshard layout_constraint"),
    **for_all(collective, "psum psum_invariant pmax pmin pvary pbroadcast ppermute"),
    **for_all(factorisation, FACTORISATIONS),
    "bitcast_convert_type": bitcast,
    "broadcast_in_dim": broadcast,
    "concatenate": concatenate,
    "conv_general_dilated": convolution,
    "dot_general": dot_general,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "fft": fft,
    "iota": iota,
    "pad": pad,
    "ragged_dot_general": ragged_dot,
    "reduce": general_reduction,
    "reshape": reshape,
    "rev": reverse,
    "slice": slice_,
    "sort": sort,
    "split": split,
    "squeeze": squeeze,
    "stack": stack,
    "tile": tile,
    "transpose": transpose,
    "unstack": unstack,
}
"""Rules that need only the axes of their operands, by primitive."""

MOVES = ("broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "stop_gradient", "transpose")

CALLS = for_all(
    call,
    """
    checkpoint closed_call composite core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr custom_vmap_call
    jit pjit remat2
    """,
)

FACT_RULES: dict[str, FactRule] = {
    **CALLS,
    **for_all(arg_reduction, "argmax argmin"),
    **{name: move_positions(RULES[name]) for name in MOVES},
    **for_all(scatter_at, SCATTERS),
    **for_all(slice_reshape, "split unstack"),
    "add": shift_positions,
    "concatenate": join_columns,
    "cond": cond,
    "custom_linear_solve": linear_solve,
    "eq": compare_positions,
    "gather": gather,
    "lt": is_negative,
    "max": clip_positions,
    "ragged_dot_general": ragged_dot_of_groups,
    "scan": scan,
    "select_n": choose_positions,
    "shard_map": shard_map,
    "slice": lambda *args: slice_reshape(*args) or move_positions(slice_)(*args),
    "sort": sort_positions,
    "top_k": top_k,
    "while": while_,
}
"""Rules that need further facts about their operands (see `Array`), which take precedence over `RULES`.

If such a rule returns None, the rule in `RULES` applies, which treats positions as plain numbers.
"""
