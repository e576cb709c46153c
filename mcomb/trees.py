"""Parameter trees: types, leaf names, comparisons and checks."""

import numbers
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mcomb.errors import Diverged, UserError, brief, first_words, list_some

Array = jax.Array | np.ndarray
Params = Any  # a pytree of arrays
Inputs = Any  # an array, or a pytree of arrays, whose first axis is that of examples
Labels = Any  # the same, of whatever the loss takes
Apply = Callable[[Params, Inputs], Any]  # returns outputs, such as logits, of the same kind


def from_lists(tree: Any) -> Any:
    """Turn every list or tuple of numbers in a tree, such as `[[1, 2], [3, 4]]`, into an array.

    Lists of arrays, and those whose rows differ in length, stay branches of the tree.
    """

    def is_list(node: Any) -> bool:
        if type(node) not in (list, tuple) or not node:  # an empty one is a tree without leaves
            return False
        return all(isinstance(x, numbers.Number) or is_list(x) for x in node)

    def convert(node: Any) -> Any:
        try:
            return np.asarray(node) if is_list(node) else node
        except ValueError:
            return node

    return jax.tree.map(convert, tree, is_leaf=is_list)


def count_examples(inputs: Inputs, labels: Labels = None) -> int:
    """How many examples the inputs have; an error unless all arrays of the inputs, and of the labels, have as many."""
    counts = {name or "the inputs": jnp.shape(leaf)[:1] for name, leaf in named_leaves(inputs).items()}
    for name, leaf in named_leaves(labels).items():
        counts[f"the labels {name}".rstrip()] = jnp.shape(leaf)[:1]
    if len({*counts.values()}) != 1 or not all(counts.values()) or counts == dict.fromkeys(counts, (0,)):
        said = list_some([f"{name:.60} {count[0] if count else 'none'}" for name, count in counts.items()])
        remedy = "give as many of each" if all(counts.values()) else "give arrays, as np.asarray makes of lists"
        raise UserError(
            "all inputs must have the same number of examples, one or more, along their first axis, but have: "
            f"{said}; {remedy}"
        )
    return next(iter(counts.values()))[0]


def map_examples(function: Callable[[Any], Any], examples: Any) -> Any:
    """What a function gives for each example: at once, or one after the other where JAX cannot batch an operation."""
    try:
        return jax.vmap(function)(examples)
    except NotImplementedError:  # as for `ragged_dot` of matrices that are the same for all examples
        return jax.lax.map(function, examples)


def output_shapes(fn: Callable[..., Any], *args: Any) -> Any:
    """Return the shapes and dtypes of a function's results; raise an error if it fails on these arguments."""
    if not callable(fn):
        raise UserError(f"the function is {brief(fn)}: give a function of parameters and inputs")
    try:
        return jax.eval_shape(fn, *args)
    except UserError:
        raise
    except Exception as error:  # it is not our function
        for arg in args:
            named_leaves(arg)  # the reason may be an argument that is no array
        name, raised = getattr(fn, "__name__", "the function"), type(error).__name__
        why = f"raised {raised} on these arguments ({first_words(error)})" if str(error).strip() else f"raised {raised}"
        raise UserError(f"{name} {why}: {_suggest_call(fn, *args)}") from error


def _suggest_call(fn: Callable[..., Any], params: Params, *rest: Any) -> str:
    """Say what to write instead of a call that fails: a module of Flax's takes its parameters inside a dict."""
    flax = getattr(fn, "apply", fn)
    attempts = {'give lambda params, x: model.apply({"params": params}, x)': (flax, {"params": params})}
    if isinstance(params, Mapping) and "params" in params:
        attempts['give the parameters alone, variables["params"]'] = fn, params["params"]
    for suggestion, (function, argument) in attempts.items():
        try:
            jax.eval_shape(function, argument, *rest)
        except Exception:  # this was not the reason
            continue
        return suggestion
    return "give parameters and inputs of the shapes that it takes, or fix it"


