"""Rules of reductions, pooling, and operations along an axis whose order matters."""

from jax.extend import core

from mcomb.symmetry.arrays import ArrayAxes
from mcomb.symmetry.constraints import Constraints
from mcomb.symmetry.rules.common import other_axes, positional


def reduction(constraints: Constraints, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """Drop the reduced axes, which stay free because the order of their entries does not matter."""
    return constraints.relate([(operand, range(len(operand)))], [other_axes(len(operand), eqn.params["axes"])])


def general_reduction(constraints: Constraints, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """Freeze the reduced axes, because the reducing function may depend on the order."""
    reduced, rank = eqn.params["dimensions"], len(operands[0])
    for operand in operands:
        constraints.freeze(operand[axis] for axis in reduced if operand)
    labelled = [(operand, [("reduced", i, j) if j in reduced else j for j in range(rank)])
                for i, operand in enumerate(operands) if operand]  # fmt: skip
    return constraints.relate(labelled, [other_axes(rank, reduced)] * len(eqn.outvars))


def cumulative(constraints: Constraints, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """Freeze the axis along which each entry depends on preceding ones; treat all others elementwise."""
    return positional(constraints, eqn, [operand], [eqn.params["axis"]])


def reverse(constraints: Constraints, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """Freeze the reversed axes."""
    return positional(constraints, eqn, [operand], eqn.params["dimensions"])


def fft(constraints: Constraints, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """Freeze the transformed axes, which are the last ones; treat all others elementwise."""
    rank = len(operand)
    return positional(constraints, eqn, [operand], range(rank - len(eqn.params["fft_lengths"]), rank))


def reduce_window(constraints: Constraints, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """Freeze the pooled axes; treat axes along which the window has one entry elementwise."""
    return positional(constraints, eqn, operands[: len(eqn.outvars)], _pooled_axes(eqn))


def select_in_window(constraints: Constraints, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """Freeze the pooled axes of derivatives of max pooling."""
    return positional(constraints, eqn, operands, _pooled_axes(eqn))


def _pooled_axes(eqn: core.JaxprEqn) -> list[int]:
    """Return the pooled axes."""
    p, ones = eqn.params, (1,) * len(eqn.params["window_dimensions"])
    dilations = (p.get(name, ones) for name in ("base_dilation", "window_dilation"))
    sizes = zip(p["window_dimensions"], p["window_strides"], *dilations, strict=True)
    return [axis for axis, (n, pad) in enumerate(zip(sizes, p["padding"], strict=True)) if {*n} != {1} or any(pad)]
