"""Files that are written whole or not at all, and JSON that knows whether it is what was written.

Paths are those of pathlib in a file system, and of etils.epath in an object store, as gs://bucket/runs. A store has
whole objects only: no locks, no appends and no renames.
"""

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from etils import epath

from mcomb.errors import UserError, first_words

LONGEST = 255  # bytes of the name of a file or a folder
BUCKETS = ("gs", "s3")  # schemes of stores whose addresses begin with a bucket

AnyPath: TypeAlias = Path | epath.Path
"""A path in a file system or in an object store."""


def as_path(address: str | os.PathLike[str]) -> AnyPath:
    """The path of an address: of pathlib, or if it has a scheme, as gs://bucket/runs, of etils.epath."""
    text = os.fspath(address)
    if not text:
        raise UserError("a path is empty: give a folder or a file, such as . for this folder")
    scheme, has_scheme, rest = text.partition("://")
    for part in (rest or scheme).split("/"):
        if len(part.encode(errors="surrogateescape")) > LONGEST:
            raise UserError(f"the name {part[:30]}… has more than {LONGEST} bytes: give a shorter one")
    if not has_scheme:
        return Path(text)
    if scheme in BUCKETS and not rest.partition("/")[0]:
        raise UserError(f"{text} names no bucket: give {scheme}://BUCKET/FOLDER")
    try:
        path = epath.Path(text)
    except KeyError:
        raise UserError(f"{text} is nothing that can be written to: give a folder, or gs://BUCKET/FOLDER") from None
    if find_spec("tensorflow") is None:  # which epath takes where it is
        try:
            import fsspec

            fsspec.get_filesystem_class(scheme)
        except ImportError as error:
            raise UserError(f"{text} cannot be reached from here ({first_words(error)}): do that") from error
    return path


def in_store(path: AnyPath) -> bool:
    """Whether a path is one in an object store."""
    return not isinstance(path, Path)


def absolute(path: AnyPath) -> AnyPath:
    """The path from the root of all folders on; in a store every path is."""
    return path.absolute() if isinstance(path, Path) else path


def require_folder(path: AnyPath) -> None:
    """An error unless the folder that a file is to be written into is there; a store needs none."""
    if isinstance(path, Path) and not path.parent.is_dir():
        raise UserError(f"{path} cannot be written, there is no folder {path.parent}: make it first")


@contextmanager
def atomic(path: AnyPath) -> Iterator[Path]:
    """A temporary path to write to, renamed to `path` once all is written; put there whole, if it is in a store."""
    if not isinstance(path, Path):
        with tempfile.TemporaryDirectory() as folder:
            yield (written := Path(folder, path.name))
            path.write_bytes(written.read_bytes())
        return
    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        yield temporary
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())  # or a machine that fails could keep the name without the content
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def readable(path: AnyPath) -> Iterator[Path]:
    """A path of a file system to read from: the path itself, or that of a copy of what is in a store."""
    if isinstance(path, Path):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        (copy := Path(folder, path.name)).write_bytes(path.read_bytes())
        yield copy


def read_text(path: AnyPath) -> str:
    """The text of a file; of bytes that are none, a sign for each."""
    return path.read_bytes().decode(errors="replace")


def modified(path: AnyPath) -> float:
    """When a file was written, in seconds since 1970."""
    return path.stat().st_mtime if isinstance(path, Path) else float(path.stat().mtime)


def remove_folder(folder: AnyPath) -> None:
    """Removes a folder and all in it, if it is there."""
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=True)
    else:
        folder.rmtree(missing_ok=True)


def write_json(path: AnyPath, value: Mapping[str, Any]) -> None:
    """Writes a JSON file with a digest of itself, whole or not at all."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(seal(value, str(path)), indent=1) + "\n")


def read_json(path: AnyPath) -> dict[str, Any] | None:
    """What `write_json` wrote; None if it is not there or anything in it has changed."""
    try:
        return unseal(read_text(path))
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


def make_writable(folder: AnyPath) -> AnyPath:
    """The folder, made if need be; an error that names it if nothing can be written there."""
    if not isinstance(folder, Path):
        return _try_to_write(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error.strerror}): give another --out") from error


def _try_to_write(folder: AnyPath) -> AnyPath:
    """The folder in a store, which needs no making; an error if no object can be written there and removed."""
    probe = folder / f".{os.getpid()}-writable"
    try:
        probe.write_bytes(b"")
        probe.unlink()
    except Exception as error:  # each store has its own
        reason = "no such bucket" if isinstance(error, FileNotFoundError) else first_words(error)
        raise UserError(
            f"cannot write to {folder} ({reason}): see to bucket and rights, or give another --out"
        ) from error
    return folder
