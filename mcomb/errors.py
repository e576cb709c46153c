"""Errors that a user can fix, and the checks that raise them."""

import math
import numbers
from collections.abc import Collection
from typing import Any

SHOWN = 4  # names that an error lists before it counts the rest


class UserError(ValueError):
    """An error that the user can fix: its message says what failed, with which value, and what to do."""

    exit_code = 2


class Diverged(UserError):
    """A loss or a weight became infinite or not a number."""

    exit_code = 1


def list_some(names: Collection[Any]) -> str:
    """Join the first few names, and count the rest: `a, b, c, d and 7 more`."""
    shown = ", ".join(f"{name!s:.80}" for name in list(names)[:SHOWN])
    return shown + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def brief(value: Any) -> str:
    """Return the start of a value's representation, on one line."""
    return " ".join(repr(value)[:200].split())[:50]


def first_words(error: Exception) -> str:
    """The start of what an error says, on one line."""
    said = " ".join(str(error).split()) or type(error).__name__
    return said if len(said) <= 150 else f"{said[:151].rpartition(' ')[0] or said[:150]}…"


def name_error(error: Exception) -> str:
    """The type of an error, whose words alone may say little, and the start of what it says."""
    return f"{type(error).__name__}: {first_words(error)}" if str(error).strip() else type(error).__name__


def require_positive(**values: int | float | None) -> None:
    """An error that names the first of the values that is no positive, finite number; None is left out."""
    for name, value in values.items():
        try:
            is_positive = value is None or bool(0 < value < math.inf)
        except (TypeError, ValueError):  # it is no number
            is_positive = False
        if not is_positive:
            raise UserError(f"{name} is {value!s:.50}: give more than 0")


def require_whole(least: int = 1, **values: int) -> None:
    """An error that names the first of the values that is no whole number from `least` on."""
    for name, value in values.items():
        if not isinstance(value, numbers.Integral) or value < least:
            raise UserError(f"{name} is {brief(value)}: give a whole number, {least} or more")
