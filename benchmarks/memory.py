"""Measure the peak memory of evaluation, each matcher and REPAIR, relative to one network's parameters.

    python -m benchmarks.memory                                            # two minutes on two CPU cores
    python -m benchmarks.memory --setup resnet20-cifar10 --widths 32 --images 32 --combinations 2 --devices 1

Each task runs in a separate process, with two untrained networks and random images. Memory is the peak minus the
memory before the networks were created, so it includes both networks. Evaluation is measured after its first compiled
call and at its end. Each device evaluates one combination at a time, so the number of combinations must not matter.
The straight-through estimator takes one step.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np

from benchmarks.apart import measure_apart, peak_memory
from benchmarks.random_data import random_data
from benchmarks.tables import TableRow, show
from mcomb.combination import Distribution, Draw, uniform
from mcomb.evaluation.evaluate import evaluate
from mcomb.evaluation.repair import repaired
from mcomb.keys import stream
from mcomb.lab import cli
from mcomb.lab.cli import Flag
from mcomb.lab.setups import SETUPS
from mcomb.matching.activations import match_activations
from mcomb.matching.straight_through import BATCH_SIZE, match_straight_through
from mcomb.matching.weights import match_weights
from mcomb.runtime.progress import progress_bar
from mcomb.trees import Apply

MEASURED_TASKS = ("evaluation", "weights", "activations", "ste", "repair")


@dataclass(frozen=True)
class MemoryPoint:
    """One task to measure."""

    task: str
    setup: str
    width: int
    devices: int
    combinations: int
    images: int
    batch_size: int


@dataclass(frozen=True)
class MemoryConfig:
    """Flags of the benchmark."""

    tasks: Annotated[tuple[str, ...], Flag("tasks to measure", choices=MEASURED_TASKS)] = MEASURED_TASKS
    setup: Annotated[str, Flag("which networks", choices=tuple(SETUPS))] = "resnet20-cifar10"
    widths: Annotated[tuple[int, ...], Flag("width multipliers", at_least=1)] = (4, 8)
    devices: Annotated[tuple[int, ...], Flag("numbers of devices that share the cores", at_least=1)] = (1, 2)
    combinations: Annotated[int, Flag("combinations to evaluate", at_least=1)] = 8
    images: Annotated[int, Flag("examples of each task", at_least=2)] = 64
    batch_size: Annotated[int, Flag("examples in the step of the straight-through estimator", at_least=1)] = BATCH_SIZE
    json: Annotated[Path | None, Flag("JSON file for the table")] = None


def measure(point: MemoryPoint) -> list[TableRow]:
    """Return the seconds and the peak memory up to the end of each stage of a task."""
    jax.config.update("jax_num_cpu_devices", point.devices)
    setup = SETUPS[point.setup]
    apply, spec = setup.apply(point.width), setup.spec(point.width)
    images, labels = random_data(setup, point.images)
    shares = np.full(point.combinations, 0.5, np.float32)
    keys = jax.random.split(stream(0), point.combinations)
    before, start, stages = peak_memory(), time.perf_counter(), list[TableRow]()
    a, b = (jax.device_get(setup.init(point.width, seed)) for seed in (0, 1))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(a))

    def end(stage: str) -> None:
        taken = peak_memory() - before
        figures = {"seconds": time.perf_counter() - start, "GB": taken / 1e9, "× parameters": taken / size}
        stages.append({"task": stage, "width": point.width, "devices": point.devices, **figures})

    def evaluate_all(name: str, apply: Apply, draw: Distribution | Draw, networks: tuple[Any, ...]) -> None:
        calls: list[Any] = []

        def report(metrics: Any) -> None:
            calls.append(metrics)
            if len(calls) == 1:
                end(f"{name}, {len(metrics.loss)} of {point.combinations}")

        evaluate(apply, networks, images, labels, draw, shares, keys, report=report)
        if len(calls) > 1:
            end(f"{name}, {point.combinations} of {point.combinations}")

    tasks: dict[str, Callable[[], Any]] = {
        "evaluation": lambda: evaluate_all("evaluation", apply, uniform, (a, b)),
        "repair": lambda: evaluate_all("REPAIR", *repaired(apply, (a, b), images, uniform, spec=spec)),
        "weights": lambda: match_weights(spec, a, b),
        "activations": lambda: match_activations(spec, a, b, apply, images),
        "ste": lambda: match_straight_through(spec, a, b, apply, images, labels, steps=1, batch_size=point.batch_size),
    }
    end("two networks")
    tasks[point.task]()
    if len(stages) == 1:
        end(point.task)
    return stages


def main(config: MemoryConfig) -> None:
    """Print the table, and write it to `--json` if given."""
    points = [
        MemoryPoint(task, config.setup, width, devices, config.combinations, config.images, config.batch_size)
        for width in config.widths
        for devices in config.devices
        for task in config.tasks
    ]
    rows: list[TableRow] = []
    with progress_bar(len(points), "task", "measuring") as bar:
        for point in points:
            networks, *stages = measure_apart(measure, point)
            first = point.task == config.tasks[0]
            rows += [networks, *stages] if first else stages
            bar.update()
    show(rows, config.json)


if __name__ == "__main__":
    cli.run(lambda: main(cli.parse(MemoryConfig, __doc__ or "")))
