"""Files that are written whole or not at all, and JSON that knows whether it is what was written."""

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcomb.base import UserError


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path to write to, renamed to `path` once all is written."""
    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        yield temporary
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())  # or a machine that fails could keep the name without the content
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON file with a digest of itself, whole or not at all."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(seal(value, str(path)), indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """What `write_json` wrote; None if it is not there or anything in it has changed."""
    try:
        return unseal(path.read_text(errors="replace"))
    except FileNotFoundError:
        return None


def seal(value: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The value with a digest of itself; a number that is not finite, which JSON has not, is an error that names it."""
    for where, number in _numbers(value, what):
        if not math.isfinite(number):
            raise UserError(f"{where} is {number}: the networks or their combinations overflow, so give others")
    plain: dict[str, Any] = json.loads(json.dumps(value))
    return plain | {"digest": _digest(plain)}


def unseal(text: str) -> dict[str, Any] | None:
    """The value that was sealed and then written as this text; None if any of it has changed."""
    try:
        value = json.loads(text)
        found = value.pop("digest")
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return None
    return value if found == _digest(value) else None


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


def _numbers(value: Any, where: str) -> Iterator[tuple[str, float]]:
    """The floats in a JSON value, each with its place."""
    if isinstance(value, float):
        yield where, value
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in inner:
        yield from _numbers(item, f"{where}, {key}")


def make_writable(folder: Path) -> Path:
    """The folder, made if need be; an error that names it if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error.strerror}): give another --out") from error
