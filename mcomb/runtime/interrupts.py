"""Handle Ctrl-C and SIGTERM promptly and reliably.

Python raises KeyboardInterrupt in the main thread only after the running C++ code returns, and XLA may compile or
compute for minutes. A second thread therefore ends the program if the main thread does not. Other packages may convert
the exception into an unrelated error, for example about an intact file.
"""

import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import NoReturn

EXIT_PATIENCE = 3.0  # seconds for the main thread to end the program
SAVING_PATIENCE = 60.0  # seconds if there are training steps to save

_asked: list[int] = []  # signals received so far
_unsaved: list[Event] = []  # set while work is unsaved


@contextmanager
def interruptible(end_now: Callable[[int], object]) -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM, and on Ctrl-C where it would end the program anyway.

    Args:
        end_now: Called with the signal's number, from another thread, if the program has not ended in time. It must
            end the process.
    """
    ignored = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    numbers = [signal.SIGTERM] if ignored else [signal.SIGTERM, signal.SIGINT]
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    watcher = Thread(target=_watch, args=(reader, end_now), daemon=True)
    watcher.start()
    before = {number: signal.signal(number, _interrupt) for number in numbers}
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        writer.close()  # ends the watcher
        watcher.join()
        reader.close()
        _asked.clear()


def _interrupt(number: int, frame: object) -> NoReturn:
    _asked.append(number)
    raise KeyboardInterrupt(number)


def _watch(signals: socket.socket, end_now: Callable[[int], object]) -> None:
    """Wait for a signal, which Python's C handler writes to the socket at once, and then for the program to end."""
    while (received := signals.recv(1)) and received[0] not in (signal.SIGINT, signal.SIGTERM):
        pass
    if not received:
        return
    start, told = time.monotonic(), False
    signals.settimeout(0.5)
    while time.monotonic() - start < (SAVING_PATIENCE if _is_unsaved() else EXIT_PATIENCE):
        try:
            again = signals.recv(1)
        except TimeoutError:
            again = None
        if again == b"":
            return
        if again and told:  # the user interrupts again; `told` excludes a lost signal that Python repeats at once
            break
        if not told and _is_unsaved() and time.monotonic() - start > 1:
            print("Interrupted: saving after the current step; interrupt again to end now.", file=sys.stderr)
            told = True
    end_now(received[0])


def _is_unsaved() -> bool:
    return any(event.is_set() for event in _unsaved)


@contextmanager
def unsaved() -> Iterator[Event]:
    """Yield an event to set while there is unsaved work, so that an interrupt leaves time to save it."""
    event = Event()
    _unsaved.append(event)
    try:
        yield event
    finally:
        _unsaved.remove(event)


def interrupted_by() -> int | None:
    """Return the last signal that asked the program to end, or None."""
    return _asked[-1] if _asked else None


def raise_again() -> None:
    """Raise the interrupt that came before, because a later failure may be its consequence."""
    if number := interrupted_by():
        raise KeyboardInterrupt(number)
