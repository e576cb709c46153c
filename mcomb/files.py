"""Files that are written whole or not at all."""

import json
import os
import tempfile
from collections.abc import Iterator
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
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file, whole or not at all."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n")


def make_writable(folder: Path) -> Path:
    """The folder, made if need be; an error that names it if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error.strerror}): give another --out") from error
