"""Run the command line of an experiment: parse its flags, join other processes, then plan or run."""

import textwrap
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import jax
import jaxlib
import numpy as np

from mcomb.errors import UserError
from mcomb.io.fingerprints import code_fingerprint, fingerprint
from mcomb.lab import cli
from mcomb.lab.cache.store import Store
from mcomb.lab.flags import TrainingConfig, command, flag_words, parse_flags
from mcomb.lab.runs import plan
from mcomb.lab.runs.experiment import Experiment, idle_flags
from mcomb.lab.runs.plan import Job, list_jobs
from mcomb.lab.runs.results import to_json
from mcomb.lab.runs.run import figure_path, run
from mcomb.lab.setups import SETUPS
from mcomb.runtime.processes import join, require_agreement
from mcomb.runtime.progress import show, show_json

T = TypeVar("T", bound=TrainingConfig)

EXPERIMENTS = Path(__file__).parents[3] / "experiments"  # in a clone; elsewhere they are a part of this package


def main(experiment: Experiment, description: str | None, argv: list[str] | None = None) -> None:
    """Run or plan an experiment with the flags of the command line."""

    def plan_or_run() -> None:
        config = parse_and_join(experiment.config, description, argv)
        for name, why in idle_flags(experiment, config).items():
            raise UserError(f"{' '.join(flag_words(config, name))} {why}.")
        if config.plan:
            print_plan(list_jobs(experiment, config))
        else:
            store = Store(config)
            results = run(experiment, config, store)
            figure = figure_path(experiment.name, store)
            figures = [str(figure), str(figure.with_suffix(".pdf"))]
            show_json(to_json(results) | {"folder": str(figure.parent), "figures": figures})

    cli.run(plan_or_run)


def parse_and_join(config: type[T], description: str | None, argv: list[str] | None) -> T:
    """Parse the command line, and connect to the other processes that it names."""
    parsed = parse_flags(config, description or "", argv, setups_help())
    if parsed.distributed or parsed.coordinator or parsed.processes or parsed.process is not None:
        join(parsed.coordinator, parsed.processes, parsed.process)
        # Data may be in different places: they are compared once they are read.
        require_agreement("flags", command("…", replace(parsed, data_dir=None)))
        files = {path.name: np.frombuffer(path.read_bytes(), np.uint8) for path in EXPERIMENTS.glob("*.py")}
        require_agreement("code", f"{code_fingerprint()}-{fingerprint(files)}")
        require_agreement("versions", f"jax {jax.__version__}, jaxlib {jaxlib.__version__}")
    return parsed


def print_plan(jobs: Iterable[Job]) -> None:
    """Print the steps of a run, with their operations, memory and disk space."""
    steps = plan.plan_steps(jobs)
    show(plan.table(steps))
    show_json({"steps": [step._asdict() for step in steps], "all": plan.total(steps)._asdict()})


def setups_help() -> str:
    """Return the recipes of the setups, for the end of a program's help."""
    lines, width = [], max(map(len, SETUPS)) + 2
    for name, setup in SETUPS.items():
        recipe = setup.recipe
        flags = " ".join(f"--{flag.replace('_', '-')} {value}" for flag, value in setup.flags)
        about = [
            f"{recipe.epochs} epochs, batch {recipe.batch_size}, learning rate {recipe.learning_rate:g}, "
            f"weight decay {recipe.weight_decay:g}",
            *([setup.expect] if setup.expect else []),
            *(textwrap.wrap(f"defaults: {flags}", 77, break_on_hyphens=False) if flags else []),
        ]
        lines += [f"  {name if i == 0 else '':{width}}{line}" for i, line in enumerate(about)]
    return "\n".join(["setups:", *lines])
