"""Plans of runs."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import linear, train, uniform
from mcomb.lab import cli
from mcomb.lab.cache.store import Store
from mcomb.lab.data.datasets import Split
from mcomb.lab.data.digits import DIGITS
from mcomb.lab.runs import plan
from mcomb.lab.runs.plan import list_jobs
from mcomb.lab.runs.run import run
from mcomb.lab.setups import SETUPS
from mcomb.lab.training.side_by_side import device_share
from mcomb.lab.training.train import compile_training
from mcomb.runtime.devices import meshes_of

SMALL = ["--setup", "mlp-digits", "--width", "1", "--epochs", "2"]


def config_of(module, out, *flags):
    return cli.parse(module.EXPERIMENT.config, "", [*SMALL, *flags, "--out", str(out)])


def steps_of(module, out, *flags):
    return plan.plan_steps(list_jobs(module.EXPERIMENT, config_of(module, out, *flags)))


def test_plan_counts_two_operations_per_weight_and_image(tmp_path):
    work = plan.work_of(Store(config_of(linear, tmp_path, "--width", "32")))
    matrices = 64 * 512 + 2 * 512**2 + 512 * 10
    assert work.parameters == matrices + 3 * 512 + 10
    assert 2 * matrices < work.flop < 2.1 * matrices
    # Each permutation has one product with the incoming weights, one with the outgoing weights, and biases.
    assert work.matching_flop == 2 * 512 * (64 * 512 + 4 * 512**2 + 512 * 10 + 3 * 512)


def test_plan_lists_all_steps_and_writes_nothing(tmp_path):
    steps = steps_of(uniform, tmp_path / "runs", "--points", "3", "--samples", "2", "--test-examples", "100")
    train_a, train_b, match, evaluate = steps
    flop = plan.work_of(Store(config_of(uniform, tmp_path))).flop
    assert train_a.flop == train_b.flop == 3 * flop * 2 * 1400
    assert match.what == "match seed-1,epochs=2 to seed-0,epochs=2 by weights"
    assert evaluate.flop == flop * 2 * 3 * 2 * (1400 + 100)
    assert not (tmp_path / "runs").exists()
    assert plan.table(steps).splitlines()[-1].startswith("total")


@pytest.mark.slow
def test_plan_marks_cached_steps_as_kept(tmp_path):
    flags = ("--points", "3", "--train-examples", "50", "--test-examples", "50")
    run(linear.EXPERIMENT, config_of(linear, tmp_path, *flags))
    assert [step.state for step in steps_of(linear, tmp_path, *flags)] == ["kept"] * 4
    other = steps_of(uniform, tmp_path, *flags)
    assert [bool(step.flop) for step in other] == [False, False, False, True]
    assert all(step.flop for step in steps_of(uniform, tmp_path, *flags, "--seed", "1"))


def test_plan_lists_pairs_and_widths_once(tmp_path):
    one, two = (steps_of(linear, tmp_path, "--pairs", n) for n in "12")
    assert len({step.what for step in two}) == len(two) == 2 * len(one)


@pytest.mark.parametrize("name", SETUPS)
def test_setup_counts_images_without_loading(name, tmp_path):
    setup = SETUPS[name]
    if setup.dataset is DIGITS:
        assert tuple(len(split.labels) for split in setup.dataset.load(None)) == setup.dataset.count()
    shapes = jax.eval_shape(setup.apply(1), setup.shapes(1), jnp.zeros((1, *setup.dataset.shape), jnp.uint8))
    assert (shapes.shape[0], shapes.shape[-1]) == (1, setup.dataset.classes)


@pytest.mark.parametrize("setup", ["mlp-digits", pytest.param("tiny10-cifar10", marks=pytest.mark.slow)])
@pytest.mark.parametrize("width", [1, 8])
def test_plan_memory_is_close_to_compiled_step(setup, width, tmp_path):
    store = Store(config_of(linear, tmp_path, "--setup", setup, "--width", str(width)))
    count, image = store.setup.dataset.count()[0], store.setup.dataset.shape
    data = Split(np.zeros((count, *image), np.uint8), np.zeros(count, np.int32))
    seeds = [store.config.training_of(letter) for letter in "AB"]
    planned = plan.plan_steps([plan.Job("train", store, seeds)])[0].memory
    mesh = meshes_of(device_share(len(seeds)))[0]
    needed = compile_training(store.apply, store.setup.shapes(width), data, store.networks.recipe, mesh).memory
    assert 0.5 < planned / needed < 2


def test_plan_flag_prints_plan_instead_of_running(tmp_path, capsys):
    train.main([*SMALL, "--plan", "--out", str(tmp_path / "runs"), "--seeds", "4", "5"])
    assert "train seed-5" in capsys.readouterr().out
    train.main([*SMALL, "--plan", "--json", "--out", str(tmp_path / "runs")])
    found = json.loads(capsys.readouterr().out)
    assert [step["what"] for step in found["steps"]] == ["train seed-0,epochs=2", "train seed-1,epochs=2"]
    assert found["all"]["flop"] == sum(step["flop"] for step in found["steps"]) > 0
    assert not (tmp_path / "runs").exists()


def test_plan_compiles_nothing(tmp_path, caplog):
    flags = ["--setup", "resnet20-cifar10", "--width", "32", "--points", "3"]
    with jax.log_compiles():
        steps = steps_of(uniform, tmp_path, *flags)
    assert "Finished XLA compilation" not in caplog.text
    assert len(steps) == 4
    assert 8e9 < steps[0].memory < 40e9  # each network's weights are 1.2 GB
