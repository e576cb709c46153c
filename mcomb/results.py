"""What a run leaves behind: rows as they are measured, one results.json at the end, and a table to read."""

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mcomb.base import Params, UserError, named_leaves

SPLITS = ("train", "test")
VARIANTS = ("naive", "aligned")
METRICS = ("loss", "accuracy")
PACKAGES = ("mcomb", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "scipy", "matplotlib")


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


def writable(folder: Path) -> Path:
    """The folder, made if need be; an error that names it if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error.strerror}): give another --out") from error


def digest(params: Params) -> str:
    """A short fingerprint of a parameter tree's values."""
    state = hashlib.blake2b(digest_size=8)
    for name, leaf in named_leaves(params).items():
        state.update(name.encode())
        state.update(np.ascontiguousarray(leaf).data)
    return state.hexdigest()


class Rows:
    """Measurements of one run, a line of JSON each, so that a run killed at any moment loses only its last call.

    `identity` says what is being measured; rows of anything else are dropped.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]):
        self.path, self.identity = folder / "samples.jsonl", identity
        self.rows: dict[str, dict[str, Any]] = {}
        header, *lines = (self.path.read_text().splitlines() if self.path.is_file() else []) or [""]
        if header == json.dumps(identity):
            for line in lines:
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:  # torn by a kill in the middle of a write
                    break
                self.rows[row["of"]] = row
        with atomic(self.path) as temporary:
            lines = [json.dumps(value) for value in (identity, *self.rows.values())]
            temporary.write_text("\n".join(lines) + "\n")

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self.rows[name]

    def get(self, name: str, default: dict[str, Any]) -> dict[str, Any]:
        """The row of that name, or the default."""
        return self.rows.get(name, default)

    def __contains__(self, name: str) -> bool:
        return name in self.rows

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Appends rows, each named by its `of`, and sees them onto the disk."""
        new = {row["of"]: row for row in rows}
        with self.path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in new.values())
            file.flush()
            os.fsync(file.fileno())
        self.rows |= new


def barrier(metric: str, values: Any, a: float, b: float) -> float:
    """The empirical barrier of a sample (the paper's section 3): its worst network against the mean of A and B."""
    return float(np.max(values)) - (a + b) / 2 if metric == "loss" else (a + b) / 2 - float(np.min(values))


def barriers(models: Mapping[str, Any], curves: Mapping[str, Any], between: Any = ...) -> dict[str, Any]:
    """The barriers of every curve between two models, for each split and metric; `between` picks its points."""

    def of(curve: Mapping[str, Any], split: str, metric: str) -> float:
        ends = (model[split][metric] for model in models.values())
        return barrier(metric, np.array(curve[split][metric])[between], *ends)

    return {
        variant: {split: {metric: of(curve, split, metric) for metric in METRICS} for split in SPLITS}
        for variant, curve in curves.items()
    }


def environment() -> dict[str, Any]:
    """Versions, devices and revision: what a result depends on beside its config."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "devices": [f"{device.platform}:{device.device_kind}" for device in jax.local_devices()],
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
    """The numbers of a run for a person: the networks themselves, the barriers, and the paper's."""
    rows = [("", *(f"{split} {metric}" for metric in METRICS for split in SPLITS))]

    def row(name: str, cells: Mapping[str, Mapping[str, float]]) -> None:
        rows.append((name, *(f"{cells[split][metric]:.4f}" for metric in METRICS for split in SPLITS)))

    for model, cells in results["models"].items():
        row(f"network {model}", cells)
    for variant, cells in results["barriers"].items():
        row(f"{variant} barrier", cells)
    if paper := results["paper"]:
        # The paper gives one number for each metric, and does not say of which split: test, we take it.
        rows.append(("paper, width 32", "", f"{paper['loss']:.3f}", "", f"{paper['accuracy']:.3f}"))
    return columns(rows)


def columns(rows: Iterable[tuple[str, ...]]) -> str:
    """Rows of cells as text, the first column to the left and all others to the right."""
    rows = list(rows)
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(r, widths, strict=True)))
        for r in rows
    )
