"""Pretrained networks reproduce the numbers in docs/results.md."""

import re
from pathlib import Path

import pytest

from experiments import linear
from mcomb.lab import cli
from mcomb.lab.runs.run import run

RESULTS = (Path(__file__).parents[2] / "docs" / "results.md").read_text()


@pytest.mark.slow
def test_pretrained_reproduces_documented_row(cifar_archive, tmp_path):
    """Use three points, because the worst of nine points is the midpoint."""
    section = RESULTS.partition("### Without training anything")[2]
    documented = re.findall(r"\| `linear --points 9` \| (.*?) / (.*?) \| (.*?) / (.*?) \|", section)[0]
    flags = ["--setup", "mlp-cifar10", "--pretrained", "--train-examples", "200", "--points", "3"]
    places = ["--data-dir", str(cifar_archive), "--out", str(tmp_path)]
    found = run(linear.EXPERIMENT, cli.parse(linear.LinearConfig, "", [*flags, *places]))
    barriers = [found.barriers[v]["test"][m] for v in ("naive", "aligned") for m in ("loss", "accuracy")]
    assert barriers == pytest.approx([float(number) for number in documented], abs=0.01)
