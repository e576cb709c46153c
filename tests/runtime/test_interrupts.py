"""Ctrl-C and SIGTERM end a program whose main thread is busy in XLA, in real processes."""

import signal
import subprocess
import sys
import time

import pytest

BUSY = """
import signal, sys, jax
from mcomb.runtime.interrupts import unsaved
from mcomb.lab import cli

def main():
    with unsaved() as begun:
        begun.set() if {begun} else None
        print("begins", flush=True)
        jax.block_until_ready(jax.jit(lambda x: jax.lax.while_loop(lambda x: x < 9, lambda x: (x + 1) % 7, x))(0))

signal.signal(signal.SIGINT, signal.default_int_handler)  # as in the foreground
cli.run(main)
"""
LAST = "Interrupted; run the same command to resume."


def start(begun=False):
    """Start a program that computes forever in its main thread."""
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY.format(begun=begun)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "begins\n"
    time.sleep(1)  # it compiles, or computes already
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupts_end_busy_program(number):
    process = start()
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert said.splitlines() == [LAST]


def test_interrupts_second_signal_ends_saving_program():
    process = start(begun=True)
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline().startswith("Interrupted: saving after the current step")
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said.splitlines() == [LAST]
