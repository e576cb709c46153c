"""Checkpoints of a training in progress: what is saved is restored, and only if nothing else made it."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from numerics import assert_equal

from mcomb import read_checkpoint
from mcomb.base import UserError
from mcomb.devices import describe_devices
from mcomb.lab import training_checkpoints
from mcomb.lab.setups import SETUPS
from mcomb.lab.training import initial_state
from mcomb.lab.training_checkpoints import TrainingCheckpoints

PARAMS = {"dense": {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3)}}
RECIPE = SETUPS["mlp-digits"].recipe


def state_of():
    return initial_state(PARAMS, RECIPE, 1000)


def metadata(folder):
    (path,) = folder.glob("*/config/metadata")
    return json.loads(path.read_text())


def test_a_training_is_restored_with_its_optimiser_and_step(tmp_path):
    state = state_of()
    later = jax.tree.map(lambda x: x + 1, state)
    TrainingCheckpoints(tmp_path / "run", {"seed": 0}).save(7, later)
    reopened = TrainingCheckpoints(tmp_path / "run", {"seed": 0})
    assert reopened.epoch == 7
    assert_equal(reopened.restore(state), later)
    assert_equal(read_checkpoint(tmp_path / "run"), later.params)


def test_a_training_keeps_only_its_newest_checkpoint(tmp_path):
    for epoch in (5, 10):
        TrainingCheckpoints(tmp_path, {}).save(epoch, state_of())
    assert [path.name for path in tmp_path.iterdir()] == ["10"]


def test_a_training_with_another_config_is_refused(tmp_path):
    config = dataclasses.asdict(RECIPE)
    TrainingCheckpoints(tmp_path, config).save(1, state_of())
    TrainingCheckpoints(tmp_path, config)
    with pytest.raises(UserError, match=r"was trained with learning_rate = 0\.1, not 0\.3"):
        TrainingCheckpoints(tmp_path, config | {"learning_rate": 0.3})


def test_a_checkpoint_records_the_devices_it_was_trained_on_and_those_of_its_continuation(tmp_path, monkeypatch):
    several = describe_devices()
    assert several == f"{len(jax.devices())} × cpu"
    TrainingCheckpoints(tmp_path, {}).save(1, state_of())
    assert metadata(tmp_path)["devices"] == [several]
    monkeypatch.setattr(training_checkpoints, "describe_devices", lambda mesh: "8 × TPU v3")
    for epoch in (2, 3):
        TrainingCheckpoints(tmp_path, {}).save(epoch, state_of())
    assert metadata(tmp_path)["devices"] == [several, "8 × TPU v3"]
    assert metadata(tmp_path)["environment"]["packages"]["jax"] == jax.__version__


@pytest.mark.parametrize("content", ["", "{", "{}"])
def test_a_checkpoint_without_its_record_is_a_clear_error(tmp_path, content):
    TrainingCheckpoints(tmp_path, {}).save(1, state_of())
    (tmp_path / "1" / "config" / "metadata").write_text(content)
    with pytest.raises(UserError, match="cannot be read"):
        TrainingCheckpoints(tmp_path, {})
