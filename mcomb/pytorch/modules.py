"""Convert PyTorch modules to JAX functions and back; align, sweep and merge them."""

import copy
import dataclasses
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from mcomb.combination import Distribution, Draw
from mcomb.errors import UserError, brief, name_error
from mcomb.evaluation.objectives import Objective, cross_entropy
from mcomb.evaluation.sweep import Sweep
from mcomb.evaluation.sweep import sweep as sweep_params
from mcomb.matching.align import align as align_params
from mcomb.matching.matchers import Matcher
from mcomb.merging.merge import Method, as_method
from mcomb.merging.merge import merge as merge_params
from mcomb.pytorch.environment import compute_all_experts, get_environment, run_in_jax, to_jax_tensor
from mcomb.symmetry.spec import PermutationSpec
from mcomb.trees import Apply, Inputs, Labels, Params, require_alike

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
else:  # placeholders, so that annotations do not need PyTorch
    Module = Tensor = Any

OutputChoice = str | Callable[[Any], Any] | None
INTEGERS = {1: np.uint8, 2: np.int16}  # integer dtypes by size, to view float dtypes that NumPy lacks
STATISTICS = "running_mean"  # a module with this buffer has running statistics


class Slot(NamedTuple):
    """A place in a module that holds a tensor."""

    holder: Any  # a dict or a list
    key: Any
    name: str  # as in the state dict, except for plain attributes
    is_weight: bool  # whether it is a parameter or a running statistic

    @property
    def tensor(self) -> Tensor:
        """The tensor in this place."""
        return self.holder[self.key]


def align(
    a: Module,
    b: Module,
    inputs: Inputs,
    labels: Labels = None,
    *,
    matcher: str | Matcher = "weights",
    groups: str = "permutations",
    spec: PermutationSpec | None = None,
    loss: Objective = cross_entropy,
    output: OutputChoice = None,
    options: Mapping[str, Any] | None = None,
) -> Module:
    """Align module `b` to module `a`.

    Args:
        a: The reference module. It is not changed.
        b: A module of the same architecture. It is not changed.
        inputs: Example inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments.
        labels: Labels of the inputs, for matchers that minimise the loss.
        matcher: A name (`"weights"`, `"activations"`, `"straight_through"`) or a configured matcher.
        groups: "permutations", or "all" for rotations, invertible matrices, scales and signs too; see `mcomb.align`.
        spec: The symmetries of the modules; derived by default. Replaces `groups`.
        loss: The loss, for matchers that minimise it.
        output: The output to preserve; see `from_module`.
        options: Further keyword arguments of `forward`.

    Returns:
        A new module that computes the same function as `b`, with its units in the order of those of `a`.

    Raises:
        UserError: A package is missing, the modules differ, or torchax cannot run them.

    Examples:
        >>> aligned = mcomb.pytorch.align(model_a, model_b, x)
        >>> type(aligned).__name__
        'Sequential'
    """
    inputs = to_arrays(inputs)
    apply, (params_a, params_b) = same_function((a, b), inputs, output, options)
    chosen: Any = {"matcher": matcher, "groups": groups, "spec": spec, "loss": loss}
    aligned = align_params(apply, params_a, params_b, inputs, to_arrays(labels), **chosen)
    return build_module(aligned.params, b, share=True)


def sweep(
    modules: Sequence[Module],
    inputs: Inputs,
    labels: Labels,
    draw: Distribution | Draw,
    *,
    output: OutputChoice = None,
    options: Mapping[str, Any] | None = None,
    **others: Any,
) -> Sweep:
    """Measure combinations of modules along a parameter.

    Args:
        modules: Modules of one architecture: A and B for a distribution.
        inputs: Inputs with examples along the first axis: a tensor, a tuple, or a dict of keyword arguments.
        labels: Labels with examples along the first axis.
        draw: A distribution of shares, such as `mcomb.uniform`.
        output: The output to measure; see `from_module`.
        options: Further keyword arguments of `forward`.
        **others: Further options of `mcomb.sweep`, such as `points` and `statistics_from`.

    Returns:
        The sweep; see `mcomb.sweep`.

    Raises:
        UserError: A package is missing, or the modules, the data and the options do not fit together.

    Examples:
        >>> sweep = mcomb.pytorch.sweep((model_a, aligned), x, y, mcomb.linear, points=5)
        >>> sweep.loss.shape  # 5 values, 1 combination each
        (5, 1)
    """
    _require_several(modules)
    inputs = to_arrays(inputs)
    apply, networks = same_function(modules, inputs, output, options)
    return sweep_params(apply, networks, inputs, to_arrays(labels), draw, **to_arrays(others))


