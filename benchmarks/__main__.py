"""Run the benchmarks of speed, memory and precision in turn, in less than ten minutes.

    python -m benchmarks                                  # on two idle CPU cores
    python -m benchmarks --only evaluation matching

Each benchmark prints its table and writes it as JSON to --out; `growth` also writes its figure. Each is a command of
its own with flags for other sizes: `python -m benchmarks.evaluation --help`. If torch is installed, `evaluation` also
times PyTorch.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from benchmarks import evaluation, growth, main_job, matching, memory, precision
from mcomb.lab import cli
from mcomb.lab.cli import Flag

Benchmark = Callable[[Path], None]
"""A function that prints the tables of a benchmark and writes them to a folder."""


def _matching(out: Path) -> None:
    as_initialised: Any = {"setups": ("resnet20-cifar10", "tiny10-cifar10"), "widths": (1, 4)}
    matching.main(matching.MatchingConfig(**as_initialised, json=out / "matching.json"))
    trained: Any = {"setups": ("mlp-cifar10",), "widths": (32,), "pretrained": True, "repeats": 4}
    matching.main(matching.MatchingConfig(**trained, json=out / "matching-trained.json"))


BENCHMARKS: dict[str, Benchmark] = {
    "main_job": lambda out: main_job.main(main_job.MainJobConfig(json=out / "main_job.json")),
    "evaluation": lambda out: evaluation.main(
        evaluation.EvaluationConfig(gigaflop=20, rounds=2, json=out / "evaluation.json")
    ),
    "matching": _matching,
    "growth": lambda out: growth.main(growth.GrowthConfig(out=out)),
    "memory": lambda out: memory.main(
        memory.MemoryConfig(widths=(4,), devices=(2,), combinations=4, json=out / "memory.json")
    ),
    "precision": lambda out: precision.main(precision.PrecisionConfig(out=out, json=out / "precision.json")),
}


@dataclass(frozen=True)
class AllConfig:
    """Flags of `python -m benchmarks`."""

    only: Annotated[tuple[str, ...], Flag("benchmarks to run", choices=tuple(BENCHMARKS))] = tuple(BENCHMARKS)
    out: Annotated[Path, Flag("folder for tables and pictures")] = Path("runs/benchmarks")


def main(config: AllConfig) -> None:
    """Run the benchmarks in turn, and print the duration of each."""
    config.out.mkdir(parents=True, exist_ok=True)
    for name in config.only:
        print(f"\n{name}", flush=True)
        start = time.perf_counter()
        BENCHMARKS[name](config.out)
        print(f"{name} took {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    cli.run(lambda: main(cli.parse(AllConfig, __doc__ or "", prog="python -m benchmarks")))