def require_alike(what: str, a: Params, b: Params, names: tuple[str, str] = ("A", "B")) -> None:
    """Raise an error that names the first leaf that only one tree has, or that has two shapes; or other branches."""
    leaves = named_leaves(a), named_leaves(b)
    for name in sorted(leaves[0].keys() | leaves[1].keys()):
        shapes = [str(jnp.shape(own[name])) if name in own else "missing" for own in leaves]
        if shapes[0] != shapes[1]:
            where = f"{name or 'the only leaf'} is {shapes[0]} in {names[0]} and {shapes[1]} in {names[1]}"
            raise UserError(f"{what} differ ({where}): give networks of one architecture and width")
    structures: list[Any] = [jax.tree.structure(tree) for tree in (a, b)]
    if structures[0] != structures[1]:
        where = " and ".join(f"{structure!s:.100}" for structure in structures)
        raise UserError(f"{what} differ in their branches ({where}): give trees of the same containers")


def is_inexact(leaf: Any) -> bool:
    """Whether an array has float or complex entries."""
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def at_least_float32(values: Any) -> Any:
    """Return half precision in single, and anything else as it is: sums and averages would lose too much."""
    dtype = jnp.result_type(values)
    is_half = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return values.astype(np.float32) if is_half else values


def in_dtype_of(leaf: Any, values: Any) -> Any:
    """Return the values in the dtype of a leaf; a plain number, also one that JAX traces, has none."""
    if not hasattr(leaf, "dtype") or getattr(leaf, "weak_type", False):
        return values
    return values.astype(jnp.result_type(leaf) if isinstance(values, jax.Array) else leaf.dtype)


def keep_non_floats(tree: Params, original: Params) -> Params:
    """Return the tree with the original's leaves where these are neither floats nor JAX arrays.

    Without x64, JAX cuts 64-bit integers of NumPy to 32 bits. Integers that were JAX arrays lose nothing, and stay on
    the devices of the tree's floats.
    """
    return jax.tree.map(lambda new, old: new if is_inexact(old) or isinstance(old, jax.Array) else old, tree, original)


def require_finite(what: str, tree: Params, remedy: str = "replace them") -> None:
    """Raise an error that names the first leaf with an entry that is infinite or not a number."""
    for name, leaf in named_leaves(tree).items():
        # On a CPU by NumPy: JAX would compile a program for each shape.
        xp: Any = jnp if isinstance(leaf, jax.Array) and jax.default_backend() != "cpu" else np
        if is_inexact(leaf) and (wrong := int(np.size(leaf) - xp.isfinite(leaf).sum())):
            where = f"{name} in {what}" if name else what
            raise UserError(f"{wrong} of {np.size(leaf)} entries of {where} are not finite: {remedy}")


def require_finite_result(what: str, result: Any, inputs: Inputs, *networks: Params) -> None:
    """Raise an error unless a result is finite, which names the inputs or weights that are not."""
    if all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result) if is_inexact(leaf)):
        return
    require_finite("the inputs", inputs)
    for i, network in enumerate(networks):
        require_finite(f"network {i}", network)
    raise Diverged(f"{what} overflow on these inputs: scale inputs or weights down")


def leaf_name(path: tuple[Any, ...]) -> str:
    """A leaf's name, such as `conv1/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: Params) -> dict[str, Any]:
    """The leaves of a tree by name, in the tree's order; an error if one of them is no number or array of these."""
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if (name := leaf_name(path)) in leaves:
            raise UserError(f"two leaves of the tree have the name {name}: rename a branch with a / in its key")
        if not hasattr(leaf, "shape") and not isinstance(leaf, numbers.Number):
            raise UserError(f"{name or 'the tree'} is no array but {brief(leaf)}: leave it out")
        dtype = getattr(leaf, "dtype", None)
        if not isinstance(dtype, np.dtype | None) and not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
            raise UserError(f"{name or 'the tree'} is a {kind}: give an array, as tensor.detach().numpy() of PyTorch")
        if isinstance(dtype, np.dtype) and dtype.kind != "b" and not jnp.issubdtype(dtype, np.number):
            raise UserError(f"{name or 'the tree'} has the dtype {dtype}, no numbers: leave it out")
        leaves[name] = leaf
    return leaves


def map_named(function: Callable[..., Any], tree: Params, *rest: Params) -> Params:
    """The tree of `function(name, leaf, ...)`."""
    return jax.tree_util.tree_map_with_path(lambda path, *leaves: function(leaf_name(path), *leaves), tree, *rest)
