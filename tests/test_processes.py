"""Real processes, two with two devices each, beside one with one, four or eight."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import train
from mcomb import processes, read_checkpoint
from mcomb.base import UserError
from mcomb.checkpoint import saved_steps
from mcomb.lab import cli

ROOT = Path(__file__).parents[1]
UNIFORM = "uniform --setup mlp-digits --width 2 --epochs 6 --checkpoint-every 1 --points 3 --samples 2 --test-images 50"


def start(command, out, devices, *flags):
    """A process that runs an experiment on so many devices."""
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    words = [sys.executable, "-m", f"experiments.{command.split()[0]}", *command.split()[1:]]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*words, "--out", str(out), *flags], cwd=ROOT, env=environment, **pipes)


def start_two(commands, out):
    """Two processes with two devices each that run together."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    together = ["--coordinator", f"localhost:{port}", "--processes", "2", "--process"]
    return [start(command, out, 2, *together, str(i)) for i, command in enumerate(commands)]


def end(*running):
    """What processes have printed, and how they have ended, after they have."""
    try:
        printed = [process.communicate(timeout=240) for process in running]
    finally:
        for process in running:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(running, printed, strict=True)]


def results_in(out):
    (path,) = out.rglob("results.json")
    return json.loads(path.read_text())


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@pytest.mark.slow
def test_two_processes_go_on_after_one_was_killed_and_measure_what_one_process_does(tmp_path):
    two, one = tmp_path / "two", tmp_path / "one"
    networks = Path("mlp-digits", "width-2", "networks")
    killed = two / networks / "seed-0,epochs=6"
    running = start_two([UNIFORM] * 2, two)
    while not saved_steps(killed) and all(process.poll() is None for process in running):
        time.sleep(0.05)
    running[1].kill()
    (code, _, said), _ = end(*running)
    assert code not in (0, None)
    assert said.splitlines()[-1].endswith(processes.REMEDY)
    assert 0 < max(saved_steps(killed)) < 6
    assert not list(two.rglob("results.json"))

    first, second = end(*start_two([UNIFORM] * 2, two))
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert "training seed-0" in first[2]
    assert "Aligned, the worst combination" in first[1]
    assert not second[1]
    assert "training" not in second[2]

    ones = {devices: one / str(devices) for devices in (4, 8)}
    for out in ones.values():
        shutil.copytree(two / networks, out / networks)
    for code, _, said in end(*(start(UNIFORM, out, devices) for devices, out in ones.items())):
        assert code == 0, said
    together = results_in(two)
    for devices, out in ones.items():
        alone = results_in(out)
        for part in ("config", "networks", "matchings", *(["devices"] if devices == 4 else [])):
            assert together[part] == alone[part]
        for part in ("models", "curves", "barriers"):
            np.testing.assert_allclose(flat(together[part]), flat(alone[part]), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_two_processes_train_the_network_of_one_with_any_number_of_devices(tmp_path):
    command = "train --setup mlp-digits --width 2 --epochs 1 --seeds 0"
    numbers = (1, 2, 8)
    alone = [start(command, tmp_path / str(devices), devices) for devices in numbers]
    ends = end(*start_two([command] * 2, tmp_path / "two"), *alone)
    assert not any(code for code, *_ in ends), ends
    together, *found = (
        flat(read_checkpoint(tmp_path / str(out) / "mlp-digits" / "width-2" / "networks" / "seed-0,epochs=1"))
        for out in ("two", *numbers)
    )
    for params in found:
        np.testing.assert_allclose(params, together, rtol=0, atol=1e-5)


def test_processes_with_other_flags_end_together_and_say_why(tmp_path):
    commands = ["train --setup mlp-digits --width 1 --epochs 1", "train --setup mlp-digits --width 1 --epochs 2"]
    for code, _, said in end(*start_two(commands, tmp_path)):
        assert code == 2
        assert "has other flags" in said
        assert "--epochs 1" in said
        assert "--epochs 2" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--coordinator localhost:1", "go together"),
        ("--process 0", "go together"),
        ("--coordinator localhost:1 --processes 2 --process 2", "--process 2 is not one of --processes 2: give 0 to 1"),
        ("--coordinator localhost --processes 2 --process 1", "localhost is no address: give HOST:PORT"),
        ("--coordinator localhost:² --processes 2 --process 1", "localhost:² is no address: give HOST:PORT"),
        ("--coordinator localhost:65536 --processes 2 --process 1", "localhost:65536 is no address: give HOST:PORT"),
        ("--coordinator localhost:1 --processes 2 --process 1", "nobody answers at --coordinator localhost:1"),
    ],
)
def test_what_cannot_be_joined_is_one_clear_line(flags, words, capsys, monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 0)
    with pytest.raises(SystemExit) as stopped:
        cli.run(lambda: train.main(["--setup", "mlp-digits", *flags.split()]))
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error


def test_a_process_by_itself_decides_by_itself():
    assert processes.is_first()
    assert not processes.are_several()
    assert processes.from_first(max, 1, 2) == 2
    with pytest.raises(UserError, match="what it is"):
        processes.from_first(fail)
    processes.wait_for_all("nobody")
    processes.require_agreement("flags", "any")
    processes.leave(None, 0)


def fail():
    raise UserError("what it is")
