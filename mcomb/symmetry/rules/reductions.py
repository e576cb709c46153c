"""Rules of reductions, pooling, and operations along an axis whose order matters."""

from jax.extend import core

from mcomb.symmetry.arrays import ArrayAxes
from mcomb.symmetry.interpreter import Interpreter
from mcomb.symmetry.rules.common import other_axes, positional


def reduction(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """Drops the reduced axes, which stay free: the order of the entries does not matter."""
    return interp.relate([(operand, range(len(operand)))], [other_axes(len(operand), eqn.params["axes"])])


def general_reduction(interp: Interpreter, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """Freezes the reduced axes, for the function that reduces them may depend on the order."""
    reduced, rank = eqn.params["dimensions"], len(operands[0])
    for operand in operands:
        interp.freeze(operand[axis] for axis in reduced if operand)
    labelled = [(operand, [("reduced", i, j) if j in reduced else j for j in range(rank)])
                for i, operand in enumerate(operands) if operand]  # fmt: skip
    return interp.relate(labelled, [other_axes(rank, reduced)] * len(eqn.outvars))


def cumulative(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """Freezes the axis along which each entry depends on those before it; elementwise over the others."""
    return positional(interp, eqn, [operand], [eqn.params["axis"]])


def reverse(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """Freeze the axes that are turned round."""
    return positional(interp, eqn, [operand], eqn.params["dimensions"])


def fft(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """Freezes the transformed axes, the last ones; elementwise over the others."""
    rank = len(operand)
    return positional(interp, eqn, [operand], range(rank - len(eqn.params["fft_lengths"]), rank))


def reduce_window(interp: Interpreter, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """Pooling: elementwise over the axes along which the window has one entry, without padding or stride."""
    return positional(interp, eqn, operands[: len(eqn.outvars)], _pooled_axes(eqn))


def select_in_window(interp: Interpreter, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """Derivatives of pooling by the maximum: elementwise as that is, frozen where it takes one of several entries."""
    return positional(interp, eqn, operands, _pooled_axes(eqn))


def _pooled_axes(eqn: core.JaxprEqn) -> list[int]:
    """Return the axes that are pooled."""
    p, ones = eqn.params, (1,) * len(eqn.params["window_dimensions"])
    dilations = (p.get(name, ones) for name in ("base_dilation", "window_dilation"))
    sizes = zip(p["window_dimensions"], p["window_strides"], *dilations, strict=True)
    return [axis for axis, (n, pad) in enumerate(zip(sizes, p["padding"], strict=True)) if {*n} != {1} or any(pad)]
