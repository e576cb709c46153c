"""Print tables of benchmarks and write them as JSON."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mcomb.io.paths import write_json
from mcomb.lab.environment import environment
from mcomb.lab.tables import columns
from mcomb.runtime.devices import describe_devices

TableRow = Mapping[str, Any]


def show(rows: Sequence[TableRow], json: Path | None = None) -> None:
    """Print rows with the same keys as a table, and write them to `json` if given."""
    head = tuple(rows[0])
    print(columns([head, *(tuple(_written(row[name]) for name in head) for row in rows)]), flush=True)
    leave(rows, json)


def leave(rows: Sequence[TableRow], json: Path | None) -> None:
    """Write rows, the devices and the environment to `json` if given."""
    if json:
        json.parent.mkdir(parents=True, exist_ok=True)
        write_json(json, {"rows": list(rows), "on": describe_devices(), "environment": environment()})


def _written(value: Any) -> str:
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
