"""What every module shares: types, errors shown to the user, random keys by name, names of leaves."""

import zlib
from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, PRNGKeyArray

Array = jax.Array | np.ndarray
Params = Any  # a pytree of arrays
Apply = Callable[[Params, Array], Float[Array, "n classes"]]


class UserError(Exception):
    """A problem a person can mend: its text says what was wrong and what to do next."""

    exit_code = 2


class Diverged(UserError):
    """Something that learns met a loss or a weight that is infinite or not a number."""

    exit_code = 1


def fold_name(key: PRNGKeyArray, name: str | int) -> PRNGKeyArray:
    """The key of one purpose among those that share `key`, the same on every machine."""
    return jax.random.fold_in(key, name if isinstance(name, int) else zlib.crc32(name.encode()))


def stream(seed: int, *names: str | int) -> PRNGKeyArray:
    """The root seed's key, folded with the names of what it is for: `stream(0, "order", epoch)`."""
    return reduce(fold_name, names, jax.random.key(seed))


def leaf_name(path: tuple[Any, ...]) -> str:
    """A leaf's name, such as `conv1/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: Params) -> dict[str, Any]:
    """The leaves of a tree by name, in the tree's order."""
    return {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def map_named(function: Callable[..., Any], tree: Params, *rest: Params) -> Params:
    """The tree of `function(name, leaf, ...)`."""
    return jax.tree_util.tree_map_with_path(lambda path, *leaves: function(leaf_name(path), *leaves), tree, *rest)
