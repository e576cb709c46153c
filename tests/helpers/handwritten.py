"""Handwritten permutation specs of the three models, as references for derived specs."""

from mcomb.lab.models import Tiny10
from mcomb.symmetry.spec import Axes, PermutationSpec
from mcomb.trees import Params


def _dense(name: str, p_in: str | None, p_out: str | None) -> Axes:
    return {f"{name}/kernel": (p_in, p_out), f"{name}/bias": (p_out,)}


def _conv(name: str, p_in: str | None, p_out: str | None) -> Axes:
    return {f"{name}/kernel": (None, None, p_in, p_out)}


def _norm(name: str, p: str) -> Axes:
    return {f"{name}/scale": (p,), f"{name}/bias": (p,)}


def mlp_spec(params: Params) -> PermutationSpec:
    """Return the spec of the MLP: one permutation for each hidden layer."""
    return PermutationSpec.from_axes(
        params,
        {
            **_dense("dense1", None, "P1"),
            **_dense("dense2", "P1", "P2"),
            **_dense("dense3", "P2", "P3"),
            **_dense("logits", "P3", None),
        },
    )


def tiny10_spec(params: Params) -> PermutationSpec:
    """Return the spec of Tiny-10: one permutation for each convolution."""
    axes: dict[str, tuple[str | None, ...]] = {}
    for i in range(1, len(Tiny10.LAYERS) + 1):
        axes |= _conv(f"conv{i}", f"P{i - 1}" if i > 1 else None, f"P{i}") | _norm(f"norm{i}", f"P{i}")
    return PermutationSpec.from_axes(params, axes | _dense("logits", f"P{len(Tiny10.LAYERS)}", None))


def resnet20_spec(params: Params) -> PermutationSpec:
    """Return the spec of ResNet-20: one permutation for each of three residual streams and nine blocks."""
    axes = dict(_conv("conv0", None, "P1") | _norm("norm0", "P1"))
    for group in (1, 2, 3):
        for block in (1, 2, 3):
            name, stream, inner = f"block{group}_{block}", f"P{group}", f"P{group}_{block}"
            before = f"P{group - 1}" if group > 1 and block == 1 else stream
            axes |= _conv(f"{name}/conv1", before, inner) | _norm(f"{name}/norm1", inner)
            axes |= _conv(f"{name}/conv2", inner, stream) | _norm(f"{name}/norm2", stream)
            if before != stream:
                axes |= _conv(f"{name}/shortcut_conv", before, stream) | _norm(f"{name}/shortcut_norm", stream)
    return PermutationSpec.from_axes(params, axes | _dense("logits", "P3", None))
