"""The experiment `uniform` end to end on digits: run, repeated, interrupted and misused."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from experiments import uniform
from mcomb.lab.cache import matchings
from mcomb.lab.data.download import DATA_VARIABLE
from mcomb.lab.runs import command, measure
from mcomb.lab.training import side_by_side

ROOT = Path(__file__).parents[2]
SMALL = ["--setup", "mlp-digits", "--width", "2", "--points", "3", "--samples", "2", "--train-examples", "50"]


def run(*flags, out):
    command.main(uniform.EXPERIMENT, uniform.__doc__, [*SMALL, *flags, "--out", str(out)])


def results_in(out):
    (path,) = out.rglob("results.json")
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of one complete small run."""
    out = tmp_path_factory.mktemp("runs")
    run("--epochs", "40", out=out)
    return out


def test_uniform_writes_results_figure_and_inputs(finished):
    home = finished / "mlp-digits" / "width-2"
    folder = home / "uniform,epochs=40,train-examples=50,points=3,samples=2"
    assert {path.name for path in folder.iterdir() if path.name != ".lock"} == {
        ".figures.json",
        "results.json",
        "samples.jsonl",
        "uniform.png",
        "uniform.pdf",
    }
    assert (home / "networks" / "seed-0,epochs=40" / "40").is_dir()
    assert (home / "matchings" / "seed-1,epochs=40-to-seed-0,epochs=40.npz").is_file()
    results = results_in(finished)
    assert results["experiment"] == "uniform"
    assert results["parameter"]["name"] == "s"
    assert results["parameter"]["values"] == [0, 0.25, 0.5]
    assert results["config"]["width"] == 2
    assert results["config"]["recipe"]["epochs"] == 40
    assert results["environment"]["packages"]["jax"]
    assert "paper" not in results
    assert results["seconds"] > 0
    assert results["durations"].keys() == {"training", "matching", "evaluation"}
    for variant in ("naive", "aligned"):
        for split, examples in (("train", 50), ("test", 397)):
            for metric in ("loss", "accuracy"):
                assert np.shape(results["curves"][variant][split][metric]) == (3, 2)
            agreement = np.array(results["curves"][variant][split]["agreement"])
            assert (agreement.sum((2, 3)) == examples).all()


def test_uniform_reports_scores_of_networks(finished):
    results = results_in(finished)
    assert results["models"]["A"]["test"]["accuracy"] > 0.8
    for variant in ("naive", "aligned"):
        test = {metric: np.array(values) for metric, values in results["curves"][variant]["test"].items()}
        assert test["loss"][0, 0] == test["loss"][0, 1]  # at s = 0 every sample is the midpoint
        assert test["loss"][2, 0] != test["loss"][2, 1]
        ends = [results["models"][m]["test"]["loss"] for m in "AB"]
        assert results["barriers"][variant]["test"]["loss"] == pytest.approx(test["loss"].max() - np.mean(ends))
    barriers = {variant: results["barriers"][variant]["test"]["loss"] for variant in ("naive", "aligned")}
    assert barriers["aligned"] < barriers["naive"]
    products = results["inner_products"]["B to A"]
    assert products["aligned"] > products["naive"]


def test_uniform_again_trains_and_evaluates_nothing(finished, monkeypatch, capsys):
    before = results_in(finished)

    def never(*args, **kwargs):
        pytest.fail("work was repeated")

    for module, name in (
        (side_by_side, "train"),
        (matchings, "weights"),
        (measure, "evaluate"),
        (measure, "score"),
    ):
        monkeypatch.setattr(module, name, never)
    run("--epochs", "40", out=finished)
    assert results_in(finished) == before
    assert "aligned barrier" in capsys.readouterr().out


def test_uniform_measures_again_after_other_matching(finished, tmp_path):
    """Rows of combinations with another alignment must not be reused."""
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    before = results_in(copy)
    (matching,) = copy.rglob("*.npz")
    with np.load(matching) as file:
        kept = dict(file)
    np.savez(matching, **{name: np.sort(value) if name.startswith("perms/") else value for name, value in kept.items()})
    run("--epochs", "40", out=copy)
    after = results_in(copy)
    assert after["curves"]["naive"] == before["curves"]["naive"]
    assert after["barriers"]["aligned"]["test"] == pytest.approx(after["barriers"]["naive"]["test"])
    assert after["barriers"]["aligned"] != before["barriers"]["aligned"]


def test_uniform_ignores_flag_equal_to_recipe(finished):
    before = results_in(finished)
    run("--epochs", "40", "--batch-size", "100", out=finished)
    assert results_in(finished) == before


