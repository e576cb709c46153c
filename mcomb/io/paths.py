"""Write files atomically, and store JSON with digests.

Local paths are those of pathlib. Paths in an object store, such as gs://bucket/runs, are those of etils.epath. An
object store has no locks, appends or renames.
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

LONGEST = 255  # bytes in the name of a file or folder
BUCKETS = ("gs", "s3")  # schemes of stores whose addresses start with a bucket

AnyPath: TypeAlias = Path | epath.Path
"""A path in a file system or in an object store."""


def as_path(address: str | os.PathLike[str]) -> AnyPath:
    """Return a pathlib path, or an etils.epath path for an address with a scheme, such as gs://bucket/runs."""
    text = os.fspath(address)
    if not text:
        raise UserError("The path is empty: pass a file or a folder, such as . for this folder.")
    scheme, has_scheme, rest = text.partition("://")
    for part in (rest or scheme).split("/"):
        if len(part.encode(errors="surrogateescape")) > LONGEST:
            raise UserError(f"The name {part[:30]}… has more than {LONGEST} bytes: use a shorter one.")
    if not has_scheme:
        return Path(text)
    if scheme in BUCKETS and not rest.partition("/")[0]:
        raise UserError(f"{text} has no bucket: pass {scheme}://BUCKET/FOLDER.")
    try:
        path = epath.Path(text)
    except KeyError:
        raise UserError(f"Cannot open {text}: pass a folder, or gs://BUCKET/FOLDER.") from None
    if find_spec("tensorflow") is None:  # epath prefers TensorFlow
        try:
            import fsspec

            fsspec.get_filesystem_class(scheme)
        except ImportError as error:
            package = "mcomb[gcs]" if scheme == "gs" else "that package"
            raise UserError(f"Cannot open {text} ({first_words(error)}): install {package}.") from error
    return path


def in_store(path: AnyPath) -> bool:
    """Return whether a path is in an object store."""
    return not isinstance(path, Path)


def absolute(path: AnyPath) -> AnyPath:
    """Return the absolute path; paths in a store are always absolute."""
    return path.absolute() if isinstance(path, Path) else path


def require_folder(path: AnyPath) -> None:
    """Raise an error unless the folder of a file exists; a store needs no folders."""
    if isinstance(path, Path) and not path.parent.is_dir():
        raise UserError(f"Cannot write {path}, because there is no folder {path.parent}: create it first.")


@contextmanager
def atomic(path: AnyPath) -> Iterator[Path]:
    """Yield a temporary path to write to, then rename it to `path`, or upload it if `path` is in a store."""
    if not isinstance(path, Path):
        with tempfile.TemporaryDirectory() as folder:
            yield (written := Path(folder, path.name))
            path.write_bytes(written.read_bytes())
        return
    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        yield temporary
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())  # otherwise a crash could keep the name without the content
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def readable(path: AnyPath) -> Iterator[Path]:
    """Yield a local path to read from: the path itself, or a local copy of an object in a store."""
    if isinstance(path, Path):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        (copy := Path(folder, path.name)).write_bytes(path.read_bytes())
        yield copy


def read_text(path: AnyPath) -> str:
    """Read text, replacing undecodable bytes."""
    return path.read_bytes().decode(errors="replace")


def write_text(path: AnyPath, text: str) -> None:
    """Write text with the same bytes on every system: in UTF-8, without carriage returns."""
    path.write_bytes(text.encode())


def modified(path: AnyPath) -> float:
    """Return the modification time of a file, in seconds since 1970."""
    return path.stat().st_mtime if isinstance(path, Path) else float(path.stat().mtime)


def remove_folder(folder: AnyPath) -> None:
    """Remove a folder and its contents, if it exists."""
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=True)
    else:
        folder.rmtree(missing_ok=True)


def write_json(path: AnyPath, value: Mapping[str, Any]) -> None:
    """Write a JSON file with a digest of its content, atomically."""
    with atomic(path) as temporary:
        write_text(temporary, json.dumps(seal(value, str(path)), indent=1) + "\n")


def read_json(path: AnyPath) -> dict[str, Any] | None:
    """Read a file from `write_json`; return None if it is missing or was changed."""
    try:
        return unseal(read_text(path))
    except FileNotFoundError:
        return None


def seal(value: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Add a digest of its content to a value; raise an error that names any number that is not finite."""
    for where, number in _numbers(value, what):
        if not math.isfinite(number):
            raise UserError(f"{where} is {number}, because networks or combinations overflow: use other networks.")
    plain: dict[str, Any] = json.loads(json.dumps(value))
    return plain | {"digest": _digest(plain)}


def unseal(text: str) -> dict[str, Any] | None:
    """Parse a sealed value; return None if it was changed."""
    try:
        value = json.loads(text)
        found = value.pop("digest")
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return None
    return value if found == _digest(value) else None


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


def _numbers(value: Any, where: str) -> Iterator[tuple[str, float]]:
    """Yield the floats in a JSON value with their locations."""
    if isinstance(value, float):
        yield where, value
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in inner:
        yield from _numbers(item, f"{where}, {key}")


def make_writable(folder: AnyPath) -> AnyPath:
    """Create a folder if necessary; raise an error if it is not writable."""
    if not isinstance(folder, Path):
        return _try_to_write(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise UserError(f"Cannot write to {folder} ({error.strerror}): pass another --out.") from error


def _try_to_write(folder: AnyPath) -> AnyPath:
    """Write and remove an object in a store's folder; raise an error if that fails."""
    probe = folder / f".{os.getpid()}-writable"
    try:
        probe.write_bytes(b"")
        probe.unlink()
    except Exception as error:  # each store raises its own errors
        reason = "no such bucket" if isinstance(error, FileNotFoundError) else first_words(error)
        raise UserError(
            f"Cannot write to {folder} ({reason}): check the bucket and its permissions, or pass another --out."
        ) from error
    return folder
