"""Files are whole or not there; fingerprints see every difference; locks outlive no process."""

import json
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from mcomb.base import UserError
from mcomb.files import atomic, fingerprint, lock, make_writable, write_json

ROOT = Path(__file__).parent.parent


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    target = tmp_path / "x.json"
    target.write_text("old")

    def fail_half_way():
        with atomic(target) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
    with atomic(target) as temporary:
        temporary.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_json_that_cannot_be_written_leaves_the_old_file(tmp_path):
    target = tmp_path / "x.json"
    write_json(target, {"a": [1, 2.5, None, "é"]})
    assert json.loads(target.read_text()) == {"a": [1, 2.5, None, "é"]}
    with pytest.raises(TypeError):
        write_json(target, {"a": object()})
    assert json.loads(target.read_text()) == {"a": [1, 2.5, None, "é"]}
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_is_made_with_those_above_it_and_nothing_in_it(tmp_path):
    assert make_writable(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert make_writable(tmp_path / "a" / "b").is_dir()
    assert not list((tmp_path / "a" / "b").iterdir())


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write to .*file/runs .*: give another --out"):
        make_writable(tmp_path / "file" / "runs")


TREE = {"x": np.arange(4, dtype=np.float32), "y": {"z": np.ones(2, np.float32)}}


@pytest.mark.parametrize(
    "other",
    [
        {"x": TREE["x"], "y": {"z": np.zeros(2, np.float32)}},
        {"x": TREE["x"], "y": {"u": TREE["y"]["z"]}},
        {"x": TREE["x"], "z": TREE["y"]["z"]},
        {"x": TREE["x"]},
        {"x": TREE["x"].reshape(2, 2), "y": TREE["y"]},
        {"x": TREE["x"].reshape(4, 1), "y": TREE["y"]},
        {"x": TREE["x"].view(np.int32), "y": TREE["y"]},
        {"x": TREE["x"].astype(np.float64), "y": TREE["y"]},
        {"x": TREE["x"].astype(ml_dtypes.bfloat16), "y": TREE["y"]},
        {"x": TREE["x"][::-1], "y": TREE["y"]},
        {"x": TREE["y"]["z"], "y": {"z": TREE["x"]}},
    ],
    ids=["value", "name", "place", "missing", "shape", "rank", "dtype", "width", "kind", "order", "exchanged"],
)
def test_whatever_differs_in_a_tree_differs_in_its_fingerprint(other):
    assert fingerprint(other) != fingerprint(TREE)


LEAVES = {
    "float32": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
    "bfloat16": np.linspace(-1, 1, 6, dtype=np.float32).astype(ml_dtypes.bfloat16),
    "integer": np.arange(-3, 3, dtype=np.int32),
    "byte": np.arange(6, dtype=np.uint8),
    "boolean": np.array([True, False, True, True, False, False]),
    "scalar": np.float32(2.5),
    "empty": np.zeros((0, 3), np.float32),
}


@pytest.mark.parametrize("kind", LEAVES)
def test_numpy_and_jax_arrays_of_the_same_values_have_one_fingerprint(kind):
    leaf = LEAVES[kind]
    assert fingerprint({"x": jnp.asarray(leaf)}) == fingerprint({"x": leaf}) == fingerprint({"x": np.array(leaf)})


@given(kind=st.sampled_from([name for name in LEAVES if name != "empty"]), data=st.data())
def test_a_fingerprint_changes_with_any_bit_of_any_value(kind, data):
    leaf = np.ascontiguousarray(LEAVES[kind])
    changed = leaf.copy()
    raw = changed.reshape(-1).view(np.uint8)
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= 1 if kind == "boolean" else 1 << data.draw(st.integers(0, 7))
    assert fingerprint({"x": changed}) != fingerprint({"x": leaf})


def test_a_fingerprint_does_not_depend_on_the_layout_in_memory():
    leaf = LEAVES["float32"]
    assert fingerprint(np.asfortranarray(leaf)) == fingerprint(leaf)
    assert fingerprint(np.repeat(leaf, 2, axis=1)[:, ::2]) == fingerprint(leaf)


def test_random_keys_have_fingerprints_by_value():
    first, again, other = (fingerprint({"key": jax.random.key(seed)}) for seed in (0, 0, 1))
    assert first == again != other
    assert fingerprint({"key": jax.random.split(jax.random.key(0))}) != first


def test_scalars_of_python_have_fingerprints_by_value_and_type():
    assert len({fingerprint(value) for value in (0, 1, 1.0, 2.5, True, False)}) == 6
    assert fingerprint(2.5) == fingerprint(np.float64(2.5)) != fingerprint([2.5])


HOLDER = """
import sys, pathlib
from mcomb.files import lock
with lock(pathlib.Path(sys.argv[1]), "testing"):
    print("holds it", flush=True)
    sys.stdin.read()
"""
LIMIT = 20  # seconds: far more than anything here takes, far less than waiting for ever


@pytest.fixture
def holder(tmp_path):
    """Starts processes that take the lock and keep it until their input ends."""
    with ExitStack() as stack:

        def start():
            pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            words = [sys.executable, "-c", HOLDER, str(tmp_path / "lock")]
            process = stack.enter_context(subprocess.Popen(words, cwd=ROOT, text=True, **pipes))
            stack.callback(process.kill)
            return process

        yield start


@pytest.mark.parametrize("end", ["finished", "killed"])
def test_a_second_process_says_once_that_it_waits_and_goes_on_when_the_first_has(end, holder):
    first = holder()
    assert first.stdout.readline() == "holds it\n"
    second = holder()
    assert second.stdout.readline() == "another process is testing: waiting for it to finish\n"
    time.sleep(0.3)  # several times it looks whether the lock is free
    ended = time.monotonic()
    if end == "killed":
        first.send_signal(signal.SIGKILL)
        assert first.wait(LIMIT) == -signal.SIGKILL
    else:
        first.stdin.close()
        assert first.wait(LIMIT) == 0
    assert second.stdout.readline() == "holds it\n"
    assert time.monotonic() - ended < LIMIT
    assert second.communicate(timeout=LIMIT) == ("", "")
    assert second.returncode == 0


def test_a_free_lock_is_taken_without_a_word_and_freed_even_after_an_error(tmp_path, capsys):
    for _ in range(2):
        with pytest.raises(RuntimeError), lock(tmp_path / "lock", "testing"):
            with pytest.raises(TimeoutError):
                FileLock(tmp_path / "lock").acquire(blocking=False)
            raise RuntimeError
    assert capsys.readouterr().out == ""
