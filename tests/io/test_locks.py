"""A second process waits for the first, and a dead process holds no lock."""

import errno
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from filelock import FileLock

from mcomb.io.locks import lock

ROOT = Path(__file__).parents[2]


HOLDER = """
import sys, pathlib
from mcomb.io.locks import lock
with lock(pathlib.Path(sys.argv[1]), "testing"):
    print("holds it", flush=True)
    sys.stdin.read()
"""
LIMIT = 60  # seconds that such a process may live: a test that waits in vain fails then
AT_ONCE = 5  # seconds: it looks twenty times a second, and the machine may be busy


@pytest.fixture
def holder(tmp_path):
    """Start processes that take the lock and keep it until their input ends."""
    with ExitStack() as stack:

        def start():
            pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            words = [sys.executable, "-c", HOLDER, str(tmp_path / "lock")]
            process = stack.enter_context(subprocess.Popen(words, cwd=ROOT, text=True, **pipes))
            stack.callback(process.kill)
            timer = threading.Timer(LIMIT, process.kill)
            timer.start()
            stack.callback(timer.cancel)
            return process

        yield start


@pytest.mark.parametrize("end", [pytest.param("finished", marks=pytest.mark.slow), "killed"])
def test_lock_second_process_waits_and_says_so_once(end, holder):
    first = holder()
    assert first.stdout.readline() == "holds it\n"
    second = holder()
    assert second.stderr.readline() == "Another process is testing: waiting for it to finish.\n"
    time.sleep(0.3)  # it looks several times, and says no more
    ended = time.monotonic()
    if end == "killed":
        first.kill()
        assert first.wait(LIMIT) not in (0, None)
    else:
        first.stdin.close()
        assert first.wait(LIMIT) == 0
    assert second.stdout.readline() == "holds it\n"
    assert time.monotonic() - ended < AT_ONCE
    assert second.communicate(timeout=LIMIT) == ("", "")
    assert second.returncode == 0


def test_lock_is_silent_and_released_after_error(tmp_path, capsys):
    def fail_inside():
        with lock(tmp_path / "lock", "testing"):
            with pytest.raises(TimeoutError):
                FileLock(tmp_path / "lock").acquire(blocking=False)
            raise RuntimeError

    for _ in range(2):
        with pytest.raises(RuntimeError):
            fail_inside()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOLCK])
def test_lock_warns_on_file_system_without_locks(number, tmp_path, monkeypatch, capsys):
    def refuse(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(pytest.importorskip("fcntl"), "flock", refuse)  # as some network drives do
    for _ in range(2):
        with lock(tmp_path / "lock", "testing"):
            pass
    said = capsys.readouterr().err
    assert said.startswith(f"The file system of {tmp_path} has no locks: ")
    assert said.count("\n") == 1


def test_lock_raises_other_errors(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"), lock(tmp_path / "file" / "lock", "testing"):
        pass
