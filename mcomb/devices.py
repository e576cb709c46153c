"""Using all devices, of all processes: meshes, replicated arrays, batches, and how much fits into memory."""

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mcomb.base import Array, UserError, all_equations, count_examples, require_whole
from mcomb.processes import from_first

AXIS = "mcomb_device"  # the name of the mesh's only axis, which is nobody else's
COMBINATIONS, IMAGES = "mcomb_combinations", "mcomb_images"  # the axes of the mesh of evaluation
BATCH = 200  # how many images a device takes at once, unless memory is too small
LEAST_IMAGES = 8  # fewer at once would hardly need less memory
MEMORY_VARIABLE = "MCOMB_MEMORY_GB"  # of the environment: how much memory to use


def device_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The one-dimensional mesh of some devices, by default of all."""
    return Mesh(np.array(jax.devices() if devices is None else devices), AXIS)


def two_axis_mesh(combinations: int) -> Mesh:
    """The mesh of all devices, shared out among combinations, and among images where these are fewer."""
    devices = np.array(jax.devices())
    return Mesh(devices.reshape(mesh_shape(combinations, devices.size)), (COMBINATIONS, IMAGES))


def mesh_shape(combinations: int, devices: int) -> tuple[int, int]:
    """How many combinations are evaluated side by side, and in how many parts the images of each.

    On eight devices, eight combinations or more have the shape (8, 1), three (2, 4), and one (1, 8).
    """
    rows = max(n for n in range(1, devices + 1) if devices % n == 0 and (n <= combinations or n == 1))
    return rows, devices // rows


def replicate(tree: Any, mesh: Mesh | None = None) -> Any:
    """The tree with every array replicated on a mesh, by default on all devices; what is there is not copied.

    Processes that share the mesh all have to call it, with the same values.
    """
    return share_out(tree, mesh or device_mesh(), PartitionSpec())


def share_out(tree: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    """The tree with every array on a mesh, divided as the spec says.

    The devices that a CPU is split into share what is replicated on them: there is one copy of it in memory.
    """
    sharding = NamedSharding(mesh, spec)
    if sharding.is_fully_addressable:
        in_memory = mesh.devices.flat[0].platform == "cpu"
        return jax.device_put(jax.tree.map(_as_numpy, tree) if in_memory else tree, sharding)

    def put(leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
            return jax.random.wrap_key_data(put(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
        array = np.asarray(leaf, jnp.result_type(leaf))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(put, tree)


def _as_numpy(leaf: Any) -> Any:
    """An array on one device of a CPU as NumPy's, in the same memory, which all devices can read; others as they are.

    An array of NumPy's own is copied first, unless nobody can write to it, as to what `jax.device_get` returns, and it
    begins at a multiple of 64 bytes: devices read nothing else.
    """
    if isinstance(leaf, jax.Array) and (len(leaf.devices()) > 1 or jnp.issubdtype(leaf.dtype, jax.dtypes.extended)):
        return leaf
    is_constant = isinstance(leaf, np.ndarray) and leaf.flags.c_contiguous and not leaf.flags.writeable
    if is_constant and leaf.ctypes.data % 64 == 0 and leaf.dtype == jnp.result_type(leaf):
        return leaf
    if isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    values = np.asarray(leaf, jnp.result_type(leaf))
    memory = np.empty(values.nbytes + 64, np.uint8)  # jnp.asarray would compile a program for each shape
    own = memory[-memory.ctypes.data % 64 :][: values.nbytes].view(values.dtype).reshape(values.shape)
    own[...] = values
    own.flags.writeable = False
    return own


def on_each_device(
    function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any, jaxpr: core.ClosedJaxpr
) -> Callable[..., Any]:
    """The function as `jax.shard_map` maps it, which must not be nested: `jaxpr` is what the function will call.

    If that has a `shard_map` inside, the function is called once for all devices: it keeps them busy by itself.
    """
    for eqn in all_equations(jaxpr):
        if eqn.primitive.name == "shard_map":
            own = eqn.params["mesh"]
            if isinstance(own, Mesh) and {*own.devices.flat} != {*mesh.devices.flat}:
                raise UserError(
                    f"the function has a shard_map over {own.size} of {mesh.size} devices: give it a mesh of all "
                    "devices, or let JAX see fewer of them"
                )
            for name in mesh.axis_names:
                function = jax.vmap(function, None, axis_name=name, axis_size=1)
            return lambda *args: jax.tree.map(lambda result: result[(0,) * len(mesh.axis_names)], function(*args))
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def meshes_of(size: int) -> list[Mesh]:
    """Meshes of `size` devices each that share none, as many as there are devices for."""
    devices = jax.devices()
    return [device_mesh(devices[i : i + size]) for i in range(0, len(devices) - size + 1, size)]


def use_a_device_per_core(at_most: int = 8) -> None:
    """Splits the CPU into devices, one for each core, unless JAX has started or their number is chosen already.

    Programs on several devices keep cores busier than one program does by splitting its operations. Each device holds
    copies of its own, so there are not more than a few: they share the cores that are left over.
    """
    by_config = jax.config.jax_num_cpu_devices > 0  # type: ignore[attr-defined]
    if not by_config and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        with contextlib.suppress(RuntimeError):  # JAX has started
            jax.config.update("jax_num_cpu_devices", min(cores, at_most))


def in_batches(batch_size: int, tree: Any) -> Any:
    """A tree of arrays of n rows, each reshaped into batches; the last batch is padded with zeros.

    in_batches(2, [x]) with x = [1, 2, 3] is [[[1, 2], [3, 0]]].
    """

    def reshape(x: Array) -> Array:
        count = -(-len(x) // batch_size)  # said, for of rows without entries it could not be found
        pad = count * batch_size - len(x)
        return jnp.pad(x, ((0, pad), *((0, 0),) * (x.ndim - 1))).reshape(count, batch_size, *x.shape[1:])

    return jax.tree.map(reshape, tree)


def equal_batches(tree: Any, batch_size: int) -> Any:
    """A tree of arrays of n rows, each reshaped into equal batches of at most that many; a few rows are left out.

    equal_batches(x, 2) with x = [1, 2, 3] is [[1], [2]], and with batch_size=3 it is [[1, 2, 3]].
    """
    require_whole(batch_size=batch_size)
    examples = count_examples(tree)
    count = -(-examples // batch_size)
    size = examples // count
    return jax.tree.map(lambda x: jnp.asarray(x)[: count * size].reshape(count, size, *x.shape[1:]), tree)


class Sizes(NamedTuple):
    """How many combinations and how many images of each a device takes at once."""

    combinations: int
    images: int

    def __str__(self) -> str:
        many = f"{self.combinations} combinations" if self.combinations > 1 else "one combination"
        return f"{many} on {self.images} images at once"

    def smaller(self, part: float = 0.5) -> "Sizes":
        """Fewer combinations, at most this part of them; then, of one combination, half of the images."""
        if self.combinations > 1:
            return self._replace(combinations=max(1, int(self.combinations * min(part, 0.5))))
        return self._replace(images=-(-self.images // 2)) if self.images > LEAST_IMAGES else self


def compile_to_fit(lower: Callable[[Sizes], jax.stages.Lowered], sizes: Sizes) -> tuple[Sizes, jax.stages.Compiled]:
    """A compiled program that fits into the devices' free memory by its own account, and its sizes, at most those."""
    free = from_first(free_memory)
    while True:
        try:
            program = lower(sizes).compile()
        except jax.errors.JaxRuntimeError as error:  # some compilers refuse what does not fit
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
    """Whether memory was too small for a program."""
    return "RESOURCE_EXHAUSTED" in str(error)


