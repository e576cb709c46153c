"""Run one program in several processes, on one or more machines, connected by `jax.distributed`.

All processes run the same code and make the same compiled calls in the same order. Only the first process makes
decisions that depend on files (`from_first`), and only it writes and prints (`is_first`).
"""

import contextlib
import json
import os
import pickle
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from itertools import count
from threading import Thread
from typing import Any, NoReturn, ParamSpec, TypeVar

import jax
from jax._src import distributed  # the key-value store of connected processes has no public API

from mcomb.errors import UserError

T = TypeVar("T")
P = ParamSpec("P")

START_PATIENCE = 60  # seconds to wait for the other processes to start
HEARTBEAT = 30  # seconds without a heartbeat after which a process counts as dead
FOREVER = 1000 * 60 * 60 * 24 * 365  # milliseconds
REMEDY = "start all processes again with the same commands to resume."
NOT_ALL_CAME = "Not all processes of this run started in time: start all of them with the same commands."
LAST_WORDS = f"""
import sys
heard = sys.stdin.read()
if not heard:
    print("error: {NOT_ALL_CAME}", file=sys.stderr)
elif heard == "joined":
    print("error: A process of this run died or cannot be reached: {REMEDY}", file=sys.stderr)
"""

_numbers = count()  # counts shared values, equally in all processes


def join(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Connect this process with the others; without arguments, use the settings of the launcher."""
    by_hand = (coordinator, processes, process)
    if None in by_hand and by_hand != (None, None, None):
        raise UserError("--coordinator, --processes and --process go together: pass all three, or --distributed alone.")
    if coordinator is not None and processes is not None and process is not None:
        if process >= processes:
            raise UserError(f"--process {process} is not one of --processes {processes}: pass 0 to {processes - 1}.")
        _find(coordinator, first=process == 0)
    with contextlib.suppress(AttributeError):  # some versions of JAX have this service, which swallows SIGTERM
        jax.config.update("jax_enable_preemption_service", False)
    last_words = subprocess.Popen([sys.executable, "-c", LAST_WORDS], stdin=subprocess.PIPE, text=True)
    try:
        jax.distributed.initialize(
            coordinator, processes, process, initialization_timeout=START_PATIENCE, heartbeat_timeout_seconds=HEARTBEAT
        )
    except (RuntimeError, ValueError) as error:
        last_words.communicate("said")
        remedy = "start all of them" if coordinator else "start them with SLURM or Open MPI, or pass --coordinator"
        raise UserError(f"The processes cannot connect ({_first_line(error)}): {remedy}.") from error
    _state.last_words = last_words
    if last_words.stdin:
        last_words.stdin.write("joined")
        last_words.stdin.flush()
    _keep_standard_output()
    _state.watch = Thread(target=_leave_with_the_first_to_fail, daemon=True)
    _state.watch.start()
    jax.devices()  # waits for the other processes here, not later while one of them reads files


def _keep_standard_output() -> None:
    """Reserve standard output for Python's output in the first process; redirect XLA's lines to standard error."""
    if is_first():
        sys.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
        os.dup2(2, 1)
    else:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


class _State:
    last_words: "subprocess.Popen[str] | None" = None
    watch: Thread | None = None


_state = _State()


def is_first() -> bool:
    """Return whether this is the process that writes and prints; a single process is."""
    return distributed.global_state.process_id == 0


def are_several() -> bool:
    """Return whether this process is one of several."""
    return distributed.global_state.client is not None and distributed.global_state.num_processes > 1


def _client() -> Any:
    return distributed.global_state.client


def from_first(make: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Call `make` in the first process only; return its result, or raise its UserError, in all processes."""
    if not are_several():
        return make(*args, **options)
    client, key = _client(), f"mcomb/value/{next(_numbers)}"
    if is_first():
        try:
            outcome: Any = make(*args, **options)
        except UserError as error:
            outcome = error
        client.key_value_set_bytes(key, pickle.dumps(outcome))
    outcome = pickle.loads(client.blocking_key_value_get_bytes(key, FOREVER))
    if isinstance(outcome, UserError):
        raise outcome
    return outcome


def require_agreement(what: str, value: str) -> None:
    """Raise an error in all processes if their values differ."""
    if not are_several():
        return
    client, key = _client(), f"mcomb/agreement/{next(_numbers)}"
    client.key_value_set(f"{key}/{distributed.global_state.process_id}", value)
    for process in range(distributed.global_state.num_processes):
        other = client.blocking_key_value_get(f"{key}/{process}", FOREVER)
        if other != value:
            raise UserError(
                f"Process {process} has different {what} ({other}) than this one ({value}): use the same for all."
            )


def wait_for_all(what: str) -> None:
    """Wait until all processes get here."""
    if are_several():
        _client().wait_at_barrier(f"mcomb/{what}/{next(_numbers)}", FOREVER)


def explain(error: Exception) -> str:
    """Return the message for an unexpected error; a lost connection leaves time for the failed process to report."""
    if not isinstance(error, jax.errors.JaxRuntimeError):
        traceback.print_exception(error)
        return f"{type(error).__name__}: {_first_line(error)}"
    time.sleep(3)
    return f"Lost the connection to another process ({_first_line(error)}): {REMEDY}"


def leave(message: str | None, code: int) -> None:
    """Disconnect this process; with a message, end the other processes too."""
    if _state.last_words is None:
        return
    _say_no_last_words()
    if message is None:
        jax.distributed.shutdown()
        if _state.watch:
            _state.watch.join()  # it must not wake up while Python exits
        return
    index = distributed.global_state.process_id
    try:
        _client().key_value_set("mcomb/failure", json.dumps([index, message, code]))
        time.sleep(2 if is_first() else 0)  # the others read it from the first process
    except RuntimeError:
        pass  # another process failed first
    _exit(code)


def _leave_with_the_first_to_fail() -> None:
    """Wait in a separate thread until a process reports a failure, then print it and end this process."""
    try:
        found = _client().blocking_key_value_get("mcomb/failure", FOREVER)
    except RuntimeError:
        return  # all processes have ended
    process, message, code = json.loads(found)
    if process != distributed.global_state.process_id:
        _say_no_last_words()
        print(f"{'error: ' if code < 128 else ''}Process {process}: {message}", file=sys.stderr)
        _exit(code)


def _say_no_last_words() -> None:
    if _state.last_words and _state.last_words.stdin:
        with contextlib.suppress(ValueError):  # the other thread has sent it
            _state.last_words.communicate("said")


def _exit(code: int) -> NoReturn:
    """End the process without waiting for the others, which will not come."""
    sys.stderr.flush()
    os._exit(code)


def _find(coordinator: str, first: bool) -> None:
    """Raise an error unless the first process can listen at the address, or another process gets an answer there."""
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 2**16:
        raise UserError(f"--coordinator {coordinator} is not an address: pass HOST:PORT of process 0.")
    if first:
        _require_free(int(port))
    end = time.monotonic() + START_PATIENCE
    while not first:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise UserError(
                    f"No answer at --coordinator {coordinator} ({error}): start process 0 there."
                ) from error
            time.sleep(0.5)


def _require_free(port: int) -> None:
    """Raise an error unless this process can listen on a port, because JAX would crash."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise UserError(f"Cannot use port {port} of --coordinator ({why}): pass another one.") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
