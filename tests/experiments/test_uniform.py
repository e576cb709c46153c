"""The main job, shrunk: the real command on the real digits, interrupted, repeated and misused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from experiments import uniform
from mcomb import experiment, train, workspace
from mcomb.lab.data import DATA_VARIABLE

ROOT = Path(__file__).parent.parent
SMALL = ["--setup", "mlp-digits", "--width", "2", "--points", "3", "--samples", "2", "--train-images", "50"]


def run(*flags, out):
    experiment.main(uniform.EXPERIMENT, uniform.__doc__, [*SMALL, *flags, "--out", str(out)])


def results_in(out):
    (path,) = out.rglob("results.json")
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder that one whole shrunken run leaves."""
    out = tmp_path_factory.mktemp("runs")
    run("--epochs", "60", out=out)
    return out


def test_it_leaves_results_a_figure_and_what_they_depend_on(finished):
    home = finished / "mlp-digits" / "width-2"
    folder = home / "uniform,train-images=50,epochs=60,points=3,samples=2"
    assert {path.name for path in folder.iterdir()} == {
        "results.json",
        "samples.jsonl",
        "uniform.png",
        "uniform.pdf",
    }
    assert (home / "networks" / "seed-0,epochs=60" / "60").is_dir()
    assert (home / "matchings" / "seed-1,epochs=60-to-seed-0,epochs=60.npz").is_file()
    results = results_in(finished)
    assert results["experiment"] == "uniform"
    assert results["parameter"]["name"] == "s"
    assert results["parameter"]["values"] == [0, 0.25, 0.5]
    assert results["config"]["width"] == 2
    assert results["config"]["recipe"]["epochs"] == 60
    assert results["environment"]["packages"]["jax"]
    assert results["paper"] is None
    assert results["seconds"] > 0
    for variant in ("naive", "aligned"):
        for split, images in (("train", 50), ("test", 397)):
            for metric in ("loss", "accuracy"):
                assert np.shape(results["curves"][variant][split][metric]) == (3, 2)
            agreement = np.array(results["curves"][variant][split]["agreement"])
            assert (agreement.sum((2, 3)) == images).all()


def test_its_numbers_are_those_of_the_trained_networks(finished):
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


def test_a_second_run_trains_matches_and_evaluates_nothing(finished, monkeypatch, capsys):
    before = results_in(finished)

    def never(*args, **kwargs):
        pytest.fail("work was repeated")

    for module, name in ((workspace, "train"), (workspace, "match"), (workspace, "evaluate")):
        monkeypatch.setattr(module, name, never)
    run("--epochs", "60", out=finished)
    assert results_in(finished) == before
    assert "aligned barrier" in capsys.readouterr().out


def test_another_matching_is_measured_anew(finished, tmp_path):
    """Rows of combinations with a B that was aligned otherwise must not be taken for this one's."""
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    before = results_in(copy)
    (matching,) = copy.rglob("*.npz")
    kept = dict(np.load(matching))
    np.savez(matching, **{name: np.sort(value) if name.startswith("perms/") else value for name, value in kept.items()})
    next(copy.rglob("results.json")).unlink()
    run("--epochs", "60", out=copy)
    after = results_in(copy)
    assert after["curves"]["naive"] == before["curves"]["naive"]
    assert after["barriers"]["aligned"]["test"] == pytest.approx(after["barriers"]["naive"]["test"])
    assert after["barriers"]["aligned"] != before["barriers"]["aligned"]


def test_a_flag_that_says_what_the_recipe_says_changes_nothing(finished):
    before = results_in(finished)
    run("--epochs", "60", "--batch-size", "100", out=finished)
    assert results_in(finished) == before


def test_another_seed_is_another_pair_of_networks(finished, tmp_path):
    run("--epochs", "1", "--seed", "1", out=tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("networks/*")) == ["seed-3,epochs=1", "seed-4,epochs=1"]
    assert results_in(tmp_path)["networks"] != results_in(finished)["networks"]


def test_networks_are_taken_from_given_checkpoints(finished, tmp_path):
    networks = finished / "mlp-digits" / "width-2" / "networks"
    run(
        *("--checkpoint-a", str(networks / "seed-0,epochs=60")),
        *("--checkpoint-b", str(networks / "seed-1,epochs=60" / "60" / "params")),
        out=tmp_path,
    )
    assert not list(tmp_path.rglob("networks"))
    given, trained = results_in(tmp_path), results_in(finished)
    assert given["networks"] == trained["networks"]
    assert given["curves"] == trained["curves"]


def test_untrained_networks_are_allowed(tmp_path):
    run("--epochs", "0", out=tmp_path)
    assert results_in(tmp_path)["models"]["A"]["test"]["accuracy"] < 0.4


