"""Running one function on several arguments at once, in threads that stop together and share memory."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Condition, Event
from typing import TypeVar

T = TypeVar("T")


def run_side_by_side(work: Callable[[T, Event], None], arguments: Sequence[T]) -> None:
    """Calls work(argument, stop) for each argument, in a thread of its own.

    If one of them fails, or the user interrupts, `stop` is set: the others should end soon, and how they end is of no
    interest. The first error is then raised here.
    """
    stop, errors = Event(), list[BaseException]()

    def run(argument: T) -> None:
        try:
            work(argument, stop)
        except BaseException as error:
            errors.append(error)  # before the others hear of it, and fail in their turn
            stop.set()

    with ThreadPoolExecutor(max(1, len(arguments))) as pool:
        try:
            wait([pool.submit(run, argument) for argument in arguments])
        except BaseException:
            stop.set()
            raise
    if errors:
        raise errors[0]


class Budget:
    """Memory that threads share: each reserves its part, and waits while the others hold too much."""

    def __init__(self, size: float):
        self.size = self._left = size
        self._changed = Condition()

    @contextmanager
    def reserve(self, needed: float, stop: Event, on_wait: Callable[[], object]) -> Iterator[None]:
        """Hold `needed` bytes, at most `size`; call `on_wait` before waiting for them, and raise if `stop` is set."""
        with self._changed:
            if needed > self._left:
                on_wait()
            while needed > self._left and not stop.is_set():
                self._changed.wait(timeout=0.2)
            if stop.is_set():
                raise RuntimeError("stopped while waiting for memory")
            self._left -= needed
        try:
            yield
        finally:
            with self._changed:
                self._left += needed
                self._changed.notify_all()
