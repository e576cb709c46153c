"""Run measurements in separate processes, so that their memory can be told apart."""

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
    """Return the peak memory of this process in bytes."""
    with contextlib.suppress(OSError):  # on Linux, getrusage includes the peak of the parent process
        return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure_apart(measure: Callable[[Any], Any], point: Any) -> Any:
    """Call `measure(point)` in a separate process; both must come from the same module."""
    names, spec = (measure.__name__, type(point).__name__), sys.modules[measure.__module__].__spec__
    assert spec is not None  # has the module's name even if it runs as __main__
    code = f"import json\nfrom {spec.name} import {', '.join(names)}\nprint(json.dumps({names[0]}({point})))"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command, root = [sys.executable, "-c", code], Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{point} failed: {(done.stderr.splitlines() or ['no message'])[-1]}")
    return json.loads(done.stdout.splitlines()[-1])