def free_memory() -> float:
    """Return the bytes that each local device may still take; infinite where nobody knows.

    That is four fifths of the free memory, of which the devices of a CPU share the host's. The environment variable
    MCOMB_MEMORY_GB sets it instead: gigabytes for each accelerator, or for all devices of a CPU together.
    """
    devices = jax.local_devices()
    on_cpu = devices[0].platform == "cpu"
    if chosen := os.environ.get(MEMORY_VARIABLE):
        try:
            free = 1e9 * float(chosen)
        except ValueError:
            raise UserError(f"{MEMORY_VARIABLE}={chosen} is not a number: give gigabytes, such as 16") from None
    elif on_cpu:
        free = 0.8 * min(_free_on_host(), _left_by_cgroups())
    else:
        stats = devices[0].memory_stats() or {}
        free = 0.8 * (stats["bytes_limit"] - stats["bytes_in_use"]) if "bytes_limit" in stats else math.inf
    return free / len(devices) if on_cpu else free


def _free_on_host() -> float:
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024.0 * int(lines["MemAvailable"].split()[0])
    except OSError:  # not on Linux: all there is
        known = hasattr(os, "sysconf") and {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= os.sysconf_names.keys()
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) if known else math.inf


def _left_by_cgroups(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """Return what the limits of this process's container leave, counting file caches, which the kernel drops, as free.

    A limit may be set for any of the groups around this process. A container often sees its own as the root.
    """
    left = math.inf
    try:
        groups = [line.split(":", 2)[1:] for line in proc.read_text().splitlines()]
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
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                taken = int((folder / used).read_text()) - int(stat[cached])
                left = min(left, float(int((folder / limit).read_text()) - taken))
    return max(left, 0.0)


def matrix_rate(mesh: Mesh, size: int = 4096) -> float:
    """Return how many floating-point operations a second the products of large matrices reach on a mesh.

    One device of a CPU uses all cores of its host.
    """
    matrix, seconds = jax.device_put(jnp.ones((size, size)), mesh.local_devices[0]), []
    multiply = jax.jit(jnp.matmul)
    for _ in range(3):  # the first one compiles
        start = time.monotonic()
        multiply(matrix, matrix).block_until_ready()
        seconds.append(time.monotonic() - start)
    alike = mesh.size // (len(mesh.local_devices) if jax.default_backend() == "cpu" else 1)
    return alike * 2 * size**3 / min(seconds)


def describe_devices(mesh: Mesh | None = None) -> str:
    """The number and kind of a mesh's devices, by default of all, such as `2 × cpu`."""
    devices = (mesh or device_mesh()).devices
    return f"{len(devices)} × {devices[0].device_kind}"