def test_a_diverging_training_keeps_its_last_good_checkpoint(tmp_path, monkeypatch):
    """The learning rate of the third epoch is absurd."""
    real = train.learning_rate

    def schedule(recipe, steps_per_epoch):
        rate = real(recipe, steps_per_epoch)
        return lambda step: rate(step) + 1e30 * (step >= 2 * steps_per_epoch)

    monkeypatch.setattr(train, "learning_rate", schedule)
    train.make_optimizer.cache_clear()
    with pytest.raises(SystemExit) as stopped:
        run("--epochs", "5", "--checkpoint-every", "1", out=tmp_path)
    train.make_optimizer.cache_clear()
    assert stopped.value.code == 1
    assert [path.name for path in tmp_path.rglob("seed-0,epochs=5/*")] == ["2"]


def command(*flags, out, **options):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    environment.pop(DATA_VARIABLE, None)
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.uniform", *flags, "--out", str(out)],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def kill_when(process, happened):
    while not happened():
        assert process.poll() is None, f"it ended too early: {process.communicate()}"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def test_killed_in_training_and_in_evaluation_it_ends_as_if_it_had_not_been(tmp_path):
    flags = "--setup mlp-digits --width 2 --epochs 100 --checkpoint-every 10 --samples 8".split()  # noqa: SIM905
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    home = killed / "mlp-digits" / "width-2"
    network = home / "networks" / "seed-1,epochs=100"
    kill_when(command(*flags, out=killed), lambda: list(network.glob("[0-9]*")))
    assert not (network / "100").exists()

    rows = home / "uniform,epochs=100,samples=8" / "samples.jsonl"
    kill_when(command(*flags, out=killed), lambda: rows.exists() and rows.read_text().count("\n") > 100)
    assert not list(killed.rglob("results.json"))

    for out in (killed, whole):
        experiment.main(uniform.EXPERIMENT, None, [*flags, "--out", str(out)])
    resumed, uninterrupted = results_in(killed), results_in(whole)
    for part in ("networks", "models", "curves"):
        assert resumed[part] == uninterrupted[part]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--setup", "resnet"], ["'resnet'", "mlp-digits"]),
        (["--width", "0"], ["--width", "0 is less than 1"]),
        (["--width", "wide"], ["--width", "'wide'"]),
        (["--widht", "3"], ["--widht", "--help"]),
        (["--points", "1"], ["--points", "1 is less than 2"]),
        (["--learning-rate", "-1"], ["--learning-rate", "-1 is less than 0"]),
        (["--setup", "tiny10-cifar10", "--data-dir", "nowhere"], ["nowhere", "cifar-10-binary.tar.gz"]),
        (["--setup", "mlp-digits", "--checkpoint-a", "nowhere"], ["nowhere", "no orbax checkpoint"]),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(flags, words, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    with pytest.raises(SystemExit) as stopped:
        experiment.main(uniform.EXPERIMENT, uniform.__doc__, [*flags, "--out", str(tmp_path / "runs")])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("error: ")
    for word in words:
        assert word in error
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_an_unwritable_output_folder_is_one_clear_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as stopped:
        run(out=tmp_path / "file")
    assert stopped.value.code == 2
    assert "give another --out" in capsys.readouterr().err


def test_a_checkpoint_of_another_width_is_one_clear_line(finished, tmp_path, capsys):
    other = finished / "mlp-digits" / "width-2" / "networks" / "seed-0,epochs=60"
    with pytest.raises(SystemExit) as stopped:
        run("--width", "3", "--checkpoint-a", str(other), out=tmp_path)
    assert stopped.value.code == 2
    assert "of shape (32,) where the model has (48,)" in capsys.readouterr().err


def test_help_names_every_flag_on_a_line_of_its_own(capsys):
    with pytest.raises(SystemExit) as stopped:
        experiment.main(uniform.EXPERIMENT, uniform.__doc__, ["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--setup", "--width", "--epochs", "--batch-size", "--learning-rate", "--weight-decay", "--seed"):
        assert f"\n  {flag} " in text
    assert "python -m experiments.uniform --width 32" in text
    assert "resnet20-cifar10  250 epochs" in text


@pytest.mark.parametrize("setup", ["tiny10-cifar10", "resnet20-cifar10"])
def test_the_papers_networks_run_the_whole_job_on_real_images(setup, cifar_archive, tmp_path):
    flags = f"--setup {setup} --width 1 --epochs 0 --points 2 --samples 1 --train-images 8 --test-images 8"
    experiment.main(
        uniform.EXPERIMENT, None, [*flags.split(), "--data-dir", str(cifar_archive), "--out", str(tmp_path)]
    )
    results = results_in(tmp_path)
    assert results["paper"]["loss"] == {"tiny10-cifar10": 0.332, "resnet20-cifar10": 0.044}[setup]
    assert (np.array(results["curves"]["aligned"]["test"]["agreement"]).sum((2, 3)) == 8).all()
