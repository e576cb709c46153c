"""An experiment from its flags to its results, its figure and what it found."""

import dataclasses
import json
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mcomb import cli, figures
from mcomb.base import Params
from mcomb.combine import Draw
from mcomb.evaluate import Metrics, Score
from mcomb.results import METRICS, SPLITS, VARIANTS, Rows, barriers, environment, table, writable, write_json
from mcomb.setups import SETUPS
from mcomb.workspace import Config, LineConfig, Network, SweepConfig, Task, Workspace

Results = dict[str, Any]
Finding = tuple[bool | None, str]  # whether it agrees with the paper, and the sentence that says so


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What an experiment measures, draws and concludes; everything else is the same for all of them."""

    name: str
    title: str
    claim: str  # what the paper found
    alt: str  # what the figure shows, for those who cannot see it
    measure: Callable[[Workspace, dict[str, Network], Rows], Results]
    draw: Callable[[Results, Path], None]
    conclude: Callable[[Results], Finding]
    config: type[Config] = Config
    networks: str = "AB"
    table: Callable[[Results], str] = table  # of results that have barriers
    paper: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # the paper's barriers by setup


def run(experiment: Experiment, config: Config) -> Results:
    """The results of an experiment, measured where they are not yet, left in the run's folder and drawn."""
    start = time.monotonic()
    workspace = Workspace(config)
    folder = writable(workspace.folder(experiment.name))
    print(f"results go to {folder}", flush=True)
    networks = {letter: workspace.network(letter) for letter in experiment.networks}
    identity = {
        "experiment": experiment.name,
        "config": workspace.identity,
        "networks": {letter: network.digest for letter, network in networks.items()},
    }
    results = finished(folder, identity)
    of_width = f", width {config.width}" if networks else ""
    by = f", matched by {config.matcher}" if networks and config.matcher not in ("", "weights") else ""
    how = by + (", repaired" if getattr(config, "repair", False) else "")
    if results is None:
        measured = experiment.measure(workspace, networks, Rows(folder, identity))
        results = {
            "title": f"{workspace.setup.title}{of_width}{how}: {experiment.title}",
            **identity,
            "environment": environment(),
            **measured,
            "paper": experiment.paper.get(config.setup),
            "command": command(experiment.name, config),
            "durations": workspace.seconds,
            "seconds": time.monotonic() - start,
        }
        experiment.draw(results, folder)
        write_json(folder / "results.json", results)  # last: results that are there have their figure
    results = explained(experiment, results, folder)
    numbers = [experiment.table(results)] if "barriers" in results else []
    print("\n".join([results["title"], *numbers, results["finding"]]))
    return results


def explained(experiment: Experiment, results: Results, folder: Path) -> Results:
    """Results with what the paper found and what they say of it; their figure is drawn if it is missing."""
    if not all((folder / f"{experiment.name}.{kind}").is_file() for kind in ("png", "pdf")):
        experiment.draw(results, folder)
    agrees, finding = experiment.conclude(results)
    return results | {"claim": experiment.claim, "alt": experiment.alt, "agrees": agrees, "finding": finding}


def gathered(experiment: Experiment, config: Config) -> Results | None:
    """The results of an experiment, if it has been run with this config."""
    workspace = Workspace(config)
    identity = {"experiment": experiment.name, "config": workspace.identity}
    folder = workspace.folder(experiment.name)
    results = finished(folder, identity)
    return results and explained(experiment, results, folder)


def finished(folder: Path, identity: Mapping[str, Any]) -> Results | None:
    """The results in a folder, if they are there and of just this run."""
    path = folder / "results.json"
    results = json.loads(path.read_text()) if path.is_file() else {}
    return results if all(results.get(name) == value for name, value in identity.items()) else None


def command(name: str, config: Config) -> str:
    """The command line that gives a config."""
    words = ["python", "-m", f"experiments.{name}"]
    for flag in dataclasses.fields(config):
        value = getattr(config, flag.name)
        if value != flag.default:
            parts = value if isinstance(value, tuple) else () if value is True else (value,)
            words += ["--" + flag.name.replace("_", "-"), *map(str, parts)]
    return shlex.join(words)


def narrowed(config: Config, to: type[Config]) -> Any:
    """The flags of `config` that another experiment has too."""
    names = {flag.name for flag in dataclasses.fields(to)} & {flag.name for flag in dataclasses.fields(config)}
    return to(**{name: getattr(config, name) for name in names})


