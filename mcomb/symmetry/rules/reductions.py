"""Rules of reductions, pooling, and operations along an axis whose order matters."""

from jax.extend import core

from mcomb.symmetry.arrays import ArrayAxes
from mcomb.symmetry.constraints import Constraints
from mcomb.symmetry.rules.common import other_axes, positional


def reduction(constraints: Constraints, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """Drop the reduced axes, which stay free: the order of the entries does not matter."""
    return constraints.relate([(operand, range(len(operand)))], [other_axes(len(operand), eqn.params["axes"])])


def general_reduction(constraints: Constraints, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """Freeze the reduced axes, because the function that reduces them may depend on the order."""
    reduced, rank = eqn.params["dimensions"], len(operands[0])
    for operand in operands:
        constraints.freeze(operand[axis] for axis in reduced if operand)
    labelled = [(operand, [("reduced", i, j) if j in reduced else j for j in range(rank)])
                for i, operand in enumerate(operands) if operand]  # fmt: skip
    return constraints.relate(labelled, [other_axes(rank, reduced)] * len(eqn.outvars))


def cumulative(constraints: Constraints, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """Freeze the axis along which each entry depends on those before it; elementwise over the others."""
    return positional(constraints, eqn, [operand], [eqn.params["axis"]])


def reverse(constraints: Constraints, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """Freeze the axes that are turned round."""
    return positional(constraints, eqn, [operand], eqn.params["dimensions"])


def fft(constraints: Constraints, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """Freeze the transformed axes, the last ones; elementwise over the others."""
    rank = len(operand)
    return positional(constraints, eqn, [operand], range(rank - len(eqn.params["fft_lengths"]), rank))


def reduce_window(constraints: Constraints, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """Freeze the axes that are pooled; elementwise over those along which the window has one entry."""
    return positional(constraints, eqn, operands[: len(eqn.outvars)], _pooled_axes(eqn))


def select_in_window(constraints: Constraints, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """Freeze the axes that are pooled: these are derivatives of pooling by the maximum."""
    return positional(constraints, eqn, operands, _pooled_axes(eqn))


def _pooled_axes(eqn: core.JaxprEqn) -> list[int]:
    """Return the axes that are pooled."""
    p, ones = eqn.params, (1,) * len(eqn.params["window_dimensions"])
    dilations = (p.get(name, ones) for name in ("base_dilation", "window_dilation"))
    sizes = zip(p["window_dimensions"], p["window_strides"], *dilations, strict=True)
    return [axis for axis, (n, pad) in enumerate(zip(sizes, p["padding"], strict=True)) if {*n} != {1} or any(pad)]
