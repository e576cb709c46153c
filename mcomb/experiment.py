"""A sweep from its flags to its figure."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mcomb import cli, figures
from mcomb.combine import Draw
from mcomb.evaluate import Metrics
from mcomb.results import METRICS, SPLITS, VARIANTS, Rows, barriers, environment, table, writable, write_json
from mcomb.setups import SETUPS
from mcomb.workspace import Config, Task, Workspace


@dataclass(frozen=True)
class Sweep:
    """An experiment that varies one parameter and draws combinations of A and B at each of its values."""

    name: str
    title: str
    parameter: str
    label: str
    values: tuple[float, float]  # first and last
    draw: Draw
    paper: Mapping[str, Mapping[str, float]]  # the paper's barriers by setup


def run_sweep(sweep: Sweep, config: Config) -> dict[str, Any]:
    """The results of a sweep, measured where they are not yet, left in the run's folder and drawn."""
    start = time.monotonic()
    workspace = Workspace(config)
    folder = writable(workspace.folder(sweep.name))
    print(f"results go to {folder}", flush=True)
    a, b = workspace.network("A"), workspace.network("B")
    values = np.linspace(*sweep.values, config.points, dtype=np.float32)
    identity = {
        "experiment": sweep.name,
        "config": workspace.identity,
        "networks": {"A": a.digest, "B": b.digest},
        "parameter": {"name": sweep.parameter, "label": sweep.label, "values": values.tolist()},
    }
    results = finished(folder, identity)
    if results is None:
        scores = workspace.scores({"A": a.params, "B": b.params})
        references = {split: np.stack([scores[model][split].predicted for model in "AB"]) for split in SPLITS}
        pairs = {"naive": (a.params, b.params), "aligned": (a.params, workspace.aligned(a, b))}
        shares = np.repeat(values, config.samples)
        tasks = {variant: Task(sweep.draw, pairs[variant], shares) for variant in VARIANTS}
        measured = workspace.measure(sweep.name, Rows(folder, identity), tasks, references)
        models = {
            model: {
                split: {metric: getattr(score, metric) for metric in METRICS} for split, score in by_split.items()
            }
            for model, by_split in scores.items()
        }
        curves = {
            variant: {
                split: listed(metrics, (config.points, config.samples))
                for split, metrics in measured[variant].items()
            }
            for variant in VARIANTS
        }
        results = {
            "title": f"{workspace.setup.title}, width {config.width}: {sweep.title}",
            **identity,
            "environment": environment(),
            "models": models,
            "curves": curves,
            "barriers": barriers(models, curves),
            "paper": sweep.paper.get(config.setup),
            "durations": workspace.seconds,
            "seconds": time.monotonic() - start,
        }
        write_json(folder / "results.json", results)
    figures.sweep(results, folder)
    print(f"{results['title']}\n{table(results)}")
    return results


def listed(metrics: Metrics, shape: tuple[int, ...] = (-1,)) -> dict[str, Any]:
    """Metrics as nested lists, the axis of combinations in the given shape."""
    return {
        field: values.reshape(*shape, *values.shape[1:]).tolist() for field, values in metrics._asdict().items()
    }


def finished(folder: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """The results in a folder, if they are there and of just this run."""
    path = folder / "results.json"
    results = json.loads(path.read_text()) if path.is_file() else {}
    return results if all(results.get(name) == value for name, value in identity.items()) else None


def main(sweep: Sweep, description: str | None, argv: list[str] | None = None) -> None:
    """The command line of a sweep."""
    recipes = {name: setup.recipe for name, setup in SETUPS.items()}
    lines = [
        f"  {name:18}{recipe.epochs} epochs, batch {recipe.batch_size}, "
        f"learning rate {recipe.learning_rate:g}, weight decay {recipe.weight_decay:g}"
        for name, recipe in recipes.items()
    ]
    epilog = "\n".join(["setups:", *lines])
    cli.run(lambda: run_sweep(sweep, cli.parse(Config, description or "", argv, epilog)))
