"""Rules of reductions, pooling, and operations along an axis whose order matters."""

from jax.extend import core

from mcomb.symmetry.axes import split_product
from mcomb.symmetry.interpreter import ArrayAxes, Interpreter, turn
from mcomb.symmetry.rules.common import other_axes, positional, shape_of
from mcomb.symmetry.rules.shapes import replace_axis


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
    """The operand, turned round."""
    return [turn(operand, eqn.params["dimensions"], interp.reason)]


def reverse_at_once(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """The same, its order frozen: of whole numbers some are equal, and then it matters which of them comes first."""
    return [interp.plain(axes) for axes in reverse(interp, eqn, operand)]


def fft(interp: Interpreter, eqn: core.JaxprEqn, operand: ArrayAxes) -> list[ArrayAxes]:
    """Freezes the transformed axes, the last ones; elementwise over the others."""
    rank = len(operand)
    return positional(interp, eqn, [operand], range(rank - len(eqn.params["fft_lengths"]), rank))


def reduce_window(interp: Interpreter, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """Pooling: elementwise over the axes along which the window has one entry, without padding or stride.

    Where windows tile an axis, it is a product of windows, in any order, with what is inside them, also in any order.
    """
    p, pooled = eqn.params, _pooled_axes(eqn)
    shape, arrays = shape_of(eqn.invars[0]), operands[: len(eqn.outvars)]  # without what the reduction starts with
    for axis, (window, stride, *dilation) in pooled.items():
        tiles = window == stride and dilation == [1, 1] and not any(p["padding"][axis]) and shape[axis] % window == 0
        if not tiles or eqn.primitive.name == "reduce_window" or len(arrays) > 1:
            return positional(interp, eqn, arrays, pooled)
    if len(arrays) > 1:
        return positional(interp, eqn, arrays, ())
    (operand,) = arrays
    for axis, (window, *_) in pooled.items():
        windows, _ = interp.split(operand[axis], (shape[axis] // window, window), split_product)
        (operand,) = replace_axis(interp, operand, axis, [windows])
    return [operand]


def select_in_window(interp: Interpreter, eqn: core.JaxprEqn, *operands: ArrayAxes) -> list[ArrayAxes]:
    """Derivatives of pooling by the maximum: elementwise as that is, frozen where it takes one of several entries."""
    return positional(interp, eqn, operands, _pooled_axes(eqn))


def _pooled_axes(eqn: core.JaxprEqn) -> dict[int, tuple[int, ...]]:
    """The axes that are pooled, each with the size, stride and dilations of the window."""
    p, ones = eqn.params, (1,) * len(eqn.params["window_dimensions"])
    dilations = (p.get(name, ones) for name in ("base_dilation", "window_dilation"))
    sizes = zip(p["window_dimensions"], p["window_strides"], *dilations, strict=True)
    return {axis: n for axis, (n, pad) in enumerate(zip(sizes, p["padding"], strict=True)) if {*n} != {1} or any(pad)}