@pytest.mark.slow
def test_uniform_seed_selects_networks(finished, tmp_path):
    run("--epochs", "0", "--seed", "1", out=tmp_path)
    names = sorted(path.name for path in tmp_path.rglob("networks/*") if path.is_dir())
    assert names == ["seed-3,epochs=0", "seed-4,epochs=0"]
    untrained = results_in(tmp_path)
    assert not set(untrained["networks"].values()) & set(results_in(finished)["networks"].values())
    assert untrained["models"]["A"]["test"]["accuracy"] < 0.4


@pytest.mark.slow
def test_uniform_uses_given_checkpoints(finished, tmp_path):
    networks = finished / "mlp-digits" / "width-2" / "networks"
    run(
        *("--checkpoint-a", str(networks / "seed-0,epochs=40")),
        *("--checkpoint-b", str(networks / "seed-1,epochs=40" / "40" / "params")),
        out=tmp_path,
    )
    assert not list(tmp_path.rglob("networks"))
    given, trained = results_in(tmp_path), results_in(finished)
    assert given["networks"] == trained["networks"]
    assert given["curves"] == trained["curves"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--setup", "resnet"], ["'resnet'", "mlp-digits"]),
        (["--width", "0"], ["--width", "0 is less than 1"]),
        (["--width", "wide"], ["--width", "'wide'"]),
        (["--widht", "3"], ["--widht", "did you mean --width?"]),
        (["--xyzzy", "3"], ["--xyzzy", "see --help"]),
        (["--pairs", "0"], ["--pairs", "0 is less than 1"]),
        (["--points", "1"], ["--points", "1 is less than 2"]),
        (["--learning-rate", "-1"], ["--learning-rate", "-1 is less than 0"]),
        (["--setup", "tiny10-cifar10", "--data-dir", "nowhere"], ["nowhere", "cifar-10-binary.tar.gz"]),
        (["--setup", "mlp-digits", "--checkpoint-a", "nowhere"], ["nowhere", "not an orbax checkpoint"]),
        (["--seed-c", "9"], ["--seed-c 9 has no effect because uniform uses no network C: remove it"]),
        (["--checkpoint-c", "x"], ["--checkpoint-c x has no effect because uniform uses no network C"]),
        (["--seed-b", "1", "--seed-a", "1"], ["Networks A and B both have seed 1: use different seeds"]),
        (
            ["--setup", "mlp-digits", "--train-examples", "1000000"],
            ["--train-examples 1000000 exceeds the 1,400 train examples: use fewer"],
        ),
        (["--setup", "mlp-digits", "--test-examples", "398", "--plan"], ["398 exceeds the 397 test examples"]),
    ],
)
def test_uniform_rejects_bad_input_in_one_line(flags, words, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    with pytest.raises(SystemExit) as stopped:
        command.main(uniform.EXPERIMENT, uniform.__doc__, [*flags, "--out", str(tmp_path / "runs")])
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.splitlines(keepends=True)
    error = "".join(line for line in lines if not line.startswith("results go to "))
    assert error.count("\n") == 1
    assert error.startswith("error: ")
    for word in words:
        assert word in error
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_uniform_rejects_unwritable_folder_in_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as stopped:
        run(out=tmp_path / "file")
    assert stopped.value.code == 2
    assert "pass another --out" in capsys.readouterr().err


def test_uniform_rejects_checkpoint_of_other_width(finished, tmp_path, capsys):
    other = finished / "mlp-digits" / "width-2" / "networks" / "seed-0,epochs=40"
    with pytest.raises(SystemExit) as stopped:
        run("--width", "3", "--checkpoint-a", str(other), out=tmp_path)
    assert stopped.value.code == 2
    assert "of shape (32,) where the model has (48,)" in capsys.readouterr().err


def test_uniform_help_has_one_line_per_flag(capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(uniform.EXPERIMENT, uniform.__doc__, ["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--setup", "--width", "--epochs", "--batch-size", "--learning-rate", "--weight-decay", "--seed"):
        assert f"\n  {flag} " in text
    assert "python -m experiments.uniform --width 32" in text
    assert re.search(r"\n  resnet20-cifar10 +250 epochs", text)


@pytest.mark.slow
def test_uniform_runs_model_of_paper_on_real_images(cifar_archive, tmp_path):
    flags = "--setup resnet20-cifar10 --width 1 --epochs 0 --points 2 --samples 1 --train-examples 8 --test-examples 8"
    command.main(uniform.EXPERIMENT, None, [*flags.split(), "--data-dir", str(cifar_archive), "--out", str(tmp_path)])
    results = results_in(tmp_path)
    assert results["paper"]["loss"] == 0.044
    assert (np.array(results["curves"]["aligned"]["test"]["agreement"]).sum((2, 3)) == 8).all()
