"""What a run leaves behind: rows as they are measured, one results.json at the end, and a table to read."""

import importlib.metadata
import json
import operator
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import jax

from mcomb.io.paths import AnyPath, atomic, in_store, read_text, seal, unseal
from mcomb.runtime.processes import from_first, is_first
from mcomb.runtime.progress import warn

Results = dict[str, Any]

SPLITS = ("train", "test")
VARIANTS = ("naive", "aligned")
METRICS = ("loss", "accuracy")
TABLE_WIDTH = 100  # characters: no table that is printed is wider
PACKAGES = ("mcomb", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "scipy", "matplotlib")


class Rows:
    """Measurements of one run, a line of JSON each, so that a run killed at any moment loses only its last call.

    `identity`, the first line, says what is being measured; rows of anything else are dropped, and so are rows that are
    not as they were written: each has a digest. They are in `samples.jsonl`, to which every call appends; in an object
    store, which cannot append, in `samples/000000.jsonl` and one object more for each call.
    """

    def __init__(self, folder: AnyPath, identity: Mapping[str, Any]):
        self.folder, self.header = folder, json.dumps(identity)
        self.rows: dict[str, dict[str, Any]] = from_first(self._read)
        self._objects = 1

    def _path(self, number: int = 0) -> AnyPath:
        return self.folder / (f"samples/{number:06}.jsonl" if in_store(self.folder) else "samples.jsonl")

    def _read(self) -> dict[str, dict[str, Any]]:
        """The rows that are there; they are then in one file, which is clean."""
        rows: dict[str, dict[str, Any]] = {}
        files = row_files(self.folder)
        for path in files:
            header, *lines = read_text(path).splitlines() or [""]
            if header == self.header:
                found = [row if row and "name" in row else None for row in map(unseal, lines)]
                rows |= {row["name"]: row for row in found if row}
                if damaged := found.count(None):
                    warn(f"{path} has {damaged} damaged rows: measuring them again")
        self._write(self._path(), map(self._line, rows.values()))
        for path in files:
            if path != self._path():
                path.unlink()
        return rows

    def _write(self, path: AnyPath, lines: Iterable[str]) -> None:
        with atomic(path) as temporary:
            temporary.write_text("\n".join([self.header, *lines]) + "\n")

    def _line(self, row: Mapping[str, Any]) -> str:
        return json.dumps(seal(row, row["name"]))

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self.rows[name]

    def __contains__(self, name: str) -> bool:
        return name in self.rows

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Appends rows, each with its `name`, and sees them onto the disk."""
        new = {row["name"]: row for row in rows}
        lines = [self._line(row) for row in new.values()]
        if is_first() and in_store(self.folder):
            self._write(self._path(self._objects), lines)
            self._objects += 1
        elif is_first():
            with self._path().open("a") as file:
                file.writelines(f"{line}\n" for line in lines)
                file.flush()
                os.fsync(file.fileno())
        self.rows |= new


def row_files(folder: AnyPath) -> list[AnyPath]:
    """The files of rows that are in a run's folder, in the order in which they were written."""
    if in_store(folder):
        return sorted((folder / "samples").glob("*.jsonl"))
    return [path] if (path := folder / "samples.jsonl").is_file() else []


def environment() -> Results:
    """Versions, devices and revision: what a result depends on beside its config."""
    packages: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            packages[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            packages[package] = None
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "devices": [f"{device.platform}:{device.device_kind}" for device in jax.devices()],
        "matmul_precision": jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
        "revision": _revision(),
    }


def _revision() -> str | None:
    """The git revision of this code, where there is one and git to tell it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return found.stdout.strip() or None


def table(results: Mapping[str, Any]) -> str:
    """The numbers of a run for a person: the networks themselves, the barriers, and the paper's.

    Of several pairs, the means, and the least and the largest in brackets.
    """
    rows = [("", *(f"{split} {metric}" for metric in METRICS for split in SPLITS))]
    parts = [results[side] for side in ("least", "largest") if side in results]

    def row(name: str, *path: str) -> None:
        cells = [reduce(operator.getitem, path, whole) for whole in (results, *parts)]
        rows.append((
            name,
            *(with_range([c.get(split, {}).get(metric) for c in cells]) for metric in METRICS for split in SPLITS),
        ))  # fmt: skip

    for kind, label in (("models", "network {}"), ("barriers", "{} barrier")):
        for name in results.get(kind, {}):
            row(label.format(name), kind, name)
            if name in results.get("at_best_temperature", {}).get(kind, {}):
                row("  at best temperature", "at_best_temperature", kind, name)
    if paper := results.get("paper"):
        # The paper gives one number for each metric, and does not say of which split: test, we take it.
        rows.append((f"paper, width {paper['width']}", "", f"{paper['loss']:.3f}", "", f"{paper['accuracy']:.3f}"))
    return columns(rows)


def with_range(numbers: list[float | None]) -> str:
    """A number as text, or a mean with its range; nothing where there is none."""
    written = ["" if number is None else f"{number:.4f}" for number in numbers]
    return f"{written[0]} ({written[1]}–{written[2]})" if len(written) > 1 and written[0] else written[0]


def columns(rows: Iterable[tuple[str, ...]], labels: int = 1) -> str:
    """Return rows of cells as text, the first column to the left and all others to the right.

    A table wider than TABLE_WIDTH is split into parts, one below the other; each repeats the first `labels` columns.
    """
    rows = list(rows)
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    whole = list(range(len(widths)))
    return "\n\n".join(
        "\n".join("  ".join(_pad(row[i], widths[i], i) for i in part).rstrip() for row in rows)
        for part in _split(whole[:labels], whole[labels:], widths)
    )


def _split(labels: list[int], others: list[int], widths: list[int]) -> list[list[int]]:
    """The columns of each part of a table, of the fewest parts that are narrow enough; one part if none are."""
    for count in range(1, len(others) + 1):
        size = -(-len(others) // count)
        parts = [labels + others[i : i + size] for i in range(0, len(others), size)]
        if all(sum(widths[i] + 2 for i in part) - 2 <= TABLE_WIDTH for part in parts):
            return parts
    return [labels + others]


def _pad(cell: str, width: int, column: int) -> str:
    return cell.rjust(width) if column else cell.ljust(width)


def readable_bytes(count: float) -> str:
    """Return a number of bytes in the unit that suits it, such as `9.4 GB`."""
    unit, name = next(((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB")) if count >= unit), (1e3, "kB"))
    return f"{count / unit:.1f} {name}"
