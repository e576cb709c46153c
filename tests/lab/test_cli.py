"""Command lines from typed dataclasses."""

import asyncio
import dataclasses
import gc
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Annotated

import jax
import jax.numpy as jnp
import pytest

from mcomb.errors import Diverged, UserError
from mcomb.io.checkpoints import reading
from mcomb.lab import cli
from mcomb.lab.cli import Flag
from mcomb.runtime import interrupts


@dataclass(frozen=True)
class Example:
    """A config with one flag of every kind."""

    kind: Annotated[str, Flag("which one", choices=("this", "that"))] = "this"
    count: Annotated[int, Flag("how many", at_least=1)] = 3
    rate: Annotated[float | None, Flag("how fast [setup]", at_least=0)] = None
    most_of: Annotated[int | None, Flag("at most (default: all)", at_least=1)] = None
    where: Annotated[Path, Flag("the place", identity=False)] = Path("here")
    interval: Annotated[tuple[float, float], Flag("from and to")] = (0.0, 1.0)
    sizes: Annotated[tuple[int, ...], Flag("any number of them", at_least=1, at_most=64)] = (1, 2, 4)
    loud: Annotated[bool, Flag("say more")] = False


def parse(*words):
    return cli.parse(Example, "An example.", list(words), "The end.")


def test_parse_without_flags_returns_defaults():
    assert parse() == Example()


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("--kind that", {"kind": "that"}),
        ("--count 5", {"count": 5}),
        ("--rate 0.5", {"rate": 0.5}),
        ("--rate 0", {"rate": 0.0}),
        ("--most-of 7", {"most_of": 7}),
        ("--where there/now", {"where": Path("there/now")}),
        ("--interval -1 2.5", {"interval": (-1.0, 2.5)}),
        ("--sizes 8", {"sizes": (8,)}),
        ("--sizes 8 4 2", {"sizes": (8, 4, 2)}),
        ("--loud", {"loud": True}),
        ("--count 5 --loud --count 6", {"count": 6, "loud": True}),
    ],
)
def test_parse_converts_flags_to_field_types(words, changes):
    found = parse(*words.split())
    assert found == Example(**changes)
    for name in changes:
        assert type(getattr(found, name)) is type(getattr(Example(**changes), name))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--kind other", ["--kind", "'other'", "'this', 'that'"]),
        ("--count 0", ["--count", "0 is less than 1"]),
        ("--count 10000001", ["--count", "10000001 is more than 10000000"]),
        ("--sizes 2 65", ["--sizes", "65 is more than 64"]),
        ("--count ²", ["--count", "whole number", "'²'"]),
        ("--count many", ["--count", "whole number", "'many'"]),
        ("--count 2.5", ["--count", "whole number", "'2.5'"]),
        ("--rate fast", ["--rate", "number", "'fast'"]),
        ("--rate -0.5", ["--rate", "-0.5 is less than 0"]),
        ("--rate nan", ["--rate", "nan is not finite"]),
        ("--rate inf", ["--rate", "inf is not finite"]),
        ("--where=", ["--where", "the path is empty"]),
        ("--interval nan 1", ["--interval", "nan is not finite"]),
        ("--sizes 2 0", ["--sizes", "0 is less than 1"]),
        ("--sizes", ["--sizes", "at least one argument"]),
        ("--interval 1", ["--interval", "2 arguments"]),
        ("--cuont 1", ["--cuont", "did you mean --count?"]),
        (
            "--coun 1",
            ["--coun", "did you mean --count?"],
        ),  # no abbreviations, because new flags could make them ambiguous
        ("--loud yes", ["yes"]),
        ("--where gs://bucket/x", ["--where", "gs://bucket/x is not a local path"]),
    ],
)
def test_parse_names_invalid_flag_and_help(words, told):
    with pytest.raises(UserError) as caught:
        parse(*words.split())
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith((": see --help", ": did you mean --count?"))
    for word in told:
        assert word in text


