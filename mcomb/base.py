"""What every module shares: types, errors shown to the user, random keys by name, names of leaves, equations."""

import math
import numbers
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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


class UserError(Exception):
    """A problem a person can mend: its text says what was wrong and what to do next."""

    exit_code = 2


class Diverged(UserError):
    """A loss or a weight that something learns or measures is infinite or not a number."""

    exit_code = 1


def fold_name(key: PRNGKeyArray, name: str | int) -> PRNGKeyArray:
    """The key of one purpose among those that share `key`, the same on every machine."""
    return jax.random.fold_in(key, name if isinstance(name, int) else zlib.crc32(name.encode()))


def fold_names(key: PRNGKeyArray, names: Iterable[str]) -> dict[str, PRNGKeyArray]:
    """Return a key for each of several different names: that of `fold_name`, unless two names have the same.

    "buckeroo" and "plumless" share a CRC-32. The first of such names, in the order of the alphabet, has the key of
    `fold_name`; the others have it folded once more, with their places among them.
    """
    keys: dict[str, PRNGKeyArray] = {}
    seen: Counter[int] = Counter()
    for name in sorted(names):
        code = zlib.crc32(name.encode())
        keys[name] = fold_name(fold_name(key, name), seen[code]) if seen[code] else fold_name(key, name)
        seen[code] += 1
    return keys


def stream(seed: int, *names: str | int) -> PRNGKeyArray:
    """The root seed's key, folded with the names of what it is for: `stream(0, "order", epoch)`."""
    if not isinstance(seed, numbers.Integral) or not 0 <= seed <= LARGEST_SEED:
        raise UserError(f"there is no seed {seed}: give a whole number from 0 to {LARGEST_SEED}")
    return reduce(fold_name, names, jax.random.key(seed))


def count_examples(inputs: Inputs, labels: Labels = None) -> int:
    """How many examples the inputs have; an error unless all arrays of the inputs, and of the labels, have as many."""
    counts = {name or "the inputs": jnp.shape(leaf)[:1] for name, leaf in named_leaves(inputs).items()}
    for name, leaf in named_leaves(labels).items():
        counts[f"the labels {name}".rstrip()] = jnp.shape(leaf)[:1]
    if len({*counts.values()}) != 1 or not all(counts.values()) or counts == dict.fromkeys(counts, (0,)):
        said = ", ".join(f"{name} {count[0] if count else 'none'}" for name, count in counts.items())
        raise UserError(
            f"all inputs must have the same number of examples, one or more, along their first axis, but have: {said}"
        )
    return next(iter(counts.values()))[0]


def map_examples(function: Callable[[Any], Any], examples: Any) -> Any:
    """What a function gives for each example: at once, or one after the other where JAX cannot batch an operation."""
    try:
        return jax.vmap(function)(examples)
    except NotImplementedError:  # as for `ragged_dot` of matrices that are the same for all examples
        return jax.lax.map(function, examples)


def output_shapes(fn: Callable[..., Any], *args: Any) -> Any:
    """The shapes and dtypes of what a function returns; an error if it cannot be called with these arguments."""
    try:
        return jax.eval_shape(fn, *args)
    except UserError:
        raise
    except Exception as error:  # it is not our function
        name = getattr(fn, "__name__", "the function")
        raise UserError(f"{name} fails with what it is given ({name_error(error)}): mend one or the other") from error


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
            raise UserError(f"{name} is {value!r:.50}: give a whole number, {least} or more")


def require_alike(what: str, a: Params, b: Params) -> None:
    """An error that names the first leaf that only one of two trees has, or that has two shapes; or other branches."""
    leaves = named_leaves(a), named_leaves(b)
    for name in sorted(leaves[0].keys() | leaves[1].keys()):
        shapes = [str(jnp.shape(own[name])) if name in own else "missing" for own in leaves]
        if shapes[0] != shapes[1]:
            where = f"{name or 'the only leaf'} is {shapes[0]} in one and {shapes[1]} in the other"
            raise UserError(f"{what} differ ({where}): give trees of the same names and shapes")
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


def require_finite(what: str, tree: Params, remedy: str = "mend them") -> None:
    """An error that names the first leaf with an entry that is infinite or not a number."""
    for name, leaf in named_leaves(tree).items():
        # On a CPU by NumPy: JAX would compile a program for each shape.
        xp: Any = jnp if isinstance(leaf, jax.Array) and jax.default_backend() != "cpu" else np
        if is_inexact(leaf) and (wrong := int(np.size(leaf) - xp.isfinite(leaf).sum())):
            where = name or "its only leaf"
            raise UserError(f"{what} has {wrong} entries of {where} that are not finite: {remedy}")


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
            raise UserError(f"{name or 'the tree'} is no array but {leaf!r:.50}: leave it out")
        dtype = getattr(leaf, "dtype", None)
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
