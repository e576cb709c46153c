"""Locks between processes."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from filelock import FileLock, Timeout

from mcomb.io.paths import AnyPath, in_store
from mcomb.runtime.processes import is_first
from mcomb.runtime.progress import warn

NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)  # from file systems that have none


@contextmanager
def lock(path: AnyPath, doing: str) -> Iterator[None]:
    """Holds the lock file `path`; while another process holds it, says what that one is `doing` and waits.

    The operating system frees the lock of a process that ends, however it ends. Of processes that run together, the
    first holds it for all. Object stores have no locks, nor have some network drives: one line says so.
    """
    if not is_first():
        yield
        return
    if in_store(path):
        _warn_once("/".join(str(path).split("/")[:3]))  # the bucket
        yield
        return
    file_lock = FileLock(path)
    try:
        file_lock.acquire(blocking=False)
    except Timeout:
        warn(f"another process is {doing}: waiting for it to finish")
        file_lock.acquire()
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in NO_LOCKS:
            raise
        _warn_once(f"the file system of {path.parent}")
    try:
        yield
    finally:
        file_lock.release()


@cache
def _warn_once(where: str) -> None:
    warn(f"{where} has no locks: run the commands that want the same networks or results one after the other")