def test_help_lists_every_flag_with_default(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse("--help")
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    lines = " ".join(text.split())
    assert "An example." in text
    assert text.rstrip().endswith("The end.")
    for said in (
        "--kind {this,that} which one (default: this)",
        "--count N how many (default: 3)",
        "--rate X how fast (default: the setup's)",
        "--most-of N at most (default: all)",
        "--where PATH the place (default: here)",
        "--interval X X from and to (default: 0 1)",
        "--sizes N [N ...] any number of them (default: 1 2 4)",
        "--loud say more",
    ):
        assert said in lines


def test_flags_returns_annotations_of_fields():
    found = cli.flags(Example)
    assert list(found) == [field.name for field in dataclasses.fields(Example)]
    assert found["count"] == Flag("how many", at_least=1)
    assert [name for name, flag in found.items() if not flag.identity] == ["where"]


def stopping(error):
    def main():
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("no such file: pass another"), 2, "error: no such file: pass another\n"),
        (Diverged("the loss is not a number"), 1, "error: the loss is not a number\n"),
        (KeyboardInterrupt(), 130, "Interrupted; run the same command to resume.\n"),
    ],
)
def test_run_prints_user_error_in_one_line(error, code, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.run(stopping(error))
    assert stopped.value.code == code
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device", "runs/x"), "No space left on device (runs/x): fix this, then"),
        (PermissionError(13, "Permission denied"), "Permission denied: fix this, then"),
        (MemoryError(), "Out of memory: free some, or reduce --vmap-size, --batch-size or --width, then"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GB"), "Out of memory: free some, or reduce"),
    ],
)
def test_run_prints_missing_resource_in_one_line(error, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.run(stopping(error))
    assert stopped.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}")
    assert line.endswith("then run the same command to resume.")


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Keep interrupts from ending the test process at once, even on a busy machine."""
    monkeypatch.setattr(interrupts, "EXIT_PATIENCE", 600.0)


def test_run_treats_sigterm_like_interrupt(capsys):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped:
        cli.run(lambda: (signal.raise_signal(signal.SIGTERM), time.sleep(30)))
    assert stopped.value.code == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "Interrupted; run the same command to resume.\n"
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def interruptible():
    """Restore Ctrl-C, which shells disable for background processes."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_run_detects_interrupt_behind_other_error(number, tmp_path, capsys):
    """Orbax may turn an interrupt into its own error; the checkpoint must not count as damaged."""
    seen = []

    def read():
        try:
            signal.raise_signal(number)
            time.sleep(30)
        except KeyboardInterrupt:
            raise ValueError("the data are damaged") from None

    def main():
        try:
            reading(tmp_path, read)
        except UserError as error:
            seen.append(error)
            raise

    with pytest.raises(SystemExit) as stopped:
        cli.run(main)
    assert not seen
    assert stopped.value.code == 128 + number
    with pytest.raises(SystemExit) as stopped:
        cli.run(read)
    assert stopped.value.code == 128 + number
    assert capsys.readouterr().err == 2 * "Interrupted; run the same command to resume.\n"
    with pytest.raises(UserError, match="Cannot read checkpoint"):  # the earlier interrupt is forgotten
        reading(tmp_path, lambda: 1 / 0)


def test_run_mutes_background_failures_after_its_line(caplog):
    """On a full disk, orbax fails for other parts of a checkpoint in the background."""

    async def fail():
        raise OSError(28, "No space left on device")

    async def leave_behind():
        failing = asyncio.create_task(fail())
        await asyncio.sleep(0)
        assert failing.done()

    cli._mute_orbax()
    asyncio.run(leave_behind())
    gc.collect()
    assert not caplog.records


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("too_soon", [False, True], ids=["", "even too soon"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_run_resends_interrupt_that_python_drops(number, too_soon, capsys, monkeypatch):
    """Python drops an interrupt in a callback of the garbage collector; on a busy machine, the next one too."""
    once, hasty = [number], [too_soon]
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    cli._repeat_lost_interrupts.__wrapped__()

    class Slow(Timer):
        def start(self):
            super().start()
            if any(hasty):
                hasty.clear()
                self.join()
                time.sleep(1)

    monkeypatch.setattr(cli, "Timer", Slow)

    def callback(phase, info):
        if once:
            signal.raise_signal(once.pop())
            time.sleep(1)

    gc.callbacks.append(callback)
    try:
        with pytest.raises(SystemExit) as stopped:
            cli.run(lambda: (gc.collect(), time.sleep(30)))
    finally:
        gc.callbacks.remove(callback)
    assert stopped.value.code == 128 + number
    assert capsys.readouterr().err == "Interrupted; run the same command to resume.\n"


def test_run_keeps_traceback_of_bug():
    with pytest.raises(ZeroDivisionError):
        cli.run(stopping(ZeroDivisionError()))


def test_run_returns_after_success(capsys):
    cli.run(lambda: print("done"))
    assert capsys.readouterr() == ("done\n", "")


def test_run_sets_full_matmul_precision():
    lowered, before = [], jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", None)
    try:
        cli.run(lambda: lowered.append(jax.jit(jnp.dot).lower(jnp.ones((2, 2)), jnp.ones((2, 2))).as_text()))
    finally:
        jax.config.update("jax_default_matmul_precision", before)
    assert "precision = [HIGHEST, HIGHEST]" in lowered[0]


def test_mute_orbax_hides_closed_event_loops_only(monkeypatch):
    class Other:
        def __del__(self):
            raise ValueError("mine")

    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda problem: told.append(str(problem.exc_value)))
    cli._mute_orbax.__wrapped__()
    asyncio.BaseEventLoop.__new__(asyncio.BaseEventLoop)  # never opened, so that closing it fails
    Other()
    assert told == ["mine"]
