"""What `--plan` says a run would take, beside what the run then takes.

    python -m benchmarks.planning                                            # MLPs on digits: two minutes
    python -m benchmarks.planning --cpu                                      # where other programs run, too
    python -m benchmarks.planning --setups mlp-cifar10 --widths 4 8 --epochs 1 --train-images 2000

Each run is `experiments.uniform` in a new folder, planned just before and just after it, because the machine may be
busier at one time than at another: the mean of the two plans counts. With `--cpu` plan and run are both reckoned in CPU
seconds of all threads, which depend less on what else runs. A plan leaves out compilation and reading data,
which are most of what the smallest runs take.
"""

import contextlib
import dataclasses
import io
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from unittest import mock

from benchmarks.tables import Row, show
from experiments import uniform
from mcomb.lab import cli
from mcomb.lab.cli import Flag
from mcomb.lab.config import SweepConfig
from mcomb.lab.experiment import list_jobs, run
from mcomb.lab.plan import plan_steps
from mcomb.lab.setups import SETUPS

KINDS = {"train": "training", "match": "matching", "evaluate": "evaluation"}


@dataclass(frozen=True)
class PlanningConfig:
    """The flags of the benchmark."""

    setups: Annotated[tuple[str, ...], Flag("which networks", choices=tuple(SETUPS))] = ("mlp-digits",)
    widths: Annotated[tuple[int, ...], Flag("width multipliers", at_least=1)] = (16, 32)
    epochs: Annotated[int | None, Flag("training epochs [setup]", at_least=1)] = None
    points: Annotated[int, Flag("values of s", at_least=2)] = 25
    train_images: Annotated[int | None, Flag("train images to evaluate on (default: all)", at_least=1)] = None
    data_dir: Annotated[
        Path | None, Flag("CIFAR-10's archive or folder (default: $MCOMB_DATA_DIR, else downloaded)")
    ] = None
    cpu: Annotated[bool, Flag("reckon in CPU seconds")] = False
    json: Annotated[Path | None, Flag("a file to write the table to")] = None


def compare(config: SweepConfig, cpu: bool) -> list[Row]:
    """What one run was planned to take and took, in a folder that is thrown away."""

    def plan() -> dict[str, float]:
        seconds = dict.fromkeys(KINDS.values(), 0.0)
        for step in plan_steps(
            list_jobs(uniform.EXPERIMENT, dataclasses.replace(config, out=Path(folder) / "planned"))
        ):
            seconds[KINDS[step.what.split()[0]]] += step.seconds
        return seconds

    clock = mock.patch.object(time, "monotonic", time.process_time) if cpu else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()), clock:
        before = plan()
        took = run(uniform.EXPERIMENT, dataclasses.replace(config, out=Path(folder) / "run"))["durations"]
        after = plan()
    planned = {kind: (before[kind] + after[kind]) / 2 for kind in before}
    rows = [(kind, planned[kind], took[kind]) for kind in planned]
    rows.append(("all of these", sum(planned.values()), sum(took[kind] for kind in planned)))
    return [
        {"": config.setup, "width": config.width, "step": kind, "planned, s": guess, "took, s": real}
        | {"took / planned": real / guess}
        for kind, guess, real in rows
    ]


def main(config: PlanningConfig) -> None:
    """Prints a table, and writes it where it is asked to."""
    flags = {name: getattr(config, name) for name in ("epochs", "points", "train_images", "data_dir")}
    problems = [SweepConfig(setup=name, width=width, **flags) for name in config.setups for width in config.widths]
    show([row for problem in problems for row in compare(problem, config.cpu)], config.json)


if __name__ == "__main__":
    cli.run(lambda: main(cli.parse(PlanningConfig, __doc__ or "")))
