"""The examples of README and docs/ are run as they stand, and all commands in them understood."""

import importlib
import re
import shlex
from pathlib import Path

import jax
import numpy as np
import pytest

from mcomb.lab import cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
TEXTS = [README, *(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))]


@pytest.mark.slow
def test_the_example_aligns_and_combines_a_network_of_ones_own(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    scope: dict = {}
    exec(code, scope)
    loss, accuracy = map(float, capsys.readouterr().out.split())
    assert len(scope["metrics"].loss) == 100
    assert loss == scope["metrics"].loss.max()
    assert 0 <= accuracy <= 1
    moved = jax.tree.map(lambda x, y: bool((x != y).any()), scope["b"], scope["aligned"])
    assert moved["Dense_0"]["kernel"]  # the residual stream
    assert moved["Dense_1"]["kernel"]  # the inside of a block


@pytest.mark.slow
def test_task_examples_measure_the_given_losses(capsys):
    language, regression = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tasks.md").read_text(), re.S)
    scope: dict = {}
    exec(language, scope)
    sweep, counted = scope["sweep"], scope["labels"] >= 0
    assert float(capsys.readouterr().out.split()[0]) == pytest.approx(np.exp(sweep.loss).max(), rel=1e-5)
    logits = np.asarray(jax.jit(scope["apply"])(scope["a"], scope["inputs"]), np.float64)
    losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, scope["labels"][..., None], -1)[..., 0]
    assert sweep.loss.shape == (5, 1)
    assert sweep.loss[0, 0] == pytest.approx(losses[counted].mean(), rel=1e-5)  # share 0: A itself
    exec(regression, scope)
    errors = np.asarray(scope["predict"](scope["a"], scope["x"]) - scope["labels"]["target"], np.float64)
    assert scope["score"].loss == pytest.approx(np.square(errors).mean(), rel=1e-5)
    assert scope["score"].absolute == pytest.approx(np.abs(errors).mean(), rel=1e-5)
    assert len(scope["aligned"].matching.losses) == 11


@pytest.mark.slow
def test_the_examples_of_merging_learn_fit_and_estimate(capsys):
    merging, partial_merging, statistics = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "merging.md").read_text(), re.S
    )
    scope: dict = {}
    exec(merging + partial_merging, scope)
    weights = sum(leaf.size for leaf in jax.tree.leaves(scope["a"]))
    assert weights < scope["partly"].weights <= 1.5 * weights
    exec(statistics, scope)
    for network in ("merged", "middle"):
        means = scope[network]["batch_stats"]["BatchNorm_0"]["mean"]
        assert np.abs(means).max() > 0  # those of new networks are zero
    assert len(scope["metrics"].loss) == 5
    assert scope["found"].loss < scope["found"].losses[0]
    assert scope["found"].shares[0]["Dense_0"]["bias"].shape == (32,)
    assert 0 <= float(capsys.readouterr().out.split()[0]) <= 1


def test_the_two_commands_are_there_once_for_everyone():
    assert README.count("pip install -e . && python -m experiments.uniform --setup mlp-digits\n") == 1
    assert README.count('pip install -e ".[test]" && pytest\n') == 1


def commands():
    """Every command of ours, in blocks and inside sentences, but for those with a word to fill in."""
    lines, fenced = [], r"```\w*\n(.*?)```"
    for text in TEXTS:
        lines += [line for block in re.findall(fenced, text, re.S) for line in block.splitlines()]
        lines += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", re.sub(fenced, "", text, flags=re.S))]
    found = re.findall(r"python -m ((?:experiments|benchmarks)\.\w+[^#&|\n]*)", "\n".join(lines))
    return sorted({line.strip() for line in found if not re.search(r"\b[A-Z]{3,}\b|…", line)})


@pytest.mark.parametrize("line", commands())
def test_a_command_is_one_that_its_program_takes(line):
    name, *words = shlex.split(line)
    module = importlib.import_module(name)
    kinds = [vars(module)["EXPERIMENT"].config] if hasattr(module, "EXPERIMENT") else []
    kinds += [kind for kind in vars(module).values() if getattr(kind, "__module__", None) == name and is_config(kind)]
    cli.parse(kinds[0], "", words)


def is_config(kind):
    return isinstance(kind, type) and kind.__name__.endswith("Config")


def test_the_first_command_is_among_those_that_are_checked():
    assert "experiments.uniform --setup mlp-digits" in commands()
