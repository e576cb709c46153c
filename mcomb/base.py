"""What every module shares: types, errors shown to the user, random keys by name, names of leaves, equations."""

import math
import numbers
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jaxtyping import PRNGKeyArray

Array = jax.Array | np.ndarray
Params = Any  # a pytree of arrays
Inputs = Any  # an array, or a pytree of arrays, whose first axis is that of examples
Labels = Any  # the same, of whatever the loss takes
Apply = Callable[[Params, Inputs], Any]  # returns outputs, such as logits, of the same kind

LARGEST_SEED = 2**32 - 1  # JAX takes larger ones modulo 2³² as long as it can
SHOWN = 4  # names that an error lists before it counts the rest


class UserError(Exception):
    """A problem a person can mend: its text says what was wrong and what to do next."""

    exit_code = 2


class Diverged(UserError):
    """A loss or a weight that something learns or measures is infinite or not a number."""

    exit_code = 1


def fold_name(key: PRNGKeyArray, name: str | int) -> PRNGKeyArray:
    """The key of one purpose among those that share `key`, the same on every machine."""
    return jax.random.fold_in(key, name if isinstance(name, int) else zlib.crc32(name.encode()))


def stream(seed: int, *names: str | int) -> PRNGKeyArray:
    """The root seed's key, folded with the names of what it is for: `stream(0, "order", epoch)`."""
    if not isinstance(seed, numbers.Integral) or not 0 <= seed <= LARGEST_SEED:
        raise UserError(f"there is no seed {seed!s:.50}: give a whole number from 0 to {LARGEST_SEED}")
    return reduce(fold_name, names, jax.random.key(seed))


def list_some(names: Collection[Any]) -> str:
    """Join the first few names, and count the rest: `a, b, c, d and 7 more`."""
    shown = ", ".join(f"{name!s:.80}" for name in list(names)[:SHOWN])
    return shown + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def brief(value: Any) -> str:
    """Return the start of a value's representation, on one line."""
    return " ".join(repr(value)[:200].split())[:50]


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


def first_words(error: Exception) -> str:
    """The start of what an error says, on one line."""
    said = " ".join(str(error).split()) or type(error).__name__
    return said if len(said) <= 150 else f"{said[:151].rpartition(' ')[0] or said[:150]}…"


def name_error(error: Exception) -> str:
    """The type of an error, whose words alone may say little, and the start of what it says."""
    return f"{type(error).__name__}: {first_words(error)}" if str(error).strip() else type(error).__name__


def require_positive(**values: int | float | None) -> None:
    """An error that names the first of the values that is no positive, finite number; None is left out."""
    for name, value in values.items():
        try:
            is_positive = value is None or bool(0 < value < math.inf)
        except (TypeError, ValueError):  # it is no number
            is_positive = False
        if not is_positive:
            raise UserError(f"{name} is {value!s:.50}: give more than 0")


def require_whole(least: int = 1, **values: int) -> None:
    """An error that names the first of the values that is no whole number from `least` on."""
    for name, value in values.items():
        if not isinstance(value, numbers.Integral) or value < least:
            raise UserError(f"{name} is {brief(value)}: give a whole number, {least} or more")


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


def keep_non_floats(tree: Params, original: Params) -> Params:
    """The tree with the original's leaves where these are no floats: a device has no 64-bit integers of NumPy's."""
    return jax.tree.map(lambda new, old: new if is_inexact(old) else old, tree, original)


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


def all_equations(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> Iterator[core.JaxprEqn]:
    """Yields the equations of a jaxpr and of all that are inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        yield from inner_equations(eqn)


def inner_equations(eqn: core.JaxprEqn) -> Iterator[core.JaxprEqn]:
    """Yields the equations of all jaxprs inside an equation."""
    for inner in inner_jaxprs(eqn):
        yield from all_equations(inner)


def inner_jaxprs(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr | core.ClosedJaxpr]:
    """Yields the jaxprs among an equation's parameters, not those inside them."""
    kinds = core.Jaxpr, core.ClosedJaxpr
    for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda value: isinstance(value, kinds)):
        if isinstance(value, kinds):
            yield value
