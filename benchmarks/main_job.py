"""Time each part of `python -m experiments.uniform` without a cache, by default with `--setup mlp-digits`.

    python -m benchmarks.main_job                                       # a minute on two CPU cores
    python -m benchmarks.main_job --width 8 --epochs 20

The command runs in a separate process and a new folder. `to the first bar` is the time until the first progress bar.
CPU seconds include all threads. On two idle cores, the command takes at least half as many seconds. On busy cores, CPU
seconds are more meaningful than elapsed time.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from benchmarks.tables import TableRow, show
from mcomb.errors import UserError
from mcomb.lab import cli
from mcomb.lab.cli import Flag
from mcomb.lab.setups import SETUPS


@dataclass(frozen=True)
class MainJobConfig:
    """Flags of the benchmark."""

    setup: Annotated[str, Flag("model, dataset and recipe", choices=tuple(SETUPS))] = "mlp-digits"
    width: Annotated[int, Flag("width multiplier", at_least=1)] = 32
    epochs: Annotated[int | None, Flag("training epochs [setup]", at_least=0)] = None
    json: Annotated[Path | None, Flag("JSON file for the table")] = None


def measure(config: MainJobConfig) -> list[TableRow]:
    """Return the seconds of each part of the run, then the time to the first bar and the CPU seconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "experiments.uniform", "--setup", config.setup, "--width", str(config.width)]
        command += ["--out", folder] + ([] if config.epochs is None else ["--epochs", str(config.epochs)])
        start = time.perf_counter()
        root = Path(__file__).parents[1]
        with subprocess.Popen(command, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            assert process.stderr
            said = b""
            while b"training" not in said and (letter := process.stderr.read(1)):
                said += letter
            first_bar, start_cpu = time.perf_counter() - start, cpu_seconds(process.pid)
            said += process.stderr.read()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - start
        if process.returncode:
            raise UserError(f"{' '.join(command[1:])} failed: {said.decode().splitlines()[-1]}")
        (path,) = Path(folder).rglob("results.json")
        durations = json.loads(path.read_text())["durations"]
    parts = durations | {"imports, figure and all else": seconds - sum(durations.values()), "in all": seconds}
    rows: list[TableRow] = [{"": part, "seconds": taken, "of all": taken / seconds} for part, taken in parts.items()]
    cpu = {"to the first bar": first_bar, "to the first bar, CPU": start_cpu}
    cpu |= {"in all, CPU": usage.ru_utime + usage.ru_stime}
    return rows + [{"": part, "seconds": taken, "of all": taken / seconds} for part, taken in cpu.items()]


def cpu_seconds(process: int) -> float:
    """Return the CPU seconds of a running process, or NaN except on Linux."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return math.nan
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(config: MainJobConfig) -> None:
    """Print the table, and write it to `--json` if given."""
    show(measure(config), config.json)


if __name__ == "__main__":
    cli.run(lambda: main(cli.parse(MainJobConfig, __doc__ or "")))
