"""Lock files between processes."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from filelock import FileLock, Timeout

from mcomb.io.paths import AnyPath, in_store
from mcomb.runtime.processes import is_first
from mcomb.runtime.progress import warn

NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)  # raised by file systems without locks


@contextmanager
def lock(path: AnyPath, doing: str) -> Iterator[None]:
    """Hold the lock file `path`; while another process holds it, print `doing` and wait.

    The operating system frees the lock when its process ends for any reason. The first of several connected processes
    holds the lock for all of them. Object stores and some network drives have no locks; a warning says so once.
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
        warn(f"Another process is {doing}: waiting for it to finish.")
        file_lock.acquire()
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in NO_LOCKS:
            raise
        _warn_once(f"The file system of {path.parent}")
    try:
        yield
    finally:
        file_lock.release()


@cache
def _warn_once(where: str) -> None:
    warn(f"{where} has no locks: do not run commands that share networks or results at the same time.")
