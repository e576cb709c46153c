"""Print messages, progress bars, colours and JSON.

Messages about ongoing work go to standard error and results to standard output. Only the first of several processes
prints.
"""

import json
import os
import sys
from typing import Any

from tqdm import tqdm

from mcomb.runtime.processes import is_first

SELDOM = 30.0  # seconds between progress lines in a log
SILENCE = 3.0  # seconds before a function of the library shows its progress
TERMINAL_COLOURS = {"red": 31, "green": 32, "yellow": 33}


class _Mode:
    quiet = False
    json = False


_mode = _Mode()


def set_mode(quiet: bool = False, json: bool = False) -> None:
    """Choose whether to hide messages about ongoing work, and whether to print results as JSON."""
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
        """End the bar's line and move the other bars up.

        Tqdm leaves them a line lower, with a stale copy where the next message is printed.
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
    """A progress bar that prints lines to a log: at the start, at intervals, and at the end."""

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Write a line; `close` ends the last one."""
        numbers = self.format_dict
        begins = self.n == self.initial and not self.disable
        percentage = f"{self.n / self.total:.0%}, " if self.total else ""
        if begins:
            text = f"{self.desc}: started" + (f" at {percentage[:-2]}" if self.n and self.total else "")
        else:
            time = "in {elapsed}" if self.disable else "{elapsed} so far" + (", {remaining} left" if self.total else "")
            count = "{n_fmt} of {total_fmt} {unit}" if self.total else "{n_fmt}{unit}"
            line = f"{{desc}}: {percentage}{count}, {time}, {{rate_fmt}}{{postfix}}"
            text = self.format_meter(**numbers | {"bar_format": line, "ncols": None})
        self.fp.write(text if self.disable else f"{text}\n")
        self.fp.flush()
        return True

    def clear(self, nolock: bool = False) -> None:
        """Do nothing, because lines stay."""


def progress_bar(total: int | None, unit: str, what: str, done: int = 0, delay: float = 0.0) -> "tqdm[Any]":
    """Return a progress bar with rate and remaining time, or one that prints lines if there is no terminal.

    Without a total, it only counts. It stays hidden for the first `delay` seconds.
    """
    watched = sys.stderr.isatty()
    kind, seconds = (_Bar, 0.2) if watched else (_Lines, SELDOM)
    return kind(
        total=total,
        initial=done,
        delay=delay,
        desc=what,
        unit=unit,
        unit_scale=(total or 0) >= 1_000,  # small counts are shown in full
        dynamic_ncols=watched,
        mininterval=seconds,
        maxinterval=max(10.0, seconds),
        disable=_mode.quiet or not is_first(),
    )


def say(line: str) -> None:
    """Print a line about ongoing work, above any progress bars."""
    if not _mode.quiet:
        warn(line)


def warn(line: str) -> None:
    """Print a line that users should see even in quiet mode."""
    if is_first():
        _print(line, sys.stderr)


def _print(text: str, stream: Any) -> None:
    """Print a line that other threads' bars and lines do not interrupt."""
    with tqdm.get_lock():
        if sys.stderr.isatty():
            tqdm.write(text, file=stream)
            stream.flush()
        else:
            print(text, file=stream, flush=True)


def show(text: str) -> None:
    """Print a result, unless in quiet or JSON mode."""
    if is_first() and not _mode.quiet and not _mode.json:
        _print(text, sys.stdout)


def show_json(value: Any) -> None:
    """Print the result of the whole program as JSON, if in JSON mode."""
    if is_first() and _mode.json:
        print(json.dumps(value, indent=1, allow_nan=False), flush=True)


def coloured(text: str, colour: str, stream: Any) -> str:
    """Return the text in a colour if the stream is a terminal and NO_COLOR is not set."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{TERMINAL_COLOURS[colour]}m{text}\x1b[0m"
