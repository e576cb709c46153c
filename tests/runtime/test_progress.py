"""Progress bars, messages, colours and JSON, on terminals and in logs."""

import io
import json
import os
import pty
import re
import select
import sys
import termios
from contextlib import contextmanager

import pytest

import mcomb
from mcomb.runtime import progress
from mcomb.runtime.progress import coloured, progress_bar, say, set_mode, show, show_json, warn


def read_all(descriptor):
    """Read until nothing has come for a while."""
    parts = []
    while select.select([descriptor], [], [], 0.3)[0]:
        parts.append(os.read(descriptor, 2**16))
    return b"".join(parts).decode()


@contextmanager
def terminal():
    """Replace standard error by a real terminal; yield a function that reads from it."""
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    termios.tcsetwinsize(theirs, (24, 100))
    with open(theirs, "w") as stream, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        patch.delenv("NO_COLOR", raising=False)
        patch.setenv("TERM", "xterm")
        yield lambda: read_all(ours)
    os.close(ours)


def work():
    with progress_bar(4000, "img", "training", done=1000) as bar:
        for _ in range(3):
            bar.update(1000)


def test_progress_bar_moves_on_terminal():
    with terminal() as read:
        work()
        shown = read()
    assert "\r" in shown
    assert re.search(r"training: 100%\|█+\| 4.00k/4.00k \[.*img/s\]", shown)


def screen(shown):
    """Return the lines that a terminal of 100 columns shows after these characters."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[A|[^\x1b]", shown):
        if part == "\x1b[A":
            row -= 1
        elif part == "\r":
            column = 0
        elif part == "\n":
            row, lines = row + 1, [*lines, ""]
        else:
            line = lines[row].ljust(column + 1)
            lines[row] = line[:column] + part + line[column + 1 :]
            column += 1
    return [line.rstrip() for line in lines if line.strip()]


@pytest.mark.parametrize("first", [0, 1])
def test_progress_messages_after_parallel_bars_are_whole(first):
    with terminal() as read:
        bars = [progress_bar(4, "img", f"training seed-{i}") for i in (0, 1)]
        for bar in (bars[first], bars[1 - first]):
            say("in between")
            bar.update(4)
            bar.refresh()
            for other in bars:
                other.refresh()
            bar.close()
        say("results go to runs")
        show_lines = screen(read())
    assert [line for line in show_lines if "%|" not in line] == ["in between", "in between", "results go to runs"]
    names = [line.partition(":")[0] for line in show_lines if "%|" in line]
    assert names == [f"training seed-{i}" for i in (first, 1 - first)]
    assert show_lines[-1] == "results go to runs"


def test_progress_writes_lines_to_log(capsys, monkeypatch):
    work()
    begins, ends = capsys.readouterr().err.splitlines()
    assert begins == "training: started at 25%"
    assert re.fullmatch(r"training: 100%, 4.00k of 4.00k img, in 00:00, .*img/s", ends)
    monkeypatch.setattr(progress, "SELDOM", 0.0)
    work()
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"training: 50%, 2.00k of 4.00k img, 00:00 so far, 00:00 left, .*img/s", lines[1])
    assert not any("\r" in line for line in lines)
    with progress_bar(20, "step", "learning") as bar:
        bar.update(20)
    assert "learning: 100%, 20 of 20 step, in" in capsys.readouterr().err
    with progress_bar(None, " visits", "matching") as bar:
        bar.update()
    assert re.search(r"\nmatching: 1 visits, in 00:00, .*\n$", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("quiet", "json_", "out", "err"),
    [
        (False, False, "a table\n", "a line\na warning\n"),
        (True, False, "", "a warning\n"),
        (False, True, '{\n "a": 1\n}\n', "a line\na warning\n"),
        (True, True, '{\n "a": 1\n}\n', "a warning\n"),
    ],
)
def test_progress_modes_silence_output(quiet, json_, out, err, capsys):
    set_mode(quiet=quiet, json=json_)
    say("a line")
    warn("a warning")
    show("a table")
    show_json({"a": 1})
    assert capsys.readouterr() == (out, err)
    work()
    assert bool(capsys.readouterr().err) is not quiet


def test_set_progress_silences_bars_and_messages(capsys):
    mcomb.set_progress(False)
    say("a line")
    work()
    assert capsys.readouterr().err == ""
    mcomb.set_progress(True)
    say("a line")
    work()
    said = capsys.readouterr().err
    assert said.startswith("a line\n")
    assert "training: 100%" in said


def test_show_json_writes_standard_json(capsys):
    set_mode(json=True)
    with pytest.raises(ValueError, match="JSON"):
        show_json({"loss": float("nan")})
    show_json({"s": "½ − s"})
    out = capsys.readouterr().out
    assert out.isascii()
    assert json.loads(out) == {"s": "½ − s"}


def test_coloured_only_on_terminals_without_no_color(monkeypatch):
    with terminal():
        assert coloured("error:", "red", sys.stderr) == "\x1b[31merror:\x1b[0m"
        assert coloured("error:", "red", io.StringIO()) == "error:"
        monkeypatch.setenv("NO_COLOR", "1")
        assert coloured("error:", "red", sys.stderr) == "error:"
