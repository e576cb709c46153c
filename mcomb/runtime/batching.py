"""Split examples and combinations into batches that fit into memory."""

import contextlib
import ctypes
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mcomb.errors import UserError, require_whole
from mcomb.runtime.processes import from_first
from mcomb.trees import Array, count_examples

BATCH = 200  # default number of examples that a device processes at once
LEAST_EXAMPLES = 8  # smaller batches would hardly need less memory
MEMORY_VARIABLE = "MCOMB_MEMORY_GB"  # environment variable that sets the memory to use


def in_batches(batch_size: int, tree: Any) -> Any:
    """Reshape each array of a tree into batches of rows, and pad the last batch with zeros.

    in_batches(2, [x]) with x = [1, 2, 3] is [[[1, 2], [3, 0]]].
    """

    def reshape(x: Array) -> Array:
        count = -(-len(x) // batch_size)  # explicit, because `-1` cannot be inferred for empty rows
        pad = count * batch_size - len(x)
        return jnp.pad(x, ((0, pad), *((0, 0),) * (x.ndim - 1))).reshape(count, batch_size, *x.shape[1:])

    return jax.tree.map(reshape, tree)


def equal_batches(tree: Any, batch_size: int) -> Any:
    """Reshape each array of a tree into equal batches of at most `batch_size` rows, and drop the few rows left over.

    equal_batches(x, 2) with x = [1, 2, 3] is [[1], [2]], and with batch_size=3 it is [[1, 2, 3]].
    """
    require_whole(batch_size=batch_size)
    examples = count_examples(tree)
    count = -(-examples // batch_size)
    size = examples // count
    return jax.tree.map(lambda x: jnp.asarray(x)[: count * size].reshape(count, size, *x.shape[1:]), tree)


class Sizes(NamedTuple):
    """Number of combinations, and of examples for each, that a device processes at once."""

    combinations: int
    examples: int

    def __str__(self) -> str:
        many = f"{self.combinations} combinations" if self.combinations > 1 else "one combination"
        return f"{many} on {self.examples} examples at once"

    def smaller(self, part: float = 0.5) -> "Sizes":
        """Reduce the combinations to at most this fraction; if there is only one, halve the examples."""
        if self.combinations > 1:
            return self._replace(combinations=max(1, int(self.combinations * min(part, 0.5))))
        return self._replace(examples=-(-self.examples // 2)) if self.examples > LEAST_EXAMPLES else self


def compile_to_fit(lower: Callable[[Sizes], jax.stages.Lowered], sizes: Sizes) -> tuple[Sizes, jax.stages.Compiled]:
    """Compile a program at the largest sizes whose estimated memory fits the devices; return both."""
    free = from_first(free_memory)
    while True:
        try:
            program = lower(sizes).compile()
        except jax.errors.JaxRuntimeError as error:  # some compilers reject programs that do not fit
            if not is_out_of_memory(error) or sizes.smaller() == sizes:
                raise
            sizes = sizes.smaller()
            continue
        analysis = program.memory_analysis()
        needed = analysis.temp_size_in_bytes + analysis.output_size_in_bytes if analysis else 0
        if needed <= free or sizes.smaller() == sizes:
            return sizes, program
        sizes = sizes.smaller(free / needed)


def is_out_of_memory(error: jax.errors.JaxRuntimeError) -> bool:
    """Return whether a program failed because it needed too much memory."""
    return "RESOURCE_EXHAUSTED" in str(error)


def free_memory() -> float:
    """Return the number of bytes that each local device may still use; infinity if unknown.

    This is four fifths of the free memory. The devices of a CPU share the host's memory. The environment variable
    MCOMB_MEMORY_GB overrides it, in gigabytes for each accelerator or for all devices of a CPU together.
    """
    devices = jax.local_devices()
    on_cpu = devices[0].platform == "cpu"
    if chosen := os.environ.get(MEMORY_VARIABLE):
        try:
            free = 1e9 * float(chosen)
        except ValueError:
            raise UserError(f"{MEMORY_VARIABLE}={chosen} is not a number: set it to gigabytes, such as 16.") from None
    elif on_cpu:
        free = 0.8 * min(_free_on_host(), _left_by_cgroups())
    else:
        stats = devices[0].memory_stats() or {}
        free = 0.8 * (stats["bytes_limit"] - stats["bytes_in_use"]) if "bytes_limit" in stats else math.inf
    return free / len(devices) if on_cpu else free


def _free_on_host() -> float:
    if sys.platform == "win32":
        status = (ctypes.c_uint64 * 8)(64)  # MEMORYSTATUSEX: its own size, then total and available memory
        is_known = ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
        return float(status[2]) if is_known else math.inf
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
        return 1024.0 * int(lines["MemAvailable"].split()[0])
    except OSError:  # macOS: use the total memory
        known = hasattr(os, "sysconf") and {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= os.sysconf_names.keys()
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) if known else math.inf


def _left_by_cgroups(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the bytes left by the memory limits of this process's control groups.

    Any group around this process may set a limit. A container often sees its own group as the root. File caches count
    as free, because the kernel drops them.
    """
    left = math.inf
    try:
        groups = [line.split(":", 2)[1:] for line in proc.read_text(encoding="utf-8").splitlines()]
    except OSError:  # not on Linux
        return left
    for kinds, path in groups:
        names = {"": ("memory.max", "memory.current", "inactive_file")}
        names["memory"] = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if kinds not in names:
            continue
        limit, used, cached = names[kinds]
        own = Path(path.lstrip("/"))
        for folder in (root / kinds / group for group in (own, *own.parents)):
            with contextlib.suppress(OSError, ValueError, KeyError):  # no such group, or a limit of "max"
                read = lambda name, folder=folder: (folder / name).read_text(encoding="utf-8")  # noqa: E731
                stat = dict(line.split() for line in read("memory.stat").splitlines())
                left = min(left, float(int(read(limit)) - int(read(used)) + int(stat[cached])))
    return max(left, 0.0)