def merge(
    modules: Sequence[Module],
    inputs: Inputs,
    labels: Labels = None,
    *,
    method: str | Method = "learned",
    groups: str | None = None,
    spec: PermutationSpec | None = None,
    loss: Objective = cross_entropy,
    output: OutputChoice = None,
    options: Mapping[str, Any] | None = None,
) -> Module:
    """Merge aligned modules into one.

    Args:
        modules: Two or more aligned modules. They are not changed.
        inputs: Inputs with examples along the first axis: a tensor, a tuple, or a dict of keyword arguments.
        labels: Labels with examples along the first axis; only `fisher` and `learned` need them.
        method: A name (`"average"`, `"slerp"`, `"fisher"`, `"refit"`, `"learned"`) or a configured method, such as
            `mcomb.ties(base)`, whose base is a module.
        groups: "permutations" or "all" to align the modules to the first one by weights; see `mcomb.merge`. By default
            they are merged unaligned.
        spec: The symmetries of the modules; derived by default. Replaces `groups`.
        loss: The loss: a function of one example's output and label that returns a sum and a count.
        output: The output to use; see `from_module`.
        options: Further keyword arguments of `forward`.

    Returns:
        A new module.

    Raises:
        UserError: A package is missing, the modules differ, or the method changes the architecture.

    Examples:
        >>> merged = mcomb.pytorch.merge((model_a, aligned), x, method="refit")
    """
    _require_several(modules)
    inputs = to_arrays(inputs)
    apply, networks = same_function(modules, inputs, output, options)
    method = as_method(method)
    if method.base is not None:
        base = same_function((modules[0], method.base), inputs, output, options)[1][1]
        method = dataclasses.replace(method, base=base)
    chosen: Any = {"method": method, "groups": groups, "spec": spec, "loss": loss}
    merged = merge_params(apply, networks, inputs, to_arrays(labels), **chosen)
    if merged.apply is not apply:
        raise UserError(
            f"A merge by {merged.method.name} has another architecture than its modules: "
            "use mcomb.merge on the results of mcomb.pytorch.from_module."
        )
    return build_module(merged.params, modules[0], share=True)


def from_module(
    module: Module, *, output: OutputChoice = None, options: Mapping[str, Any] | None = None
) -> tuple[Apply, dict[str, Any]]:
    """Return a module as a JAX function and its weights.

    The function runs `forward` in evaluation mode. Weights are the parameters and the running statistics (BatchNorm).
    All other buffers, such as rotary frequencies and masks, are constants of the function. Arrays of tensors on the CPU
    are views, so training the module changes them. A module on PyTorch's meta device gives shapes, which suffice to
    derive its symmetries.

    Args:
        module: A module. It is not changed.
        output: The output to return: a name, or a function of all outputs. The default is `logits` if the outputs have
            names that include it, and otherwise every tensor.
        options: Further keyword arguments of `forward`, such as `{"use_cache": False}`.

    Returns:
        The function `apply(params, inputs)`, and `params`: a dict with the names of the state dict. Tied tensors share
        one entry, under their first name. Inputs are an array, a tuple of positional arguments, or a dict of keyword
        arguments.

    Raises:
        UserError: A package is missing, or a weight is not a dense tensor.

    Examples:
        >>> apply, params = mcomb.pytorch.from_module(model_a)
        >>> print(mcomb.derive_spec(apply, params, mcomb.pytorch.to_arrays(x)))
        permutation  size  arrangements  acts on
        0.weight     64    10^89         0.bias[0] 0.weight[0] 2.weight[1]
        <BLANKLINE>
        frozen by   axes
        input 0     0.weight[1]
        the output  2.bias[0] 2.weight[0]
    """
    _require_module(module)
    own = copy.deepcopy(module, {id(slot.tensor): slot.tensor for slot in _slots(module)}).eval()
    compute_all_experts(own)
    names, weights = _leaves(list(_slots(own)))
    tensors = {id(slot.tensor): (slot.tensor, names.get(_identity(slot))) for slot in _slots(own)}
    constants = {i: _to_array("a buffer", tensor) for i, (tensor, name) in tensors.items() if name is None}

    def apply(params: Params, inputs: Inputs) -> Any:
        wrapped = {name: to_jax_tensor(leaf) for name, leaf in params.items()}
        memo = {i: to_jax_tensor(constants[i]) if name is None else wrapped[name] for i, (_, name) in tensors.items()}
        running = copy.deepcopy(own, memo)  # holds JAX tensors; changes by `forward` are discarded
        args, kwargs = _arguments(jax.tree.map(to_jax_tensor, inputs))
        with run_in_jax(type(module).__name__):
            return _unwrap(_select(running(*args, **kwargs, **(options or {})), output))

    apply.__name__ = type(module).__name__
    return apply, {name: _to_array(name, tensor) for name, tensor in weights.items()}