def listed(metrics: Metrics, shape: tuple[int, ...]) -> Results:
    """Metrics as nested lists, the axis of combinations in the given shape."""
    return {name: values.reshape(*shape, *values.shape[1:]).tolist() for name, values in metrics._asdict().items()}


def models_of(scores: Mapping[str, Mapping[str, Score]]) -> Results:
    """The loss and accuracy of networks by themselves, by split."""
    return {
        model: {split: {metric: getattr(score, metric) for metric in METRICS} for split, score in by_split.items()}
        for model, by_split in scores.items()
    }


def measure_curves(
    workspace: Workspace,
    rows: Rows,
    ends: Mapping[str, Params],
    tasks: Mapping[str, Task],
    shape: tuple[int, ...],
    between: Any = ...,
) -> Results:
    """The two networks that curves run between, the curves, and their barriers over the points `between` picks."""
    scores = workspace.scores(ends)
    references = {split: np.stack([scores[model][split].predicted for model in ends]) for split in SPLITS}
    measured = workspace.measure(rows, tasks, references)
    models = models_of(scores)
    curves = {
        name: {split: listed(metrics, shape) for split, metrics in by_split.items()}
        for name, by_split in measured.items()
    }
    return {"models": models, "curves": curves, "barriers": barriers(models, curves, between)}


def measure_pair(
    workspace: Workspace,
    networks: Mapping[str, Network],
    rows: Rows,
    draw: Draw,
    name: str,
    label: str,
    values: Any,
    between: Any = ...,
) -> Results:
    """The curves of A combined with B, naive and aligned, over the values of a parameter."""
    a, b = networks["A"], networks["B"]
    samples = getattr(workspace.config, "samples", 1)
    parameters = np.repeat(np.asarray(values, np.float32), samples)
    pairs = {"naive": (a.params, b.params), "aligned": (a.params, workspace.aligned(a, b))}
    tasks = {variant: Task(draw, pairs[variant], parameters) for variant in VARIANTS}
    ends, shape = {"A": a.params, "B": b.params}, (len(values), samples)
    curves = measure_curves(workspace, rows, ends, tasks, shape, between)
    return {"parameter": {"name": name, "label": label, "values": np.asarray(values).tolist()}, **curves}


def sweep(
    *,
    parameter: str,
    label: str,
    values: tuple[float, float],
    combine: Draw,
    draw: Callable[[Results, Path], None] = figures.sweep,
    conclude: Callable[[Results], Finding] | None = None,
    config: type[LineConfig] = SweepConfig,
    **rest: Any,
) -> Experiment:
    """An experiment that varies a parameter from the first to the last of `values` and combines A with B at each."""

    def measure(workspace: Workspace, networks: dict[str, Network], rows: Rows) -> Results:
        first, last = getattr(workspace.config, "range", values)
        points = np.linspace(first, last, workspace.config.points)  # type: ignore[attr-defined]
        between = (points >= values[0]) & (points <= values[1])  # beyond these there is no barrier to speak of
        return measure_pair(workspace, networks, rows, combine, parameter, label, points, between)

    return Experiment(measure=measure, draw=draw, conclude=conclude or works_aligned, config=config, **rest)


def works_aligned(results: Results, most: float = 0.1) -> Finding:
    """Whether every aligned combination works while some naive one does not, by the test accuracy barrier."""
    aligned, naive = (results["barriers"][variant]["test"] for variant in ("aligned", "naive"))
    agrees = aligned["accuracy"] <= most and aligned["accuracy"] < naive["accuracy"]
    return agrees, (
        f"Aligned, the worst combination loses {aligned['accuracy']:.1%} of test accuracy against the mean of A and "
        f"B (loss barrier {aligned['loss']:.3f}); naive, it loses {naive['accuracy']:.1%} ({naive['loss']:.3f})."
    )


def setups_help() -> str:
    """The recipes of the setups, for the end of a program's help."""
    recipes = {name: setup.recipe for name, setup in SETUPS.items()}
    lines = [
        f"  {name:18}{recipe.epochs} epochs, batch {recipe.batch_size}, "
        f"learning rate {recipe.learning_rate:g}, weight decay {recipe.weight_decay:g}"
        for name, recipe in recipes.items()
    ]
    return "\n".join(["setups:", *lines])


def main(experiment: Experiment, description: str | None, argv: list[str] | None = None) -> None:
    """The command line of an experiment."""
    cli.run(lambda: run(experiment, cli.parse(experiment.config, description or "", argv, setups_help())))
