"""List all experiments and their state for a setup, a width and other flags.

    python -m experiments --setup mlp-digits
    python -m experiments --setup mlp-cifar10 --width 8 --pairs 5

The program reads only the folders of results. An experiment may still measure a listed result again if its networks or
data have changed.
"""

import shutil
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

from mcomb.errors import UserError
from mcomb.lab import cli
from mcomb.lab.flags import command, convert_config, parse_flags
from mcomb.lab.runs.command import setups_help
from mcomb.lab.runs.experiment import config_of
from mcomb.lab.runs.reuse import RunState, find_other_runs, read_state
from mcomb.lab.runs.verdicts import verdict_colour
from mcomb.lab.setups import SETUPS
from mcomb.lab.tables import TABLE_WIDTH
from mcomb.runtime.progress import coloured, show, show_json

from . import decay, gauge, generate, pretrained, report, train, transport
from .width import WidthConfig

LISTED_EXPERIMENTS = (*dict.fromkeys(report.ORDER), decay, gauge, transport)
PROGRAMS = (train, report, generate, pretrained)
SHOWN_RUNS = 3  # the maximum number of other runs listed for each experiment
IGNORED_FLAGS = [
    name for name, flag in cli.flags(WidthConfig).items() if not flag.identity and name not in ("out", "json")
]


def first_line(module: ModuleType) -> str:
    """Return the first line of a module's docstring."""
    return (module.__doc__ or "").partition("\n")[0]


def name_of(module: ModuleType) -> str:
    """Return the module's name in `python -m experiments.NAME`."""
    return Path(module.__file__ or "").stem


def list_experiments(config: WidthConfig) -> list[dict[str, Any]]:
    """Return the name, description, command and state of each experiment."""
    listed = []
    for module in LISTED_EXPERIMENTS:
        experiment = module.EXPERIMENT
        about = {"name": experiment.name, "about": first_line(module)}
        try:
            own = config_of(experiment, config)
            state, line = read_state(experiment, own), command(experiment.name, own)
            others = [other.flags for other in find_other_runs(experiment, own)]
            if others and state.kind == "not run":
                state = state._replace(said="not run with these flags")
        except UserError as error:  # some experiments reject some flags
            state, line, others = RunState("impossible", f"rejects these flags: {error}"), None, []
        listed.append(about | {"command": line, "others": others} | state._asdict())
    return listed


def other_places(config: WidthConfig) -> list[str]:
    """Return the other setups and widths that have results, as flags."""
    found = sorted({path.parent.parent for path in config.out.glob("*/width-*/*/results.json")})
    chosen = config.out / config.setup / f"width-{config.width}"
    return [
        f"--setup {path.parent.name} --width {path.name.removeprefix('width-')}" for path in found if path != chosen
    ]


def lines(listed: list[dict[str, Any]], width: int) -> list[str]:
    """Format one line for each experiment, with its state in the last column."""
    name_width = max(len(entry["name"]) for entry in listed)
    state_width = max((len(entry["said"]) for entry in listed if entry["kind"] != "impossible"), default=0)
    left = max(24, width - name_width - state_width - 4)
    found = []
    for entry in listed:
        if entry["kind"] == "impossible":
            about = textwrap.shorten(entry["said"], max(24, width - name_width - 2), placeholder=" …")
            found.append(f"{entry['name']:{name_width}}  {coloured(about, 'yellow', sys.stdout)}")
            continue
        about = textwrap.shorten(entry["about"], left, placeholder=" …")
        said = entry["said"]
        if entry["kind"] != "not run":
            said = coloured(said, verdict_colour(entry["agrees"], entry["is_papers"]), sys.stdout)
        found.append(f"{entry['name']:{name_width}}  {about:{left}}  {said}")
    return found


def other_runs(listed: list[dict[str, Any]]) -> list[str]:
    """Format the flags of each experiment's other runs."""
    found = []
    for entry in listed:
        if entry["others"]:
            shown = [flags if i < SHOWN_RUNS else "" for i, flags in enumerate(entry["others"])]
            more = f"; and {len(shown) - SHOWN_RUNS} more" if len(shown) > SHOWN_RUNS else ""
            found += textwrap.wrap(
                f"{entry['name']}: {'; '.join(filter(None, shown))}{more}",
                TABLE_WIDTH,
                initial_indent="  ",
                subsequent_indent="    ",
                break_on_hyphens=False,
            )
    return ["runs with other flags (pass the flags to see the verdicts):", *found, ""] if found else []


def main(argv: list[str] | None = None) -> None:
    """Print the list."""
    config = parse_flags(WidthConfig, __doc__ or "", argv, setups_help(), "python -m experiments", IGNORED_FLAGS)
    listed, places = list_experiments(config), other_places(config)
    programs = [{"name": name_of(module), "about": first_line(module)} for module in PROGRAMS]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else TABLE_WIDTH
    todo = next((entry for entry in listed if entry["kind"] in ("not run", "begun")), listed[0])
    whole = convert_config(config, report.ReportConfig, setup=(config.setup,), width=(config.width,), run=True)
    show("\n".join([
        f"{SETUPS[config.setup].title}, width {config.width}, in {config.out}",
        "",
        *lines(listed, width),
        "",
        *other_runs(listed),
        f"run one:    {todo['command']}",
        f"run all:    {command('report', whole)}  # all except decay, gauge and transport",
        *(
            f"{program['name'] + ':':11} {textwrap.shorten(program['about'], max(24, width - 12), placeholder=' …')}"
            for program in programs
        ),
        *([f"other results: {'; '.join(places)}"] if places else []),
    ]))  # fmt: skip
    show_json({"setup": config.setup, "width": config.width, "experiments": listed, "programs": programs})


if __name__ == "__main__":
    cli.run(main)
