"""Name, compare and check the leaves of parameter trees."""

import numbers
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mcomb.errors import Diverged, UserError, brief, first_words, list_some

Array = jax.Array | np.ndarray
Params = Any  # a pytree of arrays
Inputs = Any  # an array, or a pytree of arrays, with examples along the first axis
Labels = Any  # likewise, in any form that the loss takes
Apply = Callable[[Params, Inputs], Any]  # returns outputs, such as logits, in the same form


def from_lists(tree: Any) -> Any:
    """Turn every list or tuple of numbers in a tree, such as `[[1, 2], [3, 4]]`, into an array.

    Lists of arrays and lists whose rows differ in length remain branches of the tree.
    """

    def is_list(node: Any) -> bool:
        if type(node) not in (list, tuple) or not node:  # an empty list is a tree without leaves
            return False
        return all(isinstance(x, numbers.Number) or is_list(x) for x in node)

    def convert(node: Any) -> Any:
        try:
            return np.asarray(node) if is_list(node) else node
        except ValueError:
            return node

    return jax.tree.map(convert, tree, is_leaf=is_list)


def count_examples(inputs: Inputs, labels: Labels = None) -> int:
    """Return the number of examples; raise an error unless all arrays of inputs and labels have the same number."""
    counts = {name or "the inputs": jnp.shape(leaf)[:1] for name, leaf in named_leaves(inputs).items()}
    for name, leaf in named_leaves(labels).items():
        counts[f"the labels {name}".rstrip()] = jnp.shape(leaf)[:1]
    if len({*counts.values()}) != 1 or not all(counts.values()) or counts == dict.fromkeys(counts, (0,)):
        listed = list_some([f"{name:.60} {count[0] if count else 'none'}" for name, count in counts.items()])
        remedy = "pass as many of each" if all(counts.values()) else "convert lists with np.asarray"
        raise UserError(
            "All inputs must have the same number of examples, one or more, along their first axis, but have: "
            f"{listed}; {remedy}."
        )
    return next(iter(counts.values()))[0]


def map_examples(function: Callable[[Any], Any], examples: Any) -> Any:
    """Apply a function to each example: in one batch, or one by one if JAX cannot batch an operation."""
    try:
        return jax.vmap(function)(examples)
    except NotImplementedError:  # such as `ragged_dot` with matrices that all examples share
        return jax.lax.map(function, examples)


def output_shapes(fn: Callable[..., Any], *args: Any) -> Any:
    """Return the shapes and dtypes of a function's results; raise an error if the function fails."""
    if not callable(fn):
        raise UserError(f"The function is {brief(fn)}: pass a function of parameters and inputs.")
    try:
        return jax.eval_shape(fn, *args)
    except UserError:
        raise
    except Exception as error:  # the user's function may raise anything
        for arg in args:
            named_leaves(arg)  # the cause may be an argument that is not an array
        name, raised = getattr(fn, "__name__", "The function"), type(error).__name__
        why = f"raised {raised} on these arguments ({first_words(error)})" if str(error).strip() else f"raised {raised}"
        raise UserError(f"{name} {why}: {_suggest_call(fn, *args)}.") from error


def _suggest_call(fn: Callable[..., Any], params: Params, *rest: Any) -> str:
    """Suggest a replacement for a call that fails: Flax modules take their parameters inside a dict."""
    flax = getattr(fn, "apply", fn)
    attempts = {'pass lambda params, x: model.apply({"params": params}, x)': (flax, {"params": params})}
    if isinstance(params, Mapping) and "params" in params:
        attempts['pass the parameters alone, variables["params"]'] = fn, params["params"]
    for suggestion, (function, argument) in attempts.items():
        try:
            jax.eval_shape(function, argument, *rest)
        except Exception:  # not the cause
            continue
        return suggestion
    return "pass parameters and inputs of the shapes that it takes, or fix the function"


