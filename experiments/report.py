"""One self-contained page of all that has been run: report.html, its name with whatever flags it was given.

    python -m experiments.report --setup mlp-digits --run    # everything from nothing: some minutes on two CPU cores
    python -m experiments.report --width 32                  # gathers what there is

Each experiment with its figure, what the paper found, what was measured, the barriers and the exact command. Without
--run, an experiment that has not been run yet is listed with its command.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from mcomb.files import atomic, make_writable
from mcomb.lab import cli
from mcomb.lab.cli import Flag
from mcomb.lab.config import Config, command, convert_config
from mcomb.lab.experiment import Experiment, list_jobs, parse_and_join, print_plan, read_results, run
from mcomb.lab.store import Store
from mcomb.processes import from_first

from . import (
    bernoulli,
    centered,
    edges,
    functional,
    hyperplane,
    linear,
    matchers,
    minmax,
    robustness,
    schematic,
    stitching,
    subcube,
    transitivity,
    triangle,
    uniform,
    width,
)
from .report_page import Entry, render

ORDER = (
    *(schematic, uniform, subcube, hyperplane, bernoulli, stitching, linear),
    *(linear, centered, minmax, transitivity, triangle, functional, edges, robustness, matchers, width),
)  # the line twice: between the networks and beyond them
BEYOND = (-1.0, 2.0)


@dataclass(frozen=True)
class ReportConfig(width.WidthConfig):
    """The flags of the sweeps, for all experiments alike."""

    run: Annotated[bool, Flag("run the experiments that are missing", identity=False)] = False


def plan(config: ReportConfig) -> list[tuple[Experiment, Config]]:
    """All experiments with their configs, in the paper's order."""
    jobs = [(module.EXPERIMENT, convert_config(config, module.EXPERIMENT.config)) for module in ORDER]
    second = [experiment.name for experiment, _ in jobs].index("linear") + 1
    jobs[second] = (jobs[second][0], replace(jobs[second][1], range=BEYOND))
    return jobs


def _write(path: Path, page: str) -> None:
    with atomic(path) as temporary:
        temporary.write_text(page)


def main(argv: list[str] | None = None) -> None:
    """Gathers, and with --run runs, all experiments, and writes the page."""
    config = parse_and_join(ReportConfig, __doc__, argv)
    store = Store(config)
    if config.plan:
        return print_plan((job for planned in plan(config) for job in list_jobs(*planned)), config)
    path = from_first(make_writable, store.home) / f"{store.folder('report').name}.html"
    print(f"the report goes to {path}", flush=True)
    entries, missing = [], []
    for experiment, its_config in plan(config):
        results = (run if config.run else read_results)(experiment, its_config)
        if results is None:
            missing.append((experiment.name, command(experiment.name, its_config)))
            continue
        picture = Store(its_config).folder(experiment.name) / f"{experiment.name}.png"
        entries.append(Entry(results, picture.read_bytes()))
    page = render(f"{store.setup.title}, width {config.width}", entries, missing)
    from_first(_write, path, page)
    print(
        f"{len(entries)} experiments in {path}; {len(missing)} not run yet" + (" (--run runs them)" if missing else "")
    )


if __name__ == "__main__":
    cli.run(main)
