"""Several processes, on one machine or many, that run one program together, connected by `jax.distributed`.

All of them run the same code and make the same compiled calls in the same order. What depends on files is decided by
the first process alone (`from_first`), and only that one writes and prints (`is_first`).
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
from jax._src import distributed  # the store of keys and values that connected processes share has no public name

from mcomb.errors import UserError

T = TypeVar("T")
P = ParamSpec("P")

PATIENCE = 60  # seconds to wait for processes that have not come yet
HEARTBEAT = 30  # seconds without a sign of life after which a process counts as dead
FOREVER = 1000 * 60 * 60 * 24 * 365  # milliseconds
REMEDY = "start all of them again, by the same commands, to go on"
NOT_ALL_CAME = "not all processes of this run have come in time: start all of them, by the same commands"
LAST_WORDS = f"""
import sys
heard = sys.stdin.read()
if not heard:
    print("error: {NOT_ALL_CAME}", file=sys.stderr)
elif heard == "joined":
    print("error: a process of this run has died or cannot be reached: {REMEDY}", file=sys.stderr)
"""

_numbers = count()  # of the values that were shared so far: the same in all processes


def join(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Connects this process with the others; without arguments, as the launcher that started it says."""
    by_hand = (coordinator, processes, process)
    if None in by_hand and by_hand != (None, None, None):
        raise UserError("--coordinator, --processes and --process go together: give all three, or --distributed alone")
    if coordinator is not None and processes is not None and process is not None:
        if process >= processes:
            raise UserError(f"--process {process} is not one of --processes {processes}: give 0 to {processes - 1}")
        _find(coordinator, first=process == 0)
    with contextlib.suppress(AttributeError):  # where JAX has it: it would swallow SIGTERM
        jax.config.update("jax_enable_preemption_service", False)
    last_words = subprocess.Popen([sys.executable, "-c", LAST_WORDS], stdin=subprocess.PIPE, text=True)
    try:
        jax.distributed.initialize(
            coordinator, processes, process, initialization_timeout=PATIENCE, heartbeat_timeout_seconds=HEARTBEAT
        )
    except (RuntimeError, ValueError) as error:
        last_words.communicate("said")
        remedy = "start all of them" if coordinator else "start it by SLURM or Open MPI, or give --coordinator"
        raise UserError(f"the processes do not find each other ({_first_line(error)}): {remedy}") from error
    _state.last_words = last_words
    if last_words.stdin:
        last_words.stdin.write("joined")
        last_words.stdin.flush()
    _keep_standard_output()
    _state.watch = Thread(target=_leave_with_the_first_to_fail, daemon=True)
    _state.watch.start()
    jax.devices()  # of all processes: each waits here for the others, and later nobody does while one reads files


def _keep_standard_output() -> None:
    """Leaves standard output to what Python prints in the first process; XLA's own lines go to standard error."""
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
    """Whether this is the process that writes and prints; a process by itself is."""
    return distributed.global_state.process_id == 0


def are_several() -> bool:
    """Whether this process runs together with others."""
    return distributed.global_state.client is not None and distributed.global_state.num_processes > 1


def _client() -> Any:
    return distributed.global_state.client


def from_first(make: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """What `make` returns, or the problem that it finds, in the first process; the others do not call it."""
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
    """An error in all processes if they do not have the same value of something."""
    if not are_several():
        return
    client, key = _client(), f"mcomb/agreement/{next(_numbers)}"
    client.key_value_set(f"{key}/{distributed.global_state.process_id}", value)
    for process in range(distributed.global_state.num_processes):
        other = client.blocking_key_value_get(f"{key}/{process}", FOREVER)
        if other != value:
            raise UserError(f"process {process} has other {what} ({other}) than this one ({value}): give all the same")


def wait_for_all(what: str) -> None:
    """Waits until all processes have come here."""
    if are_several():
        _client().wait_at_barrier(f"mcomb/{what}/{next(_numbers)}", FOREVER)


def explain(error: Exception) -> str:
    """What to say of an error that is nobody's mistake; if it comes from another process, that one says it."""
    if not isinstance(error, jax.errors.JaxRuntimeError):
        traceback.print_exception(error)
        return f"{type(error).__name__}: {_first_line(error)}"
    time.sleep(3)
    return f"contact with another process is lost ({_first_line(error)}): {REMEDY}"


def leave(message: str | None, code: int) -> None:
    """Ends this process's part in the run; with a message, the others end with it, too."""
    if _state.last_words is None:
        return
    _say_no_last_words()
    if message is None:
        jax.distributed.shutdown()
        if _state.watch:
            _state.watch.join()  # it must not wake up while Python ends
        return
    index = distributed.global_state.process_id
    try:
        _client().key_value_set("mcomb/failure", json.dumps([index, message, code]))
        time.sleep(2 if is_first() else 0)  # the others read it from the first
    except RuntimeError:
        pass  # it was not the first to fail
    _exit(code)


def _leave_with_the_first_to_fail() -> None:
    """Waits, in a thread of its own, until a process says why it fails; then prints that and ends this one."""
    try:
        found = _client().blocking_key_value_get("mcomb/failure", FOREVER)
    except RuntimeError:
        return  # all have come to their end
    process, message, code = json.loads(found)
    if process != distributed.global_state.process_id:
        _say_no_last_words()
        print(f"{'error: ' if code < 128 else ''}process {process}: {message}", file=sys.stderr)
        _exit(code)


def _say_no_last_words() -> None:
    if _state.last_words and _state.last_words.stdin:
        with contextlib.suppress(ValueError):  # the other thread has said it
            _state.last_words.communicate("said")


def _exit(code: int) -> NoReturn:
    """Ends the process without waiting for the others, which do not come any more."""
    sys.stderr.flush()
    os._exit(code)


def _find(coordinator: str, first: bool) -> None:
    """An error unless the address is one, and free for the first process or answered there before long."""
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 2**16:
        raise UserError(f"--coordinator {coordinator} is no address: give HOST:PORT, of process 0")
    if first:
        _require_free(int(port))
    end = time.monotonic() + PATIENCE
    while not first:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise UserError(
                    f"nobody answers at --coordinator {coordinator} ({error}): start process 0 there"
                ) from error
            time.sleep(0.5)


def _require_free(port: int) -> None:
    """An error unless this process can listen at a port of its machine: JAX would crash."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise UserError(f"port {port} of --coordinator cannot be used ({why}): give all another one") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
