"""Two real processes with two devices each, compared with one process of one, four or eight devices."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import train
from mcomb import read_checkpoint
from mcomb.errors import UserError
from mcomb.io.checkpoints import saved_steps
from mcomb.lab import cli
from mcomb.runtime import processes

ROOT = Path(__file__).parents[2]
TRAIN = "train --setup mlp-digits --width 1 --seeds 0 --epochs 12 --checkpoint-every 1 --json"
TRAINED = Path("mlp-digits", "width-1", "networks", "seed-0,epochs=12")
UNIFORM = (
    "uniform --setup mlp-digits --width 2 --epochs 6 --checkpoint-every 1 --points 3 --samples 2 --test-examples 50"
)


def start(command, out, devices, *flags, cwd=ROOT):
    """Start a process that runs an experiment on so many devices, with the code of a folder."""
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    words = [sys.executable, "-m", f"experiments.{command.split()[0]}", *command.split()[1:]]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*words, "--out", str(out), *flags], cwd=cwd, env=environment, **pipes)


def start_two(commands, out, folders=(ROOT, ROOT), devices=(2, 2)):
    """Start two connected processes, each with its number of devices and the code of its folder."""
    together = ["--coordinator", f"localhost:{free_port()}", "--processes", "2", "--process"]
    each = enumerate(zip(commands, folders, devices, strict=True))
    return [start(command, out, own, *together, str(i), cwd=folder) for i, (command, folder, own) in each]


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def end(*running):
    """Wait for processes; return their output and exit codes."""
    try:
        printed = [process.communicate(timeout=240) for process in running]
    finally:
        for process in running:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(running, printed, strict=True)]


def end_well(*running):
    """Wait for processes to succeed; return the output of the first."""
    ends = end(*running)
    assert not any(code for code, *_ in ends), ends
    return ends[0][1:]


def wait_for_step(folder, step, running):
    """Wait until a training has saved a step, or has ended."""
    while max(saved_steps(folder), default=0) < step and all(process.poll() is None for process in running):
        time.sleep(0.05)


def results_in(out):
    (path,) = out.rglob("results.json")
    return json.loads(path.read_text())


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@pytest.mark.slow
def test_processes_resume_after_kill_and_equal_one_process(tmp_path):
    two, one = tmp_path / "two", tmp_path / "one"
    networks = Path("mlp-digits", "width-2", "networks")
    killed = two / networks / "seed-0,epochs=6"
    running = start_two([UNIFORM] * 2, two)
    wait_for_step(killed, 1, running)
    running[1].kill()
    (code, _, said), _ = end(*running)
    assert code not in (0, None)
    assert said.splitlines()[-1].endswith(processes.REMEDY)
    assert 0 < max(saved_steps(killed)) < 6
    assert not list(two.rglob("results.json"))

    first, second = end(*start_two([UNIFORM] * 2, two))
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert "training seed-0" in first[2]
    assert "uniform.png" in first[1]
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
        assert_same_numbers(two, out)


def assert_same_numbers(out, alone):
    for part in ("models", "curves", "barriers"):
        found, expected = flat(results_in(out)[part]), flat(results_in(alone)[part])
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("setup", "devices"), [("decoder-text", (3, 3)), ("vit-digits", (2, 2))])
def test_processes_with_transformers_equal_one_process(setup, devices, tmp_path):
    """With six devices, neither the examples, nor the combinations, nor a minibatch are multiples of them."""
    command = f"uniform --setup {setup} --width 1 --epochs 0 --points 2 --samples 2"
    command += " --train-examples 20 --test-examples 25"
    alone = start(command, tmp_path / "one", sum(devices))
    end_well(alone)
    end_well(*start_two([command] * 2, tmp_path / "two", devices=devices))
    assert_same_numbers(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
def test_processes_train_same_network_as_one_process(tmp_path):
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the folder of a network that two uninterrupted processes trained, and their output."""
    out = tmp_path_factory.mktemp("whole")
    printed, said = end_well(*start_two([TRAIN] * 2, out))
    assert "training seed-0" in said
    return out, printed


@pytest.mark.slow
def test_processes_reuse_results_and_print_only_json(whole):
    out, printed = whole
    (network,) = json.loads(printed)["networks"].values()
    assert network["path"] == str(out / TRAINED)
    shutil.rmtree(out / TRAINED / "11")  # the one before the last, which could be gone on from
    again, said = end_well(*start_two([TRAIN] * 2, out))
    assert again == printed
    assert "training" not in said


