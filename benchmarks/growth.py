"""Measure how the cost of evaluation grows with width, combinations, images and devices.

    python -m benchmarks.growth                            # two minutes on two CPU cores
    python -m benchmarks.growth --setup resnet20-cifar10 --widths 1 2 4 8 16

Each point runs in a separate process, with untrained networks and random images. The benchmark reports the faster of
two compiled calls, and the peak memory minus the memory before the networks were created. It fits the slope of each
series on logarithmic axes: a slope of 1 is proportional growth, and 2 is quadratic. With more devices, time should
fall.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import jax
import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from benchmarks.apart import measure_apart, peak_memory
from benchmarks.random_data import random_data
from benchmarks.tables import TableRow, show
from mcomb.combination import uniform
from mcomb.evaluation.evaluate import evaluate
from mcomb.keys import stream
from mcomb.lab import cli
from mcomb.lab.cli import Flag
from mcomb.lab.figures import STYLE, save
from mcomb.lab.setups import SETUPS
from mcomb.runtime.progress import progress_bar


@dataclass(frozen=True)
class GrowthPoint:
    """One evaluation to time."""

    setup: str
    width: int = 1
    combinations: int = 4
    images: int = 400
    devices: int = 1


@dataclass(frozen=True)
class GrowthConfig:
    """Flags of the benchmark."""

    setup: Annotated[str, Flag("which networks", choices=tuple(SETUPS))] = "tiny10-cifar10"
    widths: Annotated[tuple[int, ...], Flag("width multipliers", at_least=1)] = (1, 2, 4)
    combinations: Annotated[tuple[int, ...], Flag("numbers of combinations", at_least=1)] = (4, 8, 16)
    images: Annotated[tuple[int, ...], Flag("numbers of examples", at_least=1)] = (400, 800, 1600)
    devices: Annotated[tuple[int, ...], Flag("numbers of devices that share the cores", at_least=1)] = (1, 2)
    out: Annotated[Path | None, Flag("folder for growth.json, growth.png and growth.pdf")] = None


def measure(point: GrowthPoint) -> TableRow:
    """Return the seconds of one evaluation, the number of parameters, and the peak memory in bytes."""
    jax.config.update("jax_num_cpu_devices", point.devices)
    setup = SETUPS[point.setup]
    images, labels = random_data(setup, point.images)
    keys = jax.random.split(stream(0), point.combinations)
    before = peak_memory()
    a, b = (jax.device_get(setup.init(point.width, seed)) for seed in (0, 1))
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        shares = np.full(point.combinations, 0.5, np.float32)
        evaluate(setup.apply(point.width), (a, b), images, labels, uniform, shares, keys)
        seconds.append(time.perf_counter() - start)
    size = sum(leaf.size for leaf in jax.tree.leaves(a))
    return {"seconds": min(seconds[1:]), "parameters": size, "megabytes": (peak_memory() - before) / 1e6}


def slope(x: Any, y: Any) -> float:
    """Fit the exponent of y as a power of x by least squares on logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0]) if len(set(x)) > 1 else float("nan")


def draw(series: dict[str, list[TableRow]], folder: Path) -> None:
    """Draw each series on logarithmic axes of equal scale, with its fitted slope."""
    panels = [(name, name, "seconds") for name in series] + [("width", "parameters", "megabytes")]
    short = EngFormatter(sep="")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.4, 4.8), layout="constrained")
        all_axes = figure.subplots(2, 3).ravel()
        for axes, (name, horizontal, vertical) in zip(all_axes, panels, strict=False):
            x, y = (np.array([row[of] for row in series[name]], float) for of in (horizontal, vertical))
            fitted = np.exp(np.log(y).mean() + slope(x, y) * (np.log(x) - np.log(x).mean()))
            axes.loglog(x, fitted, "--", color="grey", linewidth=1)
            axes.loglog(x, y, "o-", color="#0072B2")
            axes.set_xticks(x, [short(float(f"{value:.2g}")) for value in x])
            axes.set_yticks(y, [f"{value:.3g}" for value in y])
            axes.minorticks_off()
            axes.set_aspect("equal", adjustable="datalim")
            axes.set_xlabel(horizontal)
            axes.set_ylabel(vertical)
            axes.set_title(f"slope {slope(x, y):.2f}")
        for axes in all_axes[len(panels) :]:
            axes.axis("off")
        save(figure, folder, "growth")


def main(config: GrowthConfig) -> None:
    """Print the table and the slopes, and write the table and the figure if requested."""
    if config.out:
        config.out.mkdir(parents=True, exist_ok=True)
    base = GrowthPoint(config.setup)
    points = {
        "width": [replace(base, width=width) for width in config.widths],
        "combinations": [replace(base, combinations=count) for count in config.combinations],
        "images": [replace(base, images=count) for count in config.images],
        "devices": [replace(base, devices=count) for count in config.devices],
    }
    each = list(dict.fromkeys(point for its_points in points.values() for point in its_points))
    measured: dict[GrowthPoint, TableRow] = {}
    with progress_bar(len(each), "point", "measuring") as bar:
        for point in each:  # a point may belong to several series
            measured[point] = measure_apart(measure, point)
            bar.update()
    series: dict[str, list[TableRow]] = {
        name: [{"series": name, **vars(point), **measured[point]} for point in its_points]
        for name, its_points in points.items()
    }
    show([row for rows in series.values() for row in rows], config.out and config.out / "growth.json")
    for name, rows in series.items():
        print(f"seconds grow as {name}^{slope([row[name] for row in rows], [row['seconds'] for row in rows]):.2f}")
    sizes, memory = ([row[of] for row in series["width"]] for of in ("parameters", "megabytes"))
    print(f"megabytes grow as parameters^{slope(sizes, memory):.2f}")
    if config.out:
        draw(series, config.out)


if __name__ == "__main__":
    cli.run(lambda: main(cli.parse(GrowthConfig, __doc__ or "")))
