"""Write the results of all experiments to one self-contained page, report.html.

    python -m experiments.report --setup mlp-digits --run    # run most of them: some minutes on two CPU cores
    python -m experiments.report --width 32                  # collect existing results
    python -m experiments.report --setup mlp-digits mlp-cifar10 --width 8 32    # several setups and widths

The page shows the figure, the paper's claim, the finding, the barriers and the exact command of each experiment. The
name of the file contains the flags that differ from their defaults. Without --run, an experiment whose
only results have other flags is shown with those flags, and the page lists the commands of experiments without results.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from mcomb.io.paths import AnyPath, absolute, atomic, make_writable, write_text
from mcomb.lab import cli
from mcomb.lab.cache.store import Store
from mcomb.lab.cli import Flag
from mcomb.lab.flags import Config, command, convert_config
from mcomb.lab.run_folders import has_pretrained
from mcomb.lab.runs.command import parse_and_join, print_plan
from mcomb.lab.runs.experiment import Experiment, config_of
from mcomb.lab.runs.plan import list_jobs
from mcomb.lab.runs.results import Results
from mcomb.lab.runs.reuse import find_other_runs
from mcomb.lab.runs.run import figure_path, read_results, run
from mcomb.lab.setups import SETUPS, WIDEST
from mcomb.runtime.processes import from_first
from mcomb.runtime.progress import say, show, show_json

from . import (
    bernoulli,
    centered,
    edges,
    functional,
    hyperplane,
    landscape,
    linear,
    matchers,
    merge,
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
from .report_page import Entry, Missing, render

ORDER = (
    *(schematic, uniform, subcube, hyperplane, bernoulli, stitching, linear),
    *(linear, centered, minmax, transitivity, triangle, functional, edges, robustness, matchers, width),
    *(landscape, merge),
)  # linear twice, between and beyond the networks; without decay, which trains thirty networks, gauge and transport
BEYOND = (-1.0, 2.0)


@dataclass(frozen=True)
class ReportConfig(width.WidthConfig):
    """Flags of the sweeps, which apply to all experiments, with several setups and widths."""

    setup: Annotated[tuple[str, ...], Flag("models, datasets and recipes", choices=SETUPS)] = (  # type: ignore[assignment]
        "resnet20-cifar10",
    )
    width: Annotated[tuple[int, ...], Flag("width multipliers", 1, WIDEST)] = (32,)  # type: ignore[assignment]
    run: Annotated[bool, Flag("run the missing experiments", identity=False)] = False


class PageJob(NamedTuple):
    """An experiment on the page: its name there, its setup and width, and its flags."""

    name: str
    place: str
    experiment: Experiment
    config: Config


def plan(config: ReportConfig) -> list[PageJob]:
    """Return all experiments in ORDER for all setups and widths.

    `schematic` appears once, because it needs no networks, and `width` once for each setup.
    """
    jobs: list[PageJob] = []
    setups, widths = tuple(dict.fromkeys(config.setup)), tuple(dict.fromkeys(config.width))
    for setup, its_width in itertools.product(setups, widths):
        place = f"{SETUPS[setup].title}, width {its_width}"
        for i, module in enumerate(ORDER):
            if (module is width and its_width != widths[0]) or (module is schematic and jobs):
                continue
            if module is width and config.pretrained and not all(has_pretrained(setup, w) for w in config.widths):
                continue
            if module is merge and config.given_networks:
                continue  # merge trains its own networks
            experiment, name = module.EXPERIMENT, module.EXPERIMENT.name
            own = config_of(experiment, config, setup=setup, width=its_width)
            if ORDER.index(module) < i:
                name, own = f"{name}, beyond", replace(own, range=BEYOND)
            jobs.append(PageJob(name, place, experiment, own))
    return jobs


def page_path(config: ReportConfig) -> AnyPath:
    """Return the path of the page: in the innermost folder common to its setups and widths, with its flags."""
    setups, widths = tuple(dict.fromkeys(config.setup)), tuple(dict.fromkeys(config.width))
    store = Store(convert_config(config, width.WidthConfig, setup=setups[0], width=widths[0]))
    name, *flags = store.folder("report").name.split(",")
    several = {"setup": setups, "width": widths} if len(setups) > 1 else {"width": widths} if len(widths) > 1 else {}
    name = ",".join([name, *(f"{flag}={'..'.join(map(str, values))}" for flag, values in several.items()), *flags])
    folder = config.out if len(setups) > 1 else store.folders.home.parent if len(widths) > 1 else store.folders.home
    return folder / f"{name}.html"


def title(config: ReportConfig) -> str:
    """Return the title of the page."""
    widths = [str(each) for each in dict.fromkeys(config.width)]
    text = f"widths {', '.join(widths[:-1])} and {widths[-1]}" if len(widths) > 1 else f"width {widths[0]}"
    return f"{'; '.join(SETUPS[setup].title for setup in dict.fromkeys(config.setup))}, {text}"


def read_nearest(job: PageJob) -> tuple[Config, str, Results | None]:
    """Return the config, the differing flags and the results of a job, or of its run with the most similar flags.

    Runs of `linear` with another --range do not count.
    """
    others = from_first(find_other_runs, job.experiment, job.config)
    for own, flags in ((job.config, ""), *others):
        same_line = own.range == job.config.range
        if same_line and (results := read_results(job.experiment, own)):
            return own, flags, results
    return job.config, "", None


def _write(path: AnyPath, page: str) -> None:
    with atomic(path) as temporary:
        write_text(temporary, page)


def main(argv: list[str] | None = None) -> None:
    """Collect the results, or with --run compute them, and write the page."""
    config = parse_and_join(ReportConfig, __doc__, argv)
    jobs = plan(config)
    if config.plan:
        return print_plan(need for job in jobs for need in list_jobs(job.experiment, job.config))
    path = page_path(config)
    from_first(make_writable, path.parent)
    say(f"the report goes to {path}")
    entries, missing = [], []
    for job in jobs:
        own, flags, results = job.config, "", run(job.experiment, job.config) if config.run else None
        if results is None:
            own, flags, results = read_nearest(job)
        if results is None:
            missing.append(Missing(job.name, command(job.experiment.name, job.config), job.place))
            continue
        picture = figure_path(job.experiment.name, Store(own))
        entries.append(Entry(results, picture.read_bytes(), job.name, job.place, flags))
    from_first(_write, path, render(title(config), entries, missing))
    left = f"{len(missing)} not run yet" + (" (--run runs them)" if missing else "")
    others = [f"{entry.name} was run with other flags: {entry.flags}" for entry in entries if entry.flags]
    show("\n".join([f"{len(entries)} experiments in the report; {left}", *others, f"report: {absolute(path)}"]))
    show_json({
        "page": str(absolute(path)),
        "experiments": [
            {"name": entry.name, "of": entry.place, "other_flags": entry.flags}
            | {key: getattr(entry.results, key) for key in ("agrees", "is_papers", "finding")}
            for entry in entries
        ],
        "missing": [{"name": left.name, "of": left.place, "command": left.command} for left in missing],
    })  # fmt: skip


if __name__ == "__main__":
    cli.run(main)
