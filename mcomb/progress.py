"""Progress bars, and lines among them."""

import sys
from typing import Any

from tqdm import tqdm

from mcomb.processes import is_first


def progress_bar(total: int | None, unit: str, what: str, done: int = 0, delay: float = 0.0) -> "tqdm[Any]":
    """A bar with rate and time left; where nobody watches a terminal, a line now and then.

    Without a total it counts. For the first `delay` seconds it is not shown.
    """
    watched = sys.stderr.isatty()
    return tqdm(
        total=total,
        initial=done,
        delay=delay,
        desc=what,
        unit=unit,
        unit_scale=total is not None,  # a plain count is small
        dynamic_ncols=watched,
        mininterval=0.2 if watched else 10,
        disable=not is_first(),
        position=None if watched else 0,  # else several bars would move the cursor
    )


def say(line: str) -> None:
    """Prints a line to standard error, above the bars that there are."""
    if is_first():
        tqdm.write(line, file=sys.stderr)
