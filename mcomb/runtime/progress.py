"""What programs say while they work, and at their end: lines, bars, colours, JSON.

Whatever is about the work goes to standard error, and the outcome to standard output. Of several processes the first
speaks.
"""

import json
import os
import sys
from typing import Any

from tqdm import tqdm

from mcomb.runtime.processes import is_first

SELDOM = 30.0  # seconds between the lines about some work, where nobody watches a terminal
COLOURS = {"red": 31, "green": 32, "yellow": 33}


class _Mode:
    quiet = False
    json = False


_mode = _Mode()


def set_mode(quiet: bool = False, json: bool = False) -> None:
    """Whether this program is to say nothing of its work, and whether its outcome is to be JSON."""
    _mode.quiet, _mode.json = quiet, json


def set_progress(shown: bool) -> None:
    """Show or hide progress bars and messages about ongoing work.

    Args:
        shown: False hides them.

    Examples:
        >>> mcomb.set_progress(False)
    """
    _mode.quiet = not shown


class _Bar(tqdm):
    """A bar on a terminal."""

    def close(self) -> None:
        """Ends the bar's line and moves the other bars up to it.

        Tqdm leaves them a line lower, with an old copy of one on the line where the next message goes.
        """
        with self.get_lock():
            others = sorted((bar for bar in self._instances if bar is not self), key=lambda bar: abs(bar.pos))
            if self.disable or not others:
                super().close()
                return
            for bar in (*others, self):
                bar.clear(nolock=True)
            super().close()
            for line, bar in enumerate(others):
                bar.pos = -line
                bar.refresh(nolock=True)


class _Lines(tqdm):
    """A bar as lines for a log: when it begins, now and then, and when it ends."""

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Writes a line; the last one is ended by `close`."""
        numbers = self.format_dict
        begins = self.n == self.initial and not self.disable
        percentage = f"{self.n / self.total:.0%}, " if self.total else ""
        if begins:
            text = f"{self.desc}: begins" + (f" at {percentage[:-2]}" if self.n and self.total else "")
        else:
            time = "in {elapsed}" if self.disable else "{elapsed} so far" + (", {remaining} left" if self.total else "")
            count = "{n_fmt} of {total_fmt} {unit}" if self.total else "{n_fmt}{unit}"
            line = f"{{desc}}: {percentage}{count}, {time}, {{rate_fmt}}{{postfix}}"
            text = self.format_meter(**numbers | {"bar_format": line, "ncols": None})
        self.fp.write(text if self.disable else f"{text}\n")
        self.fp.flush()
        return True

    def clear(self, nolock: bool = False) -> None:
        """Nothing: a line stays."""


def progress_bar(total: int | None, unit: str, what: str, done: int = 0, delay: float = 0.0) -> "tqdm[Any]":
    """A bar with rate and time left; where nobody watches a terminal, a line now and then.

    Without a total it counts. For the first `delay` seconds it is not shown.
    """
    watched = sys.stderr.isatty()
    kind, seconds = (_Bar, 0.2) if watched else (_Lines, SELDOM)
    return kind(
        total=total,
        initial=done,
        delay=delay,
        desc=what,
        unit=unit,
        unit_scale=(total or 0) >= 1_000,  # small counts are whole numbers
        dynamic_ncols=watched,
        mininterval=seconds,
        maxinterval=max(10.0, seconds),
        disable=_mode.quiet or not is_first(),
    )


def say(line: str) -> None:
    """Prints a line about the work, above the bars that there are."""
    if not _mode.quiet:
        warn(line)


def warn(line: str) -> None:
    """Prints a line that a person should see even if the program is to be quiet."""
    if is_first():
        _print(line, sys.stderr)


def _print(text: str, stream: Any) -> None:
    """Prints between the bars or lines of other threads, never within one."""
    with tqdm.get_lock():
        if sys.stderr.isatty():
            tqdm.write(text, file=stream)
            stream.flush()
        else:
            print(text, file=stream, flush=True)


def show(text: str) -> None:
    """Prints an outcome for a person; nothing if it is to be JSON."""
    if is_first() and not _mode.quiet and not _mode.json:
        _print(text, sys.stdout)


def show_json(value: Any) -> None:
    """Prints the outcome of the whole program as JSON, if it is to be that."""
    if is_first() and _mode.json:
        print(json.dumps(value, indent=1, allow_nan=False), flush=True)


def coloured(text: str, colour: str, stream: Any) -> str:
    """The text in a colour, if the stream is a terminal and nobody has set NO_COLOR."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m"
