import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments import linear, width
from mcomb.errors import UserError
from mcomb.lab.runs.results import Curves

FEW = ("--points", "3", "--samples", "2")


@pytest.mark.slow
def test_width_has_barriers_and_networks_of_sweeps(results, draws_pairs):
    found = results(width, "--widths", "2", "2", *FEW)
    assert draws_pairs(width, found)
    assert found["widths"] == [2]
    assert found["by_width"].keys() == {"linear", "uniform", "subcube", "hyperplane", "bernoulli"}
    line = results(linear, *FEW[:2])
    assert found["by_width"]["linear"] == [line["barriers"]]
    assert found["models"] == {f"{letter}, width 2": line["models"][letter] for letter in "AB"}
    assert found["guessing"] == line["guessing"]
    assert found["finding"] == "No verdict: width 2 alone shows no trend. Give several --widths."


def test_width_runs_every_sweep_narrowest_first(config_of):
    config = config_of(width, "--widths", "4", "1", "4", "2", *FEW)
    parts = width.sweeps(config)
    assert list(parts) == [f"{name}, width {w}" for w in (1, 2, 4) for name in width.WIDTH_SWEEPS]
    for name, (experiment, its_config) in parts.items():
        assert name == f"{experiment.name}, width {its_config.width}"
        assert (its_config.points, its_config.epochs, its_config.out) == (3, 40, config.out)


def test_width_compares_barriers_over_widths(config_of, tmp_path):
    config = config_of(width, "--widths", "2", "1", "4")

    def part(w, name):
        score = {split: {"loss": 0.1 * w, "accuracy": 0.9} for split in ("train", "test")}
        lost = {split: {"loss": 1 / w, "accuracy": len(name) / 100 / w} for split in ("train", "test")}
        models, guess = {"A": score, "B": score}, {"test": {"accuracy": 0.1, "examples": 100}}
        barriers = {"naive": lost, "aligned": lost}
        return Curves(models=models, guessing=guess, barriers=barriers, ends=["A", "B"], curves={})

    parts = {f"{name}, width {w}": part(w, name) for w in (1, 2, 4) for name in width.WIDTH_SWEEPS}
    found = width.measure(SimpleNamespace(config=config, parts=parts))
    assert found.widths == [1, 2, 4]
    assert [at["aligned"]["test"]["loss"] for at in found.by_width["uniform"]] == [1, 0.5, 0.25]
    assert found.models["B, width 4"]["test"]["loss"] == 0.4
    assert len(found.models) == 6
    verdict = width.judge(found)
    assert verdict.agrees
    assert "1.000 in loss and 10.0% in accuracy at width 1, and 0.250 and 2.5% at width 4" in verdict.finding
    width.draw(dataclasses.replace(found, title="Widths", experiment="width"), tmp_path)
    assert (tmp_path / "width.png").stat().st_size > 5_000


@pytest.mark.parametrize("letter", "abc")
def test_width_rejects_checkpoints(letter):
    config = dataclasses.replace(width.WidthConfig(), **{f"checkpoint_{letter}": Path("mine")})
    with pytest.raises(UserError, match="checkpoint mine, which has one width"):
        width.sweeps(config)
