"""Create device meshes, and replicate and shard arrays on them."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mcomb.errors import UserError
from mcomb.symmetry.jaxpr_walk import all_equations

AXIS = "mcomb_device"  # the only axis of the mesh; the prefix avoids clashes with the user's axes
COMBINATIONS, EXAMPLES = "mcomb_combinations", "mcomb_examples"  # the axes of the mesh for evaluation


def device_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a one-dimensional mesh of some devices, by default of all."""
    return Mesh(np.array(jax.devices() if devices is None else devices), AXIS)


def two_axis_mesh(combinations: int) -> Mesh:
    """Return the mesh of all devices that splits combinations, and examples if there are too few combinations."""
    devices = np.array(jax.devices())
    return Mesh(devices.reshape(mesh_shape(combinations, devices.size)), (COMBINATIONS, EXAMPLES))


def mesh_shape(combinations: int, devices: int) -> tuple[int, int]:
    """Return the number of combinations to evaluate side by side, and the number of parts to split the examples into.

    With eight devices, the shape is (8, 1) for eight or more combinations, (2, 4) for three and (1, 8) for one.
    """
    rows = max(n for n in range(1, devices + 1) if devices % n == 0 and (n <= combinations or n == 1))
    return rows, devices // rows


def replicate(tree: Any, mesh: Mesh | None = None) -> Any:
    """Replicate every array of a tree on a mesh, by default on all devices, without copying arrays already there.

    All processes that share the mesh must call it, with the same values.
    """
    return share_out(tree, mesh or device_mesh(), PartitionSpec())


def share_out(tree: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    """Put every array of a tree on a mesh, sharded by the spec.

    The virtual devices of a CPU share one copy of replicated arrays.
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
    """Return an array on one CPU device as a NumPy array in the same memory; return other JAX arrays unchanged.

    NumPy arrays are copied unless they are read-only and start at a multiple of 64 bytes, because CPU devices can only
    share such memory. Results of `jax.device_get` are read-only.
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
    """Map a function with `jax.shard_map`, unless the `jaxpr` that it calls contains a `shard_map`.

    `shard_map` cannot be nested. Such a function is therefore called once, and uses all devices by itself.
    """
    for eqn in all_equations(jaxpr):
        if eqn.primitive.name == "shard_map":
            own = eqn.params["mesh"]
            if isinstance(own, Mesh) and {*own.devices.flat} != {*mesh.devices.flat}:
                raise UserError(
                    f"The function has a shard_map over {own.size} of {mesh.size} devices: use a mesh of all devices, "
                    "or make fewer devices visible to JAX."
                )
            for name in mesh.axis_names:
                function = jax.vmap(function, None, axis_name=name, axis_size=1)
            return lambda *args: jax.tree.map(lambda result: result[(0,) * len(mesh.axis_names)], function(*args))
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def meshes_of(size: int) -> list[Mesh]:
    """Return as many disjoint meshes of `size` devices as possible."""
    devices = jax.devices()
    return [device_mesh(devices[i : i + size]) for i in range(0, len(devices) - size + 1, size)]


def use_a_device_per_core(at_most: int = 8) -> None:
    """Split the CPU into one device for each core, unless JAX has started or the user has set the number.

    Programs on several devices use the cores better than one program that splits its operations. The number is
    limited, because each device holds its own copies. The devices share the remaining cores.
    """
    by_config = jax.config.jax_num_cpu_devices > 0  # type: ignore[attr-defined]
    if not by_config and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        with contextlib.suppress(RuntimeError):  # JAX has started
            jax.config.update("jax_num_cpu_devices", min(cores, at_most))


def matrix_rate(mesh: Mesh, size: int = 4096) -> float:
    """Measure the floating-point operations per second of large matrix products on a mesh.

    One device of a CPU uses all cores of its host.
    """
    matrix, seconds = jax.device_put(jnp.ones((size, size)), mesh.local_devices[0]), []
    multiply = jax.jit(jnp.matmul)
    for _ in range(3):  # the first run compiles
        start = time.monotonic()
        multiply(matrix, matrix).block_until_ready()
        seconds.append(time.monotonic() - start)
    alike = mesh.size // (len(mesh.local_devices) if jax.default_backend() == "cpu" else 1)
    return alike * 2 * size**3 / min(seconds)


def describe_devices(mesh: Mesh | None = None) -> str:
    """Return the number and kind of a mesh's devices, by default of all, such as `2 × cpu`."""
    devices = (mesh or device_mesh()).devices
    return f"{len(devices)} × {devices[0].device_kind}"
