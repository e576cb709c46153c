"""Rules of reductions, pooling, and operations along an axis whose order matters."""

from jax.extend import core

from mcomb.symmetry.facts import ArrayFacts, Relation
from mcomb.symmetry.rules.elementwise import other_axes, positional


def reduction(eqn: core.JaxprEqn, operand: ArrayFacts) -> Relation:
    """Drop the reduced axes, which stay free because the order of their entries does not matter."""
    rank = len(operand.axes)
    return Relation([(operand.axes, range(rank))], [other_axes(rank, eqn.params["axes"])])


def cumulative(eqn: core.JaxprEqn, operand: ArrayFacts) -> Relation:
    """Freeze the axis along which each entry depends on preceding ones; treat all others elementwise."""
    return positional(eqn, [operand], [eqn.params["axis"]])


def reverse(eqn: core.JaxprEqn, operand: ArrayFacts) -> Relation:
    """Freeze the reversed axes."""
    return positional(eqn, [operand], eqn.params["dimensions"])


def fft(eqn: core.JaxprEqn, operand: ArrayFacts) -> Relation:
    """Freeze the transformed axes, which are the last ones; treat all others elementwise."""
    rank = len(operand.axes)
    return positional(eqn, [operand], range(rank - len(eqn.params["fft_lengths"]), rank))


def reduce_window(eqn: core.JaxprEqn, *operands: ArrayFacts) -> Relation:
    """Freeze the pooled axes; treat axes along which the window has one entry elementwise."""
    p, ones = eqn.params, (1,) * len(eqn.params["window_dimensions"])
    dilations = (p.get(name, ones) for name in ("base_dilation", "window_dilation"))
    sizes = zip(p["window_dimensions"], p["window_strides"], *dilations, strict=True)
    pooled = [axis for axis, (n, pad) in enumerate(zip(sizes, p["padding"], strict=True)) if {*n} != {1} or any(pad)]
    # The other operands are the initial values, which are scalars. Derivatives of max pooling have several arrays.
    return positional(eqn, [operand for operand in operands if len(operand.axes) == len(ones)], pooled)
