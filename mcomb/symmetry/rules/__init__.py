"""For each primitive, a rule that gives the axes of its results.

Most primitives are elementwise, products or reductions. Their rules write them like an einsum, with a label for each
axis of each operand and result, and `Interpreter.relate` unites the axes with the same label.
"""

from mcomb.symmetry.interpreter import Counts, Discrete, Places, Positions, Reversed, Rule, Stack
from mcomb.symmetry.rules.common import ELEMENTWISE, for_all, pass_through
from mcomb.symmetry.rules.control import (
    call,
    change_stack,
    collective,
    cond,
    dynamic_slice_of_stack,
    scan,
    shard_map,
    slice_of_stack,
    split_stack,
    while_,
)
from mcomb.symmetry.rules.lookups import (
    arg_reduction,
    at_least,
    choose_from_few,
    choose_positions,
    compare_positions,
    convert_counts,
    dynamic_slice,
    dynamic_slice_at,
    dynamic_update_slice,
    gather,
    is_negative,
    join_columns,
    reshape_positions,
    scatter,
    scatter_at,
    shift,
    sort,
    sort_positions,
    sort_reversed,
    sum_counts,
    top_k,
)
from mcomb.symmetry.rules.products import (
    convolution,
    dot_general,
    factorisation,
    linear_solve,
    ragged_dot,
    ragged_dot_of_groups,
    triangular_solve,
)
from mcomb.symmetry.rules.reductions import (
    cumulative,
    fft,
    general_reduction,
    reduce_window,
    reduction,
    reverse,
    reverse_at_once,
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
    split,
    squeeze,
    stack,
    tile,
    transpose,
    unstack,
)

CALLS = for_all(
    call,
    """
    checkpoint closed_call composite core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr custom_vmap_call
    jit pjit remat2
    """,
)

RULES: dict[str, Rule] = {
    **CALLS,
    **ELEMENTWISE,
    **for_all(reduction, "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor"),
    **for_all(arg_reduction, "argmax argmin"),
    **for_all(cumulative, "cumsum cumprod cummax cummin cumlogsumexp"),
    **for_all(reduce_window, "reduce_window reduce_window_sum reduce_window_max reduce_window_min"),
    **for_all(select_in_window, "select_and_gather_add select_and_scatter_add"),
    **for_all(scatter, "scatter scatter-add scatter-mul scatter-min scatter-max scatter-sub"),
    **for_all(pass_through, "optimization_barrier device_put reshard layout_constraint"),
    **for_all(collective, "psum psum_invariant pmax pmin pvary pbroadcast ppermute"),
    **for_all(factorisation, "cholesky eig eigh hessenberg householder_product lu qr schur svd tridiagonal"),
    "bitcast_convert_type": bitcast,
    "broadcast_in_dim": broadcast,
    "concatenate": concatenate,
    "cond": cond,
    "conv_general_dilated": convolution,
    "custom_linear_solve": linear_solve,
    "dot_general": dot_general,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "fft": fft,
    "gather": gather,
    "iota": iota,
    "pad": pad,
    "ragged_dot_general": ragged_dot,
    "reduce": general_reduction,
    "reshape": reshape,
    "rev": reverse,
    "scan": scan,
    "shard_map": shard_map,
    "slice": slice_,
    "sort": sort,
    "split": split,
    "squeeze": squeeze,
    "stack": stack,
    "tile": tile,
    "top_k": top_k,
    "transpose": transpose,
    "triangular_solve": triangular_solve,
    "unstack": unstack,
    "while": while_,
}

POSITION_RULES: dict[str, Rule] = {
    **CALLS,
    **for_all(
        reshape_positions,
        "broadcast_in_dim convert_element_type copy reshape rev slice squeeze stop_gradient transpose",
    ),
    "add": shift,
    "concatenate": join_columns,
    **for_all(compare_positions, "eq ne"),
    **for_all(scatter_at, "scatter scatter-add scatter-mul scatter-min scatter-max scatter-sub"),
    "dynamic_slice": dynamic_slice_at,
    "gather": gather,
    "lt": is_negative,
    "max": at_least,
    "select_n": choose_positions,
    **for_all(choose_from_few, "argmax argmin top_k"),
    "sort": sort_positions,
}
"""For primitives with an operand that is positions along an axis; for all others these are plain numbers."""

STACK_RULES: dict[str, Rule] = {
    **CALLS,
    **for_all(change_stack, "convert_element_type copy div mul neg stop_gradient"),
    "cond": cond,
    "dynamic_slice": dynamic_slice_of_stack,
    "scan": scan,
    "slice": slice_of_stack,
    "split": split_stack,
    "unstack": split_stack,
    "while": while_,
}
"""For primitives that leave it open whether a parameter is only read entry by entry; all others use all of it."""

SCATTERS = {name: rule for name, rule in POSITION_RULES.items() if name.startswith("scatter")}

CHOICES: dict[str, Rule] = for_all(choose_from_few, "argmax argmin sort top_k") | {"rev": reverse_at_once}

SPECIAL_RULES: dict[type, dict[str, Rule]] = {
    Stack: STACK_RULES,
    Positions: POSITION_RULES,
    Places: {**CALLS, **SCATTERS, "gather": gather},
    Reversed: {"sort": sort_reversed},
    Discrete: {**CALLS, **CHOICES, "cond": cond, "scan": scan, "while": while_},
    Counts: {
        **CALLS,
        **CHOICES,
        "convert_element_type": convert_counts,
        "ragged_dot_general": ragged_dot_of_groups,
        "reduce_sum": sum_counts,
    },
}
"""The rules for arrays of which more is known than their axes; for a primitive that is not here they are as any."""
