"""Run PyTorch operations in JAX with torchax, replacing operations that would hide a symmetry."""

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from mcomb.errors import UserError, name_error
from mcomb.trees import at_least_float32


@contextmanager
def run_in_jax(name: str) -> Iterator[None]:
    """Run PyTorch operations in JAX inside the context; errors name the module."""
    environment = get_environment()
    import torch
    from torchax.tensor import OperatorNotFound

    try:
        # torchax relies on JAX's default promotion, and requests int64 although JAX uses int32.
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Explicitly requested dtype")
            with environment, torch.device("jax"), torch.no_grad():
                yield
    except OperatorNotFound as error:
        raise UserError(f"{name} uses an operation that torchax lacks ({error}): replace it in `forward`.") from error
    except jax.errors.JAXTypeError as error:
        raise UserError(f"{name} needs the values of tensors, which JAX cannot trace: use torch.where.") from error
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} fails ({name_error(error)}): pass inputs that its `forward` takes.") from error


def to_jax_tensor(array: Any) -> Any:
    """Return an array as a tensor that computes in JAX."""
    environment = get_environment()
    from torchax.tensor import Tensor

    return Tensor(jnp.asarray(array), environment)


@cache
def get_environment() -> Any:
    """Return the torchax environment, or raise an error that names the extra if a package is missing."""
    try:
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchax.tensor import Environment
            from torchax.view import View
    except ImportError as error:
        raise UserError(f"PyTorch modules need PyTorch and torchax ({error}): install mcomb[pytorch].") from error
    environment = Environment()
    own = environment._ops  # torchax's own operations

    def replace(operation: Any, function: Callable[..., Any]) -> None:
        own[operation] = dataclasses.replace(own[operation], func=function)

    aten = torch.ops.aten
    replaced = (aten.topk, aten.copy_, torch.Tensor.__getitem__, aten.native_layer_norm)
    top_k, copy, get_item, layer_norm = (own[operation].func for operation in replaced)

    def top_k_unsorted(*args: Any, **kwargs: Any) -> Any:
        """Skip the sort, because JAX's top_k is sorted and another sort would turn positions into plain numbers."""
        return top_k(*args[:4], **{name: value for name, value in kwargs.items() if name != "sorted"}, sorted=False)

    def copy_view(x: Any, y: Any, *rest: Any, **kwargs: Any) -> Any:
        """Copy a tensor, also from a view."""
        return copy(x, y.torch() if isinstance(y, View) else y, *rest, **kwargs)

    def slice_one(x: Any, index: Any) -> Any:
        """Read `x[..., [-2], :]` as a slice, which keeps more axes free than a lookup."""
        indices = index if isinstance(index, tuple) else (index,)
        is_one = [isinstance(i, list) and len(i) == 1 and type(i[0]) is int for i in indices]
        if sum(is_one) == 1 and not any(isinstance(i, torch.Tensor | bool) for i in indices):
            indices = tuple(slice(i[0], i[0] + 1 or None) if one else i for i, one in zip(indices, is_one, strict=True))
            return get_item(x, indices)
        return get_item(x, index)

    def layer_norm_in_float32(x: Any, *args: Any, **kwargs: Any) -> Any:
        """Normalise half precision in float32, as PyTorch does; in float16, gradients of the variance overflow."""
        return tuple(part.astype(x.dtype) for part in layer_norm(at_least_float32(x), *args, **kwargs))

    replace(aten.topk, top_k_unsorted)
    replace(aten.copy_, copy_view)
    replace(torch.Tensor.__getitem__, slice_one)
    replace(aten.native_layer_norm, layer_norm_in_float32)
    return environment


def compute_all_experts(module: Any) -> None:
    """Make the mixtures of experts in transformers compute all experts, so that each has its own order of units."""
    for part in module.modules():
        if all(hasattr(part, name) for name in ("num_experts", "has_gate", "is_transposed", "_apply_gate")):
            part.forward = partial(_all_experts, part)


def _all_experts(experts: Any, hidden: Any, chosen: Any, shares: Any) -> Any:
    """Return the weighted sum of all experts' outputs, with weight 0 for experts that are not chosen."""
    import torch

    def linear(name: str, x: Any, labels: str) -> Any:
        weight = getattr(experts, name)
        out = torch.einsum(labels, x, weight if experts.is_transposed else weight.transpose(1, 2))
        return out + getattr(experts, f"{name}_bias") if experts.has_bias else out

    hits = torch.nn.functional.one_hot(chosen, experts.num_experts).to(shares.dtype)
    up = linear("gate_up_proj" if experts.has_gate else "up_proj", hidden, "ti,eio->teo")
    units = experts._apply_gate(up) if experts.has_gate else experts.act_fn(up)
    out = linear("down_proj", units, "tei,eio->teo")
    if experts.has_post_expert_norm:
        out = experts.post_expert_norm(out)
    return torch.einsum("te,teo->to", (hits * shares.unsqueeze(-1)).sum(1), out.to(shares.dtype)).to(hidden.dtype)
