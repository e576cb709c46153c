"""Files that are whole or not there, fingerprints of what they hold, and locks between processes."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from filelock import FileLock, Timeout

from mcomb.base import UserError, named_leaves


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path to write to, renamed to `path` once all is written."""
    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file, whole or not at all."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n")


def make_writable(folder: Path) -> Path:
    """The folder, made if need be; an error that names it if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error.strerror}): give another --out") from error


@contextmanager
def lock(path: Path, doing: str) -> Iterator[None]:
    """Holds the lock file `path`; while another process holds it, says what that one is `doing` and waits.

    The operating system frees the lock of a process that ends, however it ends.
    """
    file_lock = FileLock(path)
    try:
        file_lock.acquire(blocking=False)
    except Timeout:
        print(f"another process is {doing}: waiting for it to finish", flush=True)
        file_lock.acquire()
    try:
        yield
    finally:
        file_lock.release()


def fingerprint(tree: Any) -> str:
    """A short hash of a tree's leaves: their names, shapes, dtypes and values."""
    state = hashlib.blake2b(digest_size=8)
    for name, leaf in named_leaves(tree).items():
        if jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.ascontiguousarray(leaf)
        state.update(f"{name}:{array.dtype.name}{np.shape(leaf)}".encode())
        state.update(array.reshape(-1).view(np.uint8).data)
    return state.hexdigest()
