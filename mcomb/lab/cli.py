"""Parse command lines into typed dataclasses: each field is one flag with one line of help."""

import argparse
import asyncio
import dataclasses
import difflib
import io
import logging
import math
import os
import re
import signal
import sys
import types
import typing
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING
from functools import cache, partial
from pathlib import Path
from threading import Timer
from types import MappingProxyType
from typing import Annotated, Any, NoReturn, TypeVar

import jax

from mcomb.errors import UserError
from mcomb.io.paths import AnyPath, as_path
from mcomb.runtime import processes
from mcomb.runtime.devices import use_a_device_per_core
from mcomb.runtime.interrupts import interrupted_by, interruptible
from mcomb.runtime.progress import coloured, set_mode

C = TypeVar("C")
INTERRUPTED = "Interrupted; run the same command to resume."
LARGEST_INTEGER = 10**7  # limit for integers: a larger value is probably a typo and would exhaust memory
MANY = 6  # choices: more are listed in the help, without braces
METAVARS: dict[Any, str] = {int: "N", float: "X", Path: "PATH", as_path: "PATH"}


@dataclasses.dataclass(frozen=True)
class Flag:
    """Description of a field's flag, used as `Annotated[int, Flag("one line of help")]`."""

    help: str
    at_least: int | None = None
    at_most: int | None = None  # defaults to LARGEST_INTEGER for integers
    choices: Collection[str] | None = None
    identity: bool = True  # whether it changes the result and therefore the folder's name
    old_name: str | None = None  # an earlier name, which is still accepted
    none: str | None = None  # a word for None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """Flags that control a program's output. The help lists keyword-only fields like these last."""

    quiet: Annotated[bool, Flag("print only errors and warnings", identity=False)] = False
    json: Annotated[bool, Flag("print the result as JSON, and messages to standard error", identity=False)] = False


UNKNOWN_FLAGS = "unrecognized arguments: "  # in messages of argparse


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        words = message.removeprefix(UNKNOWN_FLAGS).split()
        near = difflib.get_close_matches(words[0], self._option_string_actions, 1) if UNKNOWN_FLAGS in message else []
        remedy = f"did you mean {near[0]}?" if near else "see --help"
        raise UserError(f"{message[0].lower()}{message[1:]}: {remedy}")


def flags(config: type[Any]) -> dict[str, Flag]:
    """Return the flag of each field of a config class."""
    hints = typing.get_type_hints(config, include_extras=True)
    return {field.name: hints[field.name].__metadata__[0] for field in dataclasses.fields(config)}


