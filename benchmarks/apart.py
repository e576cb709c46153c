"""Measurements in processes of their own, whose memory is theirs alone."""

import contextlib
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mcomb.errors import UserError


def peak_memory() -> int:
    """The most bytes that this process has taken so far."""
    with contextlib.suppress(OSError):  # on Linux, what getrusage says is at least what the process had that began this
        return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure_apart(measure: Callable[[Any], Any], point: Any) -> Any:
    """What a function of a benchmark returns for a dataclass of the same module, called in a process of its own."""
    names, spec = (measure.__name__, type(point).__name__), sys.modules[measure.__module__].__spec__
    assert spec is not None  # the module's own name, also where it is being run
    code = f"import json\nfrom {spec.name} import {', '.join(names)}\nprint(json.dumps({names[0]}({point})))"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command, root = [sys.executable, "-c", code], Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{point} failed: {(done.stderr.splitlines() or ['without a word'])[-1]}")
    return json.loads(done.stdout.splitlines()[-1])
