"""Define errors that users can fix, and the argument checks that raise them."""

import math
import numbers
from collections.abc import Collection
from typing import Any

SHOWN = 4  # names that an error lists before it counts the rest


class UserError(ValueError):
    """An error that the user can fix.

    The message says what failed, with which value, and what to do.

    Attributes:
        exit_code: The exit code of a command that fails with this error.

    Examples:
        >>> try:
        ...     mcomb.align(apply, a, b, x, matcher="wieghts")
        ... except mcomb.UserError as error:
        ...     print(error)
        Unknown matcher 'wieghts': choose from weights, activations, straight_through, or configure one.
    """

    exit_code = 2


class Diverged(UserError):
    """An error raised when a loss or a weight is infinite or not a number.

    Attributes:
        exit_code: The exit code of a command that fails with this error.

    Examples:
        >>> try:
        ...     mcomb.fine_tune(apply, a, x, y, learning_rate=1e30)
        ... except mcomb.Diverged as error:
        ...     print(error)
        The loss became infinite or not a number in step 2: lower the learning rate.
    """

    exit_code = 1


def list_some(names: Collection[Any]) -> str:
    """Join the first few names and count the rest: `a, b, c, d and 7 more`."""
    shown = ", ".join(f"{name!s:.80}" for name in list(names)[:SHOWN])
    return shown + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def brief(value: Any) -> str:
    """Return the start of a value's representation, on one line."""
    return " ".join(repr(value)[:200].split())[:50]


def first_words(error: Exception) -> str:
    """Return the start of an error's message on one line."""
    message = " ".join(str(error).split()) or type(error).__name__
    return message if len(message) <= 150 else f"{message[:151].rpartition(' ')[0] or message[:150]}…"


def name_error(error: Exception) -> str:
    """Return the type of an error and the start of its message, which alone may say little."""
    return f"{type(error).__name__}: {first_words(error)}" if str(error).strip() else type(error).__name__


def require_positive(**values: int | float | None) -> None:
    """Raise an error unless all values are positive and finite, or None."""
    for name, value in values.items():
        try:
            is_positive = value is None or bool(0 < value < math.inf)
        except (TypeError, ValueError):  # not a number
            is_positive = False
        if not is_positive:
            raise UserError(f"{name} is {value!s:.50}: pass a finite number above 0.")


def require_number(**values: float) -> None:
    """Raise an error unless all values are finite numbers."""
    for name, value in values.items():
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise UserError(f"{name} is {brief(value)}: pass a finite number.")


def require_fraction(**values: float) -> None:
    """Raise an error unless all values are above 0 and at most 1."""
    for name, value in values.items():
        if not isinstance(value, numbers.Real) or not 0 < value <= 1:
            raise UserError(f"{name} is {brief(value)}: pass a number above 0 and at most 1.")


def require_whole(least: int = 1, **values: int) -> None:
    """Raise an error unless all values are integers of at least `least`."""
    for name, value in values.items():
        if not isinstance(value, numbers.Integral) or value < least:
            raise UserError(f"{name} is {brief(value)}: pass an integer of at least {least}.")