@pytest.mark.slow
def test_processes_resume_training_after_signal_and_kill(whole, tmp_path):
    running = start_two([TRAIN] * 2, tmp_path)
    wait_for_step(tmp_path / TRAINED, 1, running)
    running[1].send_signal(signal.SIGTERM)
    first, second = end(*running)
    assert (first[0], second[0]) == (128 + signal.SIGTERM, 128 + signal.SIGTERM), (first, second)
    for _, _, said in (first, second):
        assert said.splitlines()[-1].endswith("Interrupted; run the same command to resume.")
    stopped = max(saved_steps(tmp_path / TRAINED))
    assert 0 < stopped < 11

    running = start_two([TRAIN] * 2, tmp_path)
    wait_for_step(tmp_path / TRAINED, stopped + 1, running)
    for process in running:
        process.kill()
    assert [code for code, *_ in end(*running)] == [-signal.SIGKILL] * 2
    assert stopped < max(saved_steps(tmp_path / TRAINED)) < 12

    end_well(*start_two([TRAIN] * 2, tmp_path))
    found, expected = (flat(read_checkpoint(out / TRAINED)) for out in (tmp_path, whole[0]))
    np.testing.assert_array_equal(found, expected)


def test_processes_with_different_flags_fail_together(tmp_path):
    commands = ["train --setup mlp-digits --width 1 --epochs 1", "train --setup mlp-digits --width 1 --epochs 2"]
    for code, _, said in end(*start_two(commands, tmp_path)):
        assert code == 2
        assert "has different flags" in said
        assert "--epochs 1" in said
        assert "--epochs 2" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_processes_with_different_code_fail_together(tmp_path):
    other, out = tmp_path / "other", tmp_path / "out"
    shutil.copytree(ROOT / "experiments", other / "experiments")
    other.joinpath("mcomb").symlink_to(ROOT / "mcomb")
    with other.joinpath("experiments", "linear.py").open("a") as file:
        file.write("# changed\n")
    for code, _, said in end(*start_two(["train --setup mlp-digits --epochs 0"] * 2, out, (ROOT, other))):
        assert code == 2, said
        assert "has different code" in said
    assert not out.exists()


@pytest.mark.slow
def test_processes_name_missing_process():
    program = "from mcomb.runtime import processes; processes.START_PATIENCE = 1; processes.join('localhost:{}', 2, 0)"
    words = [sys.executable, "-c", program.format(free_port())]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode not in (0, None)
    assert ended.stderr.splitlines()[-1] == f"error: {processes.NOT_ALL_CAME}"


def test_processes_name_port_in_use(capsys):
    both = socket.has_dualstack_ipv6()  # the same address as ours, because macOS lets two differ
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=both) as taken:
        port = taken.getsockname()[1]
        flags = f"--coordinator localhost:{port} --processes 2 --process 0"
        with pytest.raises(SystemExit) as stopped:
            cli.run(lambda: train.main(["--setup", "mlp-digits", *flags.split()]))
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: Cannot use port {port} of --coordinator (Address already in use): pass another one."


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--coordinator localhost:1", "go together"),
        ("--process 0", "go together"),
        ("--coordinator localhost:1 --processes 2 --process 2", "--process 2 is not one of --processes 2: pass 0 to 1"),
        ("--coordinator localhost --processes 2 --process 1", "localhost is not an address: pass HOST:PORT"),
        ("--coordinator localhost:² --processes 2 --process 1", "localhost:² is not an address: pass HOST:PORT"),
        ("--coordinator localhost:65536 --processes 2 --process 1", "localhost:65536 is not an address: pass HOST"),
        ("--coordinator localhost:1 --processes 2 --process 1", "No answer at --coordinator localhost:1"),
    ],
)
def test_processes_name_wrong_addresses(flags, words, capsys, monkeypatch):
    monkeypatch.setattr(processes, "START_PATIENCE", 0)
    with pytest.raises(SystemExit) as stopped:
        cli.run(lambda: train.main(["--setup", "mlp-digits", *flags.split()]))
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error


def test_processes_single_process_needs_no_agreement():
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
