"""Checkpoints of a training in progress."""

import dataclasses
import errno
import gc
import json

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from numerics import assert_equal

from mcomb import read_checkpoint
from mcomb.errors import UserError
from mcomb.io import checkpoints as checkpoint
from mcomb.lab.setups import SETUPS
from mcomb.lab.training import checkpoints as training_checkpoints
from mcomb.lab.training.checkpoints import TrainingCheckpoints
from mcomb.lab.training.train import initial_state
from mcomb.runtime.devices import describe_devices

PARAMS = {"dense": {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3)}}
RECIPE = SETUPS["mlp-digits"].recipe


def state_of():
    return initial_state(PARAMS, RECIPE, 1000)


def metadata(folder):
    newest = max(folder.glob("*/config/metadata"), key=lambda path: int(path.parts[-3]))
    return json.loads(newest.read_text())


def test_checkpoint_restores_optimizer_and_step(tmp_path):
    state = state_of()
    later = jax.tree.map(lambda x: x + 1, state)
    TrainingCheckpoints(tmp_path / "run", {"seed": 0}).save(7, later)
    reopened = TrainingCheckpoints(tmp_path / "run", {"seed": 0})
    assert reopened.epoch == 7
    assert_equal(reopened.restore(state), later)
    assert_equal(read_checkpoint(tmp_path / "run"), later.params)


def state_at(step):
    return jax.tree.map(lambda x: x + step, state_of())


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_save_keeps_two_newest_checkpoints(tmp_path):
    for epoch in (5, 10, 15):
        TrainingCheckpoints(tmp_path, {}).save(epoch, state_at(epoch))
    assert names(tmp_path) == {"10", "15"}


def test_restore_uses_state_within_epoch_until_next_save(tmp_path):
    TrainingCheckpoints(tmp_path, {}).save(5, state_at(50))
    TrainingCheckpoints(tmp_path, {}).save(None, state_at(57))
    stopped = TrainingCheckpoints(tmp_path, {})
    assert stopped.epoch is None  # no epoch is complete
    assert_equal(stopped.restore(state_of()), state_at(57))
    stopped.save(6, state_at(60))
    assert names(tmp_path) == {"5", "6"}
    assert_equal(TrainingCheckpoints(tmp_path, {}).restore(state_of()), state_at(60))


def flip(path, at=None):
    content = path.read_bytes()
    at = len(content) // 2 if at is None else at
    path.write_bytes(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])


def weights_file(folder):
    """Return the largest file, which contains the parameters."""
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


# Orbax leaves coroutines of the failed read behind, which Python warns about.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize(
    "item", ["params", *(pytest.param(it, marks=pytest.mark.slow) for it in ("optimizer", "config"))]
)
def test_restore_skips_damaged_newest_checkpoint(item, tmp_path, capsys):
    for epoch in (5, 10):
        TrainingCheckpoints(tmp_path, {}).save(epoch, state_at(epoch))
    path = weights_file(tmp_path / "10" / item)
    whole = path.read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 6)):
        flip(path, at)
        state = TrainingCheckpoints(tmp_path, {}).restore(state_of())
        if (tmp_path / "10").exists():  # this byte is not significant
            assert_equal(state, state_at(10))
            flip(path, at)
            continue
        assert_equal(state, state_at(5))
        assert names(tmp_path) == {"5", "damaged-10"}
        assert capsys.readouterr().err.count("renamed it to damaged-10, training resumes from") == 1
        (tmp_path / "damaged-10").rename(tmp_path / "10")
        path.write_bytes(whole)
    flip(path)
    TrainingCheckpoints(tmp_path, {}).restore(state_of())
    assert names(tmp_path) == {"5", "damaged-10"}
    TrainingCheckpoints(tmp_path, {}).save(10, state_at(10))
    assert_equal(TrainingCheckpoints(tmp_path, {}).restore(state_of()), state_at(10))
    gc.collect()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_restore_rejects_only_checkpoint_if_damaged(tmp_path):
    TrainingCheckpoints(tmp_path, {}).save(5, state_at(5))
    flip(weights_file(tmp_path / "5" / "params"))
    with pytest.raises(UserError, match=r"Cannot read checkpoint .*5 .*: replace it, or move it away"):
        TrainingCheckpoints(tmp_path, {}).restore(state_of())
    assert names(tmp_path) == {"5"}
    gc.collect()


def test_restore_keeps_checkpoint_without_file_descriptors(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(errno.EMFILE, "Too many open files")

    for epoch in (5, 10):
        TrainingCheckpoints(tmp_path, {}).save(epoch, state_at(epoch))
    checkpoints = TrainingCheckpoints(tmp_path, {})
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "restore_tree", fail)
        with pytest.raises(OSError, match="Too many open files"):
            checkpoints.read_params(PARAMS)
        with pytest.raises(OSError, match="Too many open files"):
            checkpoints.restore(state_of())
    assert names(tmp_path) == {"5", "10"}


def test_save_failure_keeps_previous_checkpoint(tmp_path, monkeypatch):
    TrainingCheckpoints(tmp_path, {}).save(5, state_at(5))

    def fail(*args, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "save", fail)
        with pytest.raises(UserError, match=r"Cannot write checkpoint .*10 \(.*No space left on device\): free disk"):
            TrainingCheckpoints(tmp_path, {}).save(10, state_at(10))
    assert_equal(TrainingCheckpoints(tmp_path, {}).restore(state_of()), state_at(5))


def test_save_reports_folder_that_is_file(tmp_path):
    (tmp_path / "run").write_text("no folder")
    with pytest.raises(UserError, match=r"Cannot write checkpoint .*5 \(.*\): fix this, then run the same command"):
        TrainingCheckpoints(tmp_path / "run", {}).save(5, state_at(5))


def test_checkpoints_reject_other_config(tmp_path):
    config = dataclasses.asdict(RECIPE)
    TrainingCheckpoints(tmp_path, config).save(1, state_of())
    TrainingCheckpoints(tmp_path, config)
    with pytest.raises(UserError, match=r"was trained with learning_rate = 0\.1, not 0\.3"):
        TrainingCheckpoints(tmp_path, config | {"learning_rate": 0.3})


def test_checkpoint_records_devices_of_all_sessions(tmp_path, monkeypatch):
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
def test_checkpoint_without_record_raises_user_error(tmp_path, content):
    TrainingCheckpoints(tmp_path, {}).save(1, state_of())
    (tmp_path / "1" / "config" / "metadata").write_text(content)
    with pytest.raises(UserError, match="Cannot read checkpoint"):
        TrainingCheckpoints(tmp_path, {})
