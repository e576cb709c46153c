"""Running one function on several arguments at once, in threads that stop together."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from queue import SimpleQueue
from threading import Event
from typing import TypeVar

T = TypeVar("T")
P = TypeVar("P")


def run_side_by_side(work: Callable[[T, P, Event], None], arguments: Sequence[T], places: Sequence[P]) -> None:
    """Calls work(argument, place, stop) for each argument, in as many threads as there are places, each in its own.

    If one of them fails, or the user interrupts, `stop` is set: the others should end soon, and how they end is of no
    interest. The first error is then raised here.
    """
    stop, free, errors = Event(), SimpleQueue[P](), list[BaseException]()
    for place in places:
        free.put(place)

    def in_a_free_place(argument: T) -> None:
        place = free.get()
        try:
            if not stop.is_set():
                work(argument, place, stop)
        except BaseException as error:
            errors.append(error)  # before the others hear of it, and fail in their turn
            stop.set()
        finally:
            free.put(place)

    with ThreadPoolExecutor(len(places)) as pool:
        try:
            wait([pool.submit(in_a_free_place, argument) for argument in arguments])
        except BaseException:
            stop.set()
            raise
    if errors:
        raise errors[0]
