"""Locks between processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from mcomb.processes import is_first
from mcomb.progress import warn


@contextmanager
def lock(path: Path, doing: str) -> Iterator[None]:
    """Holds the lock file `path`; while another process holds it, says what that one is `doing` and waits.

    The operating system frees the lock of a process that ends, however it ends. Of processes that run together, the
    first holds it for all.
    """
    if not is_first():
        yield
        return
    file_lock = FileLock(path)
    try:
        file_lock.acquire(blocking=False)
    except Timeout:
        warn(f"another process is {doing}: waiting for it to finish")
        file_lock.acquire()
    try:
        yield
    finally:
        file_lock.release()
