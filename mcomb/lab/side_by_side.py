"""Running one function on several arguments at once, in threads that stop together."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Event
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
