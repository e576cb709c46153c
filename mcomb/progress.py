"""Progress bars, and lines among them."""

import sys
from typing import Any

from tqdm import tqdm

from mcomb.processes import is_first


def progress_bar(total: int, unit: str, what: str, done: int = 0) -> "tqdm[Any]":
    """A bar with rate and time left; where nobody watches a terminal, a line now and then."""
    watched = sys.stderr.isatty()
    return tqdm(
        total=total,
        initial=done,
        desc=what,
        unit=unit,
        unit_scale=True,
        dynamic_ncols=watched,
        mininterval=0.2 if watched else 10,
        disable=not is_first(),
        position=None if watched else 0,  # else several bars would move the cursor
    )


def say(line: str) -> None:
    """Prints a line to standard error, above the bars that there are."""
    if is_first():
        tqdm.write(line, file=sys.stderr)
