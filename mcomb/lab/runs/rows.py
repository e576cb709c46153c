"""Save the measurements of a run continuously, so that the same command resumes it."""

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from mcomb.io.paths import AnyPath, atomic, in_store, read_text, seal, unseal, write_text
from mcomb.lab.run_folders import ROW_OBJECTS, ROWS
from mcomb.runtime.processes import from_first, is_first
from mcomb.runtime.progress import warn


class Rows:
    """The measurements of one run, one line of JSON each. A killed run loses only its last call.

    The first line is the `identity` of the run. Reading drops rows of another identity, and rows that do not match
    their digest. Each call appends to `samples.jsonl`. Object stores cannot append, so each call writes a new object
    there: `samples/000000.jsonl` and so on.
    """

    def __init__(self, folder: AnyPath, identity: Mapping[str, Any]):
        self.folder, self.header = folder, json.dumps(identity)
        self.rows: dict[str, dict[str, Any]] = from_first(self._read)
        self._objects = 1

    def _path(self, number: int = 0) -> AnyPath:
        return self.folder / (f"{ROW_OBJECTS}/{number:06}.jsonl" if in_store(self.folder) else ROWS)

    def _read(self) -> dict[str, dict[str, Any]]:
        """Return the intact rows, and rewrite them as one file."""
        rows: dict[str, dict[str, Any]] = {}
        files = row_files(self.folder)
        for path in files:
            header, *lines = read_text(path).splitlines() or [""]
            if header == self.header:
                found = [row if row and "name" in row else None for row in map(unseal, lines)]
                rows |= {row["name"]: row for row in found if row}
                if damaged := found.count(None):
                    warn(f"{path} has damaged rows ({damaged}): measuring them again")
        self._write(self._path(), map(self._line, rows.values()))
        for path in files:
            if path != self._path():
                path.unlink()
        return rows

    def _write(self, path: AnyPath, lines: Iterable[str]) -> None:
        with atomic(path) as temporary:
            write_text(temporary, "\n".join([self.header, *lines]) + "\n")

    def _line(self, row: Mapping[str, Any]) -> str:
        return json.dumps(seal(row, row["name"]))

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self.rows[name]

    def __contains__(self, name: str) -> bool:
        return name in self.rows

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append rows, each with a `name`, and flush them to disk."""
        new = {row["name"]: row for row in rows}
        lines = [self._line(row) for row in new.values()]
        if is_first() and in_store(self.folder):
            self._write(self._path(self._objects), lines)
            self._objects += 1
        elif is_first():
            with self._path().open("a", encoding="utf-8", newline="\n") as file:
                file.writelines(f"{line}\n" for line in lines)
                file.flush()
                os.fsync(file.fileno())
        self.rows |= new


def row_files(folder: AnyPath) -> list[AnyPath]:
    """Return the files of rows in a run's folder, oldest first."""
    if in_store(folder):
        return sorted((folder / ROW_OBJECTS).glob("*.jsonl"))
    return [path] if (path := folder / ROWS).is_file() else []
