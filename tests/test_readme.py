"""Run the examples of README and docs/, and parse all commands in them."""

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
def test_readme_examples_align_sweep_and_merge(capsys, tmp_path, monkeypatch):
    """The second example is a script; the first is a fragment of it."""
    fragment, _, script = re.findall(r"```python\n(.*?)```", README, re.S)
    monkeypatch.chdir(tmp_path)
    scope: dict = {}
    exec(script, scope)
    *_, barriers, accuracy = capsys.readouterr().out.splitlines()
    naive, sweep = scope["naive"], scope["sweep"]
    assert barriers == f"{naive.barrier} {sweep.barrier}"
    assert sweep.loss.shape == (5, 10)
    assert sweep.barrier.accuracy < naive.barrier.accuracy / 2
    assert sweep.barrier.loss < naive.barrier.loss / 2
    assert float(accuracy) > 0.85  # each network by itself has about 0.92
    moved = jax.tree.map(lambda x, y: bool((x != y).any()), scope["b"], scope["aligned"].params)
    assert moved["Dense_0"]["kernel"]
    assert moved["Dense_1"]["kernel"]
    assert Path("uniform.png").stat().st_size > 1000
    Path("uniform.png").unlink()
    exec(fragment, scope)
    loss, accuracy = map(float, capsys.readouterr().out.split())
    assert scope["sweep"].loss.shape == (25, 10)  # 250 mixtures, as the comment says
    assert (loss, accuracy) == pytest.approx(scope["sweep"].barrier)
    assert Path("uniform.png").exists()


@pytest.mark.slow
def test_docs_tasks_examples_measure_given_losses(capsys):
    language, regression = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tasks.md").read_text(), re.S)
    scope: dict = {}
    exec(language, scope)
    sweep, counted = scope["sweep"], scope["labels"] >= 0
    assert float(capsys.readouterr().out.split()[0]) == pytest.approx(np.exp(sweep.loss).max(), rel=1e-5)
    logits = np.asarray(jax.jit(scope["apply"])(scope["a"], scope["inputs"]), np.float64)
    losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, scope["labels"][..., None], -1)[..., 0]
    assert sweep.loss.shape == (5, 1)
    assert sweep.loss[0, 0] == pytest.approx(losses[counted].mean(), rel=1e-5, abs=1e-6)  # share 0: A itself
    exec(regression, scope)
    errors = np.asarray(scope["predict"](scope["a"], scope["x"]) - scope["labels"]["target"], np.float64)
    assert scope["score"].loss == pytest.approx(np.square(errors).mean(), rel=1e-5)
    assert scope["score"].absolute == pytest.approx(np.abs(errors).mean(), rel=1e-5)
    assert len(scope["aligned"].matching.losses) == 11


@pytest.mark.slow
def test_docs_merging_examples_learn_fit_and_estimate(capsys):
    *merging, statistics = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "merging.md").read_text(), re.S)
    scope: dict = {}
    exec("".join(merging), scope)
    weights = sum(leaf.size for leaf in jax.tree.leaves(scope["a"]))
    assert weights < scope["partly"].details.weights <= 1.5 * weights
    exec(statistics, scope)
    for network in ("merged", "middle"):
        params = getattr(scope[network], "params", scope[network])
        assert np.abs(params["batch_stats"]["BatchNorm_0"]["mean"]).max() > 0  # new networks have zeros
    assert scope["sweep"].loss.shape == (5, 1)
    assert scope["learned"].loss < scope["learned"].losses[0]
    assert scope["learned"].shares[0]["Dense_0"]["bias"].shape == (32,)
    assert 0 <= float(capsys.readouterr().out.split()[0]) <= 1


def test_readme_has_both_commands_once():
    assert README.count("pip install -e . && python -m experiments.uniform --setup mlp-digits\n") == 1
    assert README.count('pip install -e ".[test]" && pytest\n') == 1


def commands():
    """Return all commands in blocks and sentences, except those with a word to fill in."""
    lines, fenced = [], r"```\w*\n(.*?)```"
    for text in TEXTS:
        lines += [line for block in re.findall(fenced, text, re.S) for line in block.splitlines()]
        lines += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", re.sub(fenced, "", text, flags=re.S))]
    found = re.findall(r"python -m ((?:experiments|benchmarks)\.\w+[^#&|\n]*)", "\n".join(lines))
    return sorted({line.strip() for line in found if not re.search(r"\b[A-Z]{3,}\b|…", line)})


@pytest.mark.parametrize("line", commands())
def test_docs_command_parses(line):
    name, *words = shlex.split(line)
    module = importlib.import_module(name)
    kinds = [vars(module)["EXPERIMENT"].config] if hasattr(module, "EXPERIMENT") else []
    kinds += [kind for kind in vars(module).values() if getattr(kind, "__module__", None) == name and is_config(kind)]
    cli.parse(kinds[0], "", words)


def is_config(kind):
    return isinstance(kind, type) and kind.__name__.endswith("Config")


def test_docs_commands_include_first_command():
    assert "experiments.uniform --setup mlp-digits" in commands()
