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

from mcomb.files import atomic, seal, unseal
from mcomb.processes import from_first, is_first
from mcomb.progress import warn

Results = dict[str, Any]

SPLITS = ("train", "test")
VARIANTS = ("naive", "aligned")
METRICS = ("loss", "accuracy")
PACKAGES = ("mcomb", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "scipy", "matplotlib")


class Rows:
    """Measurements of one run, a line of JSON each, so that a run killed at any moment loses only its last call.

    `identity` says what is being measured; rows of anything else are dropped, and so are rows that are not as they were
    written: each has a digest.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]):
        self.path, self.identity = folder / "samples.jsonl", identity
        self.rows: dict[str, dict[str, Any]] = from_first(self._read)

    def _read(self) -> dict[str, dict[str, Any]]:
        """The rows that are there; the file is then clean."""
        rows: dict[str, dict[str, Any]] = {}
        text = self.path.read_text(errors="replace") if self.path.is_file() else ""
        header, *lines = text.splitlines() or [""]
        if header == json.dumps(self.identity):
            found = [unseal(line) for line in lines]
            rows = {row["name"]: row for row in found if row}
            if damaged := found.count(None):
                warn(f"{self.path} has {damaged} rows that are not whole: measuring them anew")
        with atomic(self.path) as temporary:
            temporary.write_text("\n".join([json.dumps(self.identity), *map(self._line, rows.values())]) + "\n")
        return rows

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
        if is_first():
            with self.path.open("a") as file:
                file.writelines(f"{line}\n" for line in lines)
                file.flush()
                os.fsync(file.fileno())
        self.rows |= new


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
        rows.append(
            (name, *(with_range([c[split].get(metric) for c in cells]) for metric in METRICS for split in SPLITS))
        )

    for network in results["models"]:
        row(f"network {network}", "models", network)
    for variant in results.get("barriers", {}):
        row(f"{variant} barrier", "barriers", variant)
    for variant in results.get("recalibrated", {}).get("barriers", {}):
        row(f"{variant} barrier, best temperature", "recalibrated", "barriers", variant)
    if paper := results.get("paper"):
        # The paper gives one number for each metric, and does not say of which split: test, we take it.
        rows.append((f"paper, width {paper['width']}", "", f"{paper['loss']:.3f}", "", f"{paper['accuracy']:.3f}"))
    return columns(rows)


def with_range(numbers: list[float | None]) -> str:
    """A number as text, or a mean with its range; nothing where there is none."""
    written = ["" if number is None else f"{number:.4f}" for number in numbers]
    return f"{written[0]} ({written[1]}–{written[2]})" if len(written) > 1 and written[0] else written[0]


def columns(rows: Iterable[tuple[str, ...]]) -> str:
    """Rows of cells as text, the first column to the left and all others to the right."""
    rows = list(rows)
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(r, widths, strict=True)))
        for r in rows
    )