def parse(
    config: type[C],
    description: str,
    argv: list[str] | None = None,
    epilog: str = "",
    prog: str | None = None,
    without: Collection[str] = (),
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> C:
    """Parse the command line into a config and set the output mode.

    Fields without a default become positional arguments; all others become flags.

    Args:
        config: The config class.
        description: The text at the start of the help.
        argv: The arguments, or None for those of this process.
        epilog: The text at the end of the help.
        prog: The program's name, or None to infer it.
        without: Names of fields that get no flag and keep their defaults.
        defaults: Defaults that replace those of the fields.

    Raises:
        UserError: The arguments are invalid.
    """
    if is_installed_command():
        description = description.replace("python -m experiments.", "mcomb ")
        description = description.replace("python -m experiments", "mcomb experiments")
    by_place = [field.name.upper() for field in dataclasses.fields(config) if field.default is MISSING]  # type: ignore[arg-type]
    parser = _Parser(
        prog=prog or _started_as(),
        usage=" ".join(["%(prog)s", *by_place, "[FLAGS]"]),
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    # By default argparse parses -1e-05 as a flag, because its pattern has no exponents.
    parser._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")
    hints, every_flag = typing.get_type_hints(config), flags(config)
    given = [field for field in dataclasses.fields(config) if field.name not in without]  # type: ignore[arg-type]
    for field in sorted(given, key=lambda field: field.kw_only is True):
        flag = every_flag[field.name]
        if hints[field.name] is bool:
            parser.add_argument(_word(field.name), action="store_true", help=flag.help)
            continue
        kind, count = _kind(hints[field.name])
        if field.default is MISSING:
            parser.add_argument(field.name, type=_checked(kind, flag), nargs=count, help=flag.help)
            continue
        given_default = defaults.get(field.name, field.default)
        default = "the setup's" if given_default is None and "[setup]" in flag.help else given_default
        text = flag.help.replace(" [setup]", "")
        if flag.old_name:
            old: Any = {"dest": field.name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            parser.add_argument(_word(flag.old_name), type=_checked(kind, flag), nargs=count, **old)
        many = len(flag.choices or ()) > MANY
        text += f": {', '.join(flag.choices or ())}" if many else ""
        parser.add_argument(
            _word(field.name),
            type=_checked(kind, flag),
            default=given_default,
            choices=flag.choices,
            nargs=count,
            metavar="NAME" if many else None if flag.choices else METAVARS.get(kind, "TEXT"),
            help=text if default is None else f"{text} (default: {_written(default)})",
        )
    values = vars(parser.parse_args(argv))
    set_mode(*(values.get(name) is True for name in ("quiet", "json")))  # a --json path is no mode
    return config(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def is_installed_command() -> bool:
    """Return whether the program was started as `mcomb` or `python -m mcomb`, which need no clone."""
    path = Path(sys.argv[0])
    return path.stem == "mcomb" or path.parts[-2:] == ("mcomb", "__main__.py")


def _word(name: str) -> str:
    """Return a flag as it is written on a command line."""
    return "--" + name.replace("_", "-")


def _started_as() -> str:
    path = Path(sys.argv[0])
    return f"mcomb {sys.argv[1]}" if is_installed_command() else f"python -m {path.parent.name}.{path.stem}"


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_written, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _kind(hint: Any) -> tuple[Callable[[str], Any], int | str | None]:
    """Return the converter from text to T for the hints T, T | None and tuples of T, and argparse's `nargs`."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if set(typing.get_args(AnyPath)) <= set(options):
        return as_path, None
    kind = next(option for option in options if option is not type(None))
    if typing.get_origin(kind) is tuple:
        kinds = typing.get_args(kind)
        return _kind(kinds[0])[0], "+" if kinds[-1] is Ellipsis else len(kinds)
    return kind, None


def _checked(kind: Callable[[str], Any], flag: Flag) -> Callable[[str], Any]:
    at_least, at_most = flag.at_least, LARGEST_INTEGER if kind is int and flag.at_most is None else flag.at_most

    def convert(text: str) -> Any:
        if text == flag.none:
            return None
        if kind is Path and "://" in text:
            raise argparse.ArgumentTypeError(f"{text} is not a local path")
        if kind in (Path, as_path) and not text:
            raise argparse.ArgumentTypeError("the path is empty")
        value = kind(text)
        if kind is float and not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text} is not finite")
        if at_least is not None and value < at_least:
            raise argparse.ArgumentTypeError(f"{text} is less than {at_least}")
        if at_most is not None and value > at_most:
            raise argparse.ArgumentTypeError(f"{text} is more than {at_most}")
        return value

    names: dict[Any, str] = {int: "whole number", float: "number"}
    convert.__name__ = names.get(kind, kind.__name__)
    return convert


def run(main: Callable[[], object]) -> None:
    """Run a program, and report errors that the user can fix as one line and an exit code.

    Cloud platforms send SIGTERM before they preempt a machine. Like Ctrl-C, it ends the program after the current step,
    or at once if there is nothing to save.
    """
    _replace_unprintable_characters()
    use_a_device_per_core()
    jax.config.update("jax_default_matmul_precision", "highest")  # full float32 precision on accelerators too
    _mute_orbax()
    _repeat_lost_interrupts()
    with interruptible(_end_now):
        try:
            main()
            processes.leave(None, 0)
        except (Exception, KeyboardInterrupt) as error:
            _end(error)


def _end(error: Exception | KeyboardInterrupt) -> None:
    """End the program with a one-line message, or raise the error if it is a bug."""
    number = error.args[0] if isinstance(error, KeyboardInterrupt) and error.args else interrupted_by()
    if number or isinstance(error, KeyboardInterrupt):
        sys.exit(_leave(INTERRUPTED, INTERRUPTED, 128 + (number or signal.SIGINT)))
    if isinstance(error, UserError):
        sys.exit(_fail(str(error), error.exit_code))
    if reason := _lacking(error):
        sys.exit(_fail(f"{reason}, then run the same command to resume.", 1))
    if not processes.are_several():
        raise error
    _fail(processes.explain(error), 1)


def _replace_unprintable_characters() -> None:
    """Print `?` instead of failing if the encoding of an output stream lacks a character, as on Windows."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


@cache
def _mute_orbax() -> None:
    """Silence orbax's tracebacks for failed reads and writes, which `run` reports in one line."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    before = sys.unraisablehook

    def hook(problem: Any) -> None:
        is_closed = str(problem.exc_value) == "Event loop is closed"  # raised for pending writes
        if not is_closed and problem.object is not asyncio.BaseEventLoop.__del__:
            before(problem)

    sys.unraisablehook = hook
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)


@cache
def _repeat_lost_interrupts() -> None:
    """Resend interrupts that Python drops, for example in callbacks of the garbage collector."""
    before = sys.unraisablehook
    send = partial(os.kill, os.getpid()) if os.name == "posix" else signal.raise_signal  # os.kill ends it on Windows

    def hook(problem: Any) -> None:
        if not isinstance(problem.exc_value, KeyboardInterrupt):
            before(problem)
            return
        number = problem.exc_value.args[0] if problem.exc_value.args else signal.SIGINT
        while True:
            try:
                Timer(0.01, send, [number]).start()  # after the callback returns
                return
            except KeyboardInterrupt:  # on a busy machine the signal may arrive before this hook returns
                continue

    sys.unraisablehook = hook


def _lacking(error: Exception) -> str | None:
    """Return a message with a remedy for errors of the operating system and of memory; None for all others."""
    if isinstance(error, OSError):
        place = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror or error}{place}: fix this"
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        return "Out of memory: free some, or reduce --vmap-size, --batch-size or --width"
    return None


def _fail(message: str, code: int) -> int:
    return _leave(f"{coloured('error:', 'red', sys.stderr)} {message}", message, code)


def _leave(line: str, message: str, code: int) -> int:
    """Print a last line, send the message to the other processes, and return the exit code."""
    print(line, file=sys.stderr, flush=True)
    processes.leave(message, code)
    return code


def _end_now(number: int) -> NoReturn:
    """End a program whose main thread does not receive an interrupt; this is safe because file writes are atomic."""
    os._exit(_leave(INTERRUPTED, INTERRUPTED, 128 + number))
