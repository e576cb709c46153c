"""Fixtures for experiments end to end, on digits with small networks."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest

from mcomb.lab import cli
from mcomb.lab.cache.store import Store
from mcomb.lab.runs.pairs import pool
from mcomb.lab.runs.results import SPLITS, from_json
from mcomb.lab.runs.run import run

# Equally many examples of both splits, so that one compilation serves both.
SMALL = ["--setup", "mlp-digits", "--width", "2", "--epochs", "40", "--train-examples", "397"]


@pytest.fixture(scope="session")
def out(tmp_path_factory):
    """One output folder for all workers, so that networks, matchings and results are computed once."""
    own = tmp_path_factory.getbasetemp()
    return str((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "runs")


@pytest.fixture
def config_of(out):
    """Return a config with small networks and these flags."""

    def of(module, *flags):
        return cli.parse(module.EXPERIMENT.config, "", [*SMALL, *flags, "--out", out])

    return of


@pytest.fixture
def results(config_of):
    """Run an experiment with flags, and return its results from disk with their verdict."""

    def of(module, *flags):
        config, name = config_of(module, *flags), module.EXPERIMENT.name
        returned = run(module.EXPERIMENT, config)
        folder = Store(config).folder(name)
        assert (folder / f"{name}.png").stat().st_size > 5_000
        assert (folder / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        assert returned.finding
        combinations = module.EXPERIMENT.combinations(config)
        if combinations and config.pairs == 1:
            _, *rows = (folder / "samples.jsonl").read_text().splitlines()
            assert len(rows) == len(SPLITS) * combinations  # as planned
        stored = json.loads((folder / "results.json").read_text())
        assert stored["command"].startswith(f"python -m experiments.{name} --setup mlp-digits --width 2")
        return stored | {"agrees": returned.agrees, "finding": returned.finding}

    return of


@pytest.fixture
def draws_pairs(tmp_path):
    """Check that the results can also be drawn as those of two pairs."""

    def of(module, found):
        other = json.loads(json.dumps(found), parse_float=lambda text: 1.1 * float(text))
        pairs = [from_json(module.EXPERIMENT.results, values) for values in (found, other)]
        module.EXPERIMENT.draw(replace(pool(pairs), title=found["title"]), tmp_path)
        return (tmp_path / f"{module.EXPERIMENT.name}.png").stat().st_size > 5_000

    return of


@pytest.fixture
def curve():
    """Return one curve of results as an array."""

    def of(results, variant, metric="loss", split="test"):
        return np.array(results["curves"][variant][split][metric])

    return of


@pytest.fixture
def is_score():
    """Check that combinations have the scores of a network, up to the rounding of a mean over 397 examples."""

    def of(values, network, metric, split="test"):
        expected = network[split][metric]
        slack = 397 * np.finfo(np.float32).eps * max(1.0, expected) if metric == "loss" else 0.0
        return bool(np.all(np.abs(np.asarray(values) - expected) <= slack))

    return of
