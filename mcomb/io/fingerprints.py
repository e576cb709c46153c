"""Compute fingerprints: short hashes that identify networks, matchings and data."""

import hashlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mcomb.io.paths import AnyPath
from mcomb.trees import named_leaves


def fingerprint(tree: Any) -> str:
    """Return a short hash of a tree's leaves: their names, shapes, dtypes and values."""
    state = hashlib.blake2b(digest_size=8)
    for name, leaf in named_leaves(tree).items():
        is_key = jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)
        array = np.ascontiguousarray(jax.random.key_data(leaf) if is_key else leaf)
        state.update(f"{name}:{array.dtype.name}{np.shape(leaf)}".encode())
        state.update(array.reshape(-1).view(np.uint8).data)
    return state.hexdigest()


def file_fingerprint(path: AnyPath) -> str | None:
    """Return a short hash of a file's content, or None if there is no file."""
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest() if path.is_file() else None


def code_fingerprint() -> str:
    """Return a short hash of all code of this package."""
    state, root = hashlib.blake2b(digest_size=8), Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        state.update(f"{path.relative_to(root)}:".encode() + path.read_bytes())
    return state.hexdigest()
