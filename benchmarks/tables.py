"""Tables that benchmarks print, and leave as JSON where they are asked to."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mcomb.io.paths import write_json
from mcomb.lab.environment import environment
from mcomb.lab.tables import columns
from mcomb.runtime.devices import describe_devices

Row = Mapping[str, Any]


def show(rows: Sequence[Row], json: Path | None = None) -> None:
    """Prints rows, all with the same names, as a table; with a path, writes them there with what they were run on."""
    head = tuple(rows[0])
    print(columns([head, *(tuple(_written(row[name]) for name in head) for row in rows)]), flush=True)
    leave(rows, json)


def leave(rows: Sequence[Row], json: Path | None) -> None:
    """Writes rows to a file, if there is a path, with what they were run on."""
    if json:
        json.parent.mkdir(parents=True, exist_ok=True)
        write_json(json, {"rows": list(rows), "on": describe_devices(), "environment": environment()})


def _written(value: Any) -> str:
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
