"""Run experiments in forks of a process that has imported everything, and kill them at fault points.

A fault point is the moment before a Python program opens a file for writing, or renames, creates or removes a file
below --out. Python's audit events report the fault points of our code and of all libraries.
"""

import gc
import itertools
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink")
LIMIT = 600  # timeout of a program in seconds


class Warm:
    """A preloaded process that runs experiments: `with Warm() as warm: warm.run("uniform --epochs 2", out)`."""

    def __enter__(self):
        devices = os.environ.get("MCOMB_TESTS_DEVICES", "2")
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": devices, "PYTHONPATH": str(ROOT)}
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"  # processes share compiled programs
        environment.pop("MCOMB_DATA_DIR", None)
        words = [sys.executable, __file__]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(words, cwd=ROOT, env=environment, **pipes)
        return self

    def __exit__(self, *error):
        self.process.stdin.close()
        self.process.wait(LIMIT)
        self.process.stdout.close()

    def run(self, command, out, **how):
        """Run a program; return its exit code, or the negative signal number, and its output on both streams.

        Args:
            command: The experiment and its flags.
            out: Its --out folder.
            how: `at`: the fault point at which to send a signal, counted from 1, or words in the name of the first such
                point, such as "os.rename /results.json"; 0 records all points. `number`: the signal. `after`: seconds
                after which to send the signal instead. `fail`: the errno of all operations from the fault point on.
                `files`: the maximum number of open files. `clock`: whether time.time jumps back and forth.
        """
        return self.together([command], out, **how)[0]

    def together(self, commands, out, **how):
        """Run several programs at once; return the exit code and output of each."""
        print(json.dumps([commands, str(out), how]), file=self.process.stdin, flush=True)
        return [tuple(ended) for ended in json.loads(self.process.stdout.readline())]


def serve():
    """Fork a process for each command on each line of standard input; write their exit codes and outputs."""
    import orbax.checkpoint  # noqa: F401 (imported, to be warm)
    import scipy.optimize
    import scipy.stats  # noqa: F401 (imported, to be warm)

    import experiments.report
    import experiments.train  # noqa: F401 (imported, to be warm)
    from mcomb.lab.figures import STYLE

    STYLE.update({"savefig.dpi": 80, "pdf.fonttype": 3})  # otherwise figures take a third of the time of a run

    gc.freeze()  # no child needs to scan imported modules
    for line in sys.stdin:
        commands, out, how = json.loads(line)
        children = {}
        for index, command in enumerate(commands):
            log = Path(f"{out}.log-{index}")
            pid = os.fork()
            if pid == 0:
                become(command, Path(out), log, **how)
                return
            children[pid] = log
        ended = []
        start = time.monotonic()
        for pid, log in children.items():
            code = wait(pid, start, how.get("after"), how.get("number", signal.SIGKILL))
            ended.append((code, log.read_text(errors="replace")))
            log.unlink()
        print(json.dumps(ended), flush=True)


def wait(pid, start, after, number):
    """Wait for a child, send it a signal some seconds after the start, and return its exit code."""
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        passed = time.monotonic() - start
        if after is not None and passed > after:
            os.kill(pid, number)
            after = None
        if passed > LIMIT:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def become(command, out, log, at=None, number=signal.SIGKILL, after=None, fail=None, files=None, clock=False):
    """Turn this process into one that runs a command."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
    watch(str(out), at, number, fail)
    if files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    if clock:
        real, ticks = time.time, itertools.count()
        time.time = lambda: real() + 1e6 * (-1) ** next(ticks)
    name, *flags = command.split()
    sys.argv = [name, *flags, "--out", str(out)]
    warnings.filterwarnings("ignore", ".*found in sys.modules")  # the module is already imported
    runpy.run_module(f"experiments.{name}", run_name="__main__", alter_sys=True)


def watch(out, at, number, fail):
    """Send this process a signal at a fault point, make later operations fail, or record all points."""
    if at is None:
        return
    points, reached, lock = itertools.count(1), [], threading.Lock()
    notes = os.open(f"{out}.events", os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if at == 0 else None

    def hook(event, args):
        writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if not (writes or event in CHANGES) or not str(args[0]).startswith(out + "/"):
            return
        name = f"{event} {str(args[0]).removeprefix(out)}"
        with lock:
            point = next(points)
            first = not reached and (point == at if isinstance(at, int) else all(word in name for word in at.split()))
            if first:
                reached.append(name)
        if notes is not None:
            os.write(notes, f"{name}\n".encode())
        elif fail is not None and reached and event != "os.remove":
            raise OSError(fail, os.strerror(fail), str(args[0]))
        elif fail is None and first:
            os.kill(os.getpid(), number)

    sys.addaudithook(hook)


if __name__ == "__main__":
    serve()
    sys.stdout.flush()