def require_alike(what: str, a: Params, b: Params, names: tuple[str, str] = ("A", "B")) -> None:
    """Raise an error unless two trees have the same leaves, shapes and containers, and name the first difference."""
    leaves = named_leaves(a), named_leaves(b)
    for name in sorted(leaves[0].keys() | leaves[1].keys()):
        shapes = [str(jnp.shape(own[name])) if name in own else "missing" for own in leaves]
        if shapes[0] != shapes[1]:
            where = f"{name or 'the only leaf'} is {shapes[0]} in {names[0]} and {shapes[1]} in {names[1]}"
            raise UserError(f"{what} differ ({where}): pass networks of one architecture and width.")
    structures: list[Any] = [jax.tree.structure(tree) for tree in (a, b)]
    if structures[0] != structures[1]:
        where = " and ".join(f"{structure!s:.100}" for structure in structures)
        raise UserError(f"{what} differ in their branches ({where}): pass trees of the same containers.")


def is_inexact(leaf: Any) -> bool:
    """Return whether an array has float or complex entries."""
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def at_least_float32(values: Any) -> Any:
    """Return half-precision values in float32, because sums would lose too much, and other values unchanged."""
    dtype = jnp.result_type(values)
    is_half = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return values.astype(np.float32) if is_half else values


def in_dtype_of(leaf: Any, values: Any) -> Any:
    """Return the values in the dtype of a leaf, or unchanged if the leaf is a Python number, traced or not."""
    if not hasattr(leaf, "dtype") or getattr(leaf, "weak_type", False):
        return values
    return values.astype(jnp.result_type(leaf) if isinstance(values, jax.Array) else leaf.dtype)


def keep_non_floats(tree: Params, original: Params) -> Params:
    """Return the tree with the original leaves in place of those that are neither floats nor JAX arrays.

    Without x64, JAX truncates NumPy's 64-bit integers to 32 bits. Integers that were JAX arrays lose nothing and stay
    on the devices of the tree's floats.
    """
    return jax.tree.map(lambda new, old: new if is_inexact(old) or isinstance(old, jax.Array) else old, tree, original)


def require_finite(what: str, tree: Params, remedy: str = "replace them") -> None:
    """Raise an error unless all entries of all leaves are finite."""
    for name, leaf in named_leaves(tree).items():
        # NumPy on CPU, because JAX would compile a program for each shape.
        xp: Any = jnp if isinstance(leaf, jax.Array) and jax.default_backend() != "cpu" else np
        if is_inexact(leaf) and (wrong := int(np.size(leaf) - xp.isfinite(leaf).sum())):
            where = f"{name} in {what}" if name else what
            raise UserError(f"{wrong} of {np.size(leaf)} entries of {where} are not finite: {remedy}.")


def require_finite_result(what: str, result: Any, inputs: Inputs, *networks: Params) -> None:
    """Raise an error unless a result is finite, and name the inputs or weights that are not."""
    if all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result) if is_inexact(leaf)):
        return
    require_finite("the inputs", inputs)
    for i, network in enumerate(networks):
        require_finite(f"network {i}", network)
    raise Diverged(f"{what} overflow on these inputs: scale inputs or weights down.")


def leaf_name(path: tuple[Any, ...]) -> str:
    """Return a leaf's name, such as `conv1/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: Params) -> dict[str, Any]:
    """Return the leaves of a tree by name, in the tree's order; raise an error if a leaf is not numeric."""
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if (name := leaf_name(path)) in leaves:
            raise UserError(f"Two leaves of the tree have the name {name}: rename a branch with a / in its key.")
        if not hasattr(leaf, "shape") and not isinstance(leaf, numbers.Number):
            remedy = "pass its .params" if hasattr(leaf, "params") else "leave it out"
            remedy = "use mcomb.pytorch" if hasattr(leaf, "state_dict") else remedy
            raise UserError(f"{name or 'The tree'} is not an array but {brief(leaf)}: {remedy}.")
        dtype = getattr(leaf, "dtype", None)
        if not isinstance(dtype, np.dtype | None) and not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
            raise UserError(
                f"{name or 'The tree'} is a {kind}: pass an array, such as PyTorch's tensor.detach().numpy()."
            )
        if isinstance(dtype, np.dtype) and dtype.kind != "b" and not jnp.issubdtype(dtype, np.number):
            raise UserError(f"{name or 'The tree'} has the dtype {dtype}, which is not numeric: leave it out.")
        leaves[name] = leaf
    return leaves


def map_named(function: Callable[..., Any], tree: Params, *rest: Params) -> Params:
    """Map `function(name, leaf, ...)` over a tree."""
    return jax.tree_util.tree_map_with_path(lambda path, *leaves: function(leaf_name(path), *leaves), tree, *rest)
