"""A request to end the program, by Ctrl-C or SIGTERM, that is not lost on its way.

It is a KeyboardInterrupt in the main thread, wherever that is. Other packages may turn it into an error of their own,
as that a file cannot be read: a good one, which must not be taken for damaged then.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

_asked: list[int] = []  # the signals that have come


@contextmanager
def interruptible() -> Iterator[None]:
    """Notes the signals that come meanwhile; Ctrl-C only where it would end the program anyway."""
    ignored = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    numbers = [signal.SIGTERM] if ignored else [signal.SIGTERM, signal.SIGINT]
    before = {number: signal.signal(number, _interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _asked.clear()


def _interrupt(number: int, frame: object) -> NoReturn:
    _asked.append(number)
    raise KeyboardInterrupt(number)


def interrupted_by() -> int | None:
    """The signal that has asked the program to end, if one has."""
    return _asked[-1] if _asked else None


def raise_again() -> None:
    """Raises the interrupt that came before, for what has failed since may have failed because of it."""
    if number := interrupted_by():
        raise KeyboardInterrupt(number)