def to_module(params: Params, like: Module) -> Module:
    """Return a copy of a module with other weights.

    Args:
        params: Weights by name, as `from_module` returns them.
        like: A module of the same architecture. It is not changed.

    Returns:
        A new module with the dtypes, devices, ties and buffers of `like`.

    Raises:
        UserError: Names or shapes differ from those of the module.

    Examples:
        >>> apply, params = mcomb.pytorch.from_module(model_a)
        >>> halved = {name: leaf / 2 for name, leaf in params.items()}
        >>> module = mcomb.pytorch.to_module(halved, like=model_a)
    """
    return build_module(params, like, share=False)


def to_arrays(tree: Any) -> Any:
    """Convert a tree of tensors to arrays, without copying tensors on the CPU.

    Args:
        tree: A tensor, or tuples, lists and mappings of tensors, such as the result of a tokenizer.

    Returns:
        The same tree of arrays.

    Examples:
        >>> inputs = mcomb.pytorch.to_arrays({"input_ids": torch.tensor([[1, 2, 3]])})
        >>> inputs["input_ids"].shape
        (1, 3)
    """
    if isinstance(tree, Mapping):
        return {name: to_arrays(value) for name, value in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(map(to_arrays, tree)) if not hasattr(tree, "_fields") else type(tree)(*map(to_arrays, tree))
    return _to_array("the inputs", tree) if _is_tensor(tree) else tree


def same_function(
    modules: Sequence[Module], inputs: Inputs, output: OutputChoice, options: Mapping[str, Any] | None
) -> tuple[Apply, tuple[Params, ...]]:
    """Return the common function of several modules and the weights of each, or raise an error if functions differ."""
    (apply, first), *others = (from_module(module, output=output, options=options) for module in modules)
    traced = _describe(apply, first, inputs)
    for i, (function, params) in enumerate(others, 1):
        names = ("A", "B") if len(modules) == 2 else ("module 0", f"module {i}")
        require_alike("the modules", first, params, names)
        if _describe(function, params, inputs) != traced:
            raise UserError(
                f"{names[0]} and {names[1]} have weights of the same shapes but compute different functions of them: "
                "use modules of one configuration."
            )
    return apply, (first, *(params for _, params in others))


def _describe(apply: Apply, params: Params, inputs: Inputs) -> tuple[str, list[bytes]]:
    """Return the equations of a function, without addresses of objects, and its constants."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), params)
    traced = jax.make_jaxpr(apply)(shapes, inputs)
    return re.sub(r"0x[0-9a-f]+", "", str(traced)), [np.asarray(const).tobytes() for const in traced.consts]


def _slots(module: Module) -> Iterator[Slot]:
    """Yield all places in a module that hold tensors: parameters, buffers and other attributes."""
    for prefix, part in module.named_modules():
        stem = f"{prefix}." if prefix else ""
        has_statistics = part._buffers.get(STATISTICS) is not None
        for attribute, value in vars(part).items():
            holder: Any = value
            entries: Iterable[tuple[Any, Any]] = ()
            if isinstance(value, dict | list):
                entries = value.items() if isinstance(value, dict) else enumerate(value)
            if _is_tensor(value):
                holder, entries = vars(part), [(attribute, value)]
            for key, entry in list(entries):
                if not _is_tensor(entry):
                    continue
                is_statistic = attribute == "_buffers" and has_statistics and entry.is_floating_point()
                yield Slot(holder, key, f"{stem}{key}", attribute == "_parameters" or is_statistic)


def _leaves(slots: Sequence[Slot]) -> tuple[dict[Hashable, str], dict[str, Tensor]]:
    """Return the names of all weights by identity, and the weights by name; tied weights share the first name."""
    names: dict[Hashable, str] = {}
    weights: dict[str, Tensor] = {}
    for slot in slots:
        if slot.is_weight and _identity(slot) not in names:
            names[_identity(slot)] = slot.name
            weights[slot.name] = slot.tensor
    return names, weights


def leaf_names(module: Module) -> dict[str, str]:
    """Return the name of the leaf for each weight of the state dict; tied weights share one."""
    slots = list(_slots(module))
    names = _leaves(slots)[0]
    return {slot.name: names[_identity(slot)] for slot in slots if slot.is_weight}


def _identity(slot: Slot) -> Hashable:
    """Return a key that two slots share if their tensors occupy the same memory."""
    tensor = slot.tensor
    if str(tensor.layout) != "torch.strided" or tensor.device.type == "meta" or not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def build_module(params: Params, like: Module, share: bool) -> Module:
    """Return a copy of a module with other weights, optionally sharing memory with arrays that own theirs."""
    import torch

    slots = list(_slots(like))
    names, weights = _leaves(slots)
    shapes = {name: jax.ShapeDtypeStruct(tuple(tensor.shape), np.float32) for name, tensor in weights.items()}
    require_alike("the weights", dict(params), shapes, ("the parameters", "the module"))
    made: dict[str, Tensor] = {}
    memo: dict[int, Tensor] = {}
    for slot in slots:
        old, name = slot.tensor, names.get(_identity(slot))
        if name is None:
            memo[id(old)] = old.detach().clone()
            continue
        if name not in made:
            new = to_tensor(params[name], share).to(old.device, old.dtype)
            is_parameter = isinstance(old, torch.nn.Parameter)
            made[name] = torch.nn.Parameter(new, old.requires_grad) if is_parameter else new
        memo[id(old)] = made[name]
    return copy.deepcopy(like, memo)


def _to_array(name: str, tensor: Tensor) -> Any:
    """Convert a tensor to an array, without a copy if it is contiguous on the CPU, or to a shape if it has no data."""
    if tensor.device.type == "meta":
        return jax.ShapeDtypeStruct(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    try:
        here = tensor.detach().cpu().resolve_conj().resolve_neg()
        dtype = getattr(ml_dtypes, str(here.dtype).removeprefix("torch."), None)
        if dtype is None:
            return here.numpy()
        import torch

        integers = {1: torch.uint8, 2: torch.int16}[here.element_size()]
        return here.contiguous().view(integers).numpy().view(dtype)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise UserError(f"{name} is not a dense tensor in memory ({name_error(error)}): convert it first.") from error


def to_tensor(array: Any, share: bool) -> Tensor:
    """Convert an array to a tensor that shares its memory, if `share` is set and the array owns its memory."""
    import torch

    own = np.asarray(array)
    if not (share and own.flags.owndata and own.flags.writeable and own.flags.c_contiguous):
        own = np.array(own, order="C")
    dtype = getattr(torch, own.dtype.name, None) if hasattr(ml_dtypes, own.dtype.name) else None
    return torch.from_numpy(own) if dtype is None else torch.from_numpy(own.view(INTEGERS[own.itemsize])).view(dtype)


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments for a module."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})


def _select(outputs: Any, output: OutputChoice) -> Any:
    """Select one output of a module."""
    if callable(output):
        return output(outputs)
    named = dict(outputs) if isinstance(outputs, Mapping) else None
    if named is None and dataclasses.is_dataclass(outputs):
        named = vars(outputs)
    if output is not None:
        if named is None or output not in named:
            known = ", ".join(named) if named else "none with names"
            raise UserError(f"The module has no output {brief(output)}: choose one of its outputs ({known}).")
        return named[output]
    if named is None:
        return outputs
    return named["logits"] if "logits" in named else {name: own for name, own in named.items() if _is_tensor(own)}


def _unwrap(outputs: Any) -> Any:
    """Return the arrays inside outputs, with None for values that are not tensors."""
    return jax.tree.map(
        lambda own: (own.jax() if hasattr(own, "jax") else own.numpy()) if _is_tensor(own) else None,
        outputs,
        is_leaf=_is_tensor,
    )


def _is_tensor(value: Any) -> bool:
    """Return whether a value is a PyTorch tensor."""
    return hasattr(value, "__torch_function__") and hasattr(value, "is_floating_point")


def _require_several(modules: Any) -> None:
    if not isinstance(modules, Sequence) or len(modules) < 2:
        raise UserError(f"Expected two or more modules, not {brief(modules)}: pass a tuple of modules.")


def _require_module(module: Any) -> None:
    """Raise an error unless the packages are installed and `module` is a PyTorch module."""
    get_environment()
    import torch

    if not isinstance(module, torch.nn.Module):
        raise UserError(f"The network is a {type(module).__name__}, not a PyTorch module: pass a torch.nn.Module.")
