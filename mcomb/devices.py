"""Using all devices, of all processes: a mesh, replicated arrays, batches, and how much fits into memory."""

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mcomb.base import Apply, Array, Inputs, Params, UserError, all_equations

AXIS = "device"  # the name of the mesh's only axis
BATCH = 200  # the default batch size of evaluation, small enough for the paper's widest networks


def device_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The one-dimensional mesh of some devices, by default of all."""
    return Mesh(np.array(jax.devices() if devices is None else devices), AXIS)


def replicate(tree: Any, mesh: Mesh | None = None) -> Any:
    """The tree with every array replicated on a mesh, by default on all devices; what is there is not copied.

    Processes that share the mesh all have to call it, with the same values.
    """
    return share_out(tree, mesh or device_mesh(), PartitionSpec())


def share_out(tree: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    """The tree with every array on a mesh, divided as the spec says."""
    sharding = NamedSharding(mesh, spec)
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def put(leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
            return jax.random.wrap_key_data(put(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
        array = np.asarray(leaf, jnp.result_type(leaf))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(put, tree)


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
            once = jax.vmap(function, None, axis_name=AXIS, axis_size=1)
            return lambda *args: jax.tree.map(lambda result: result[0], once(*args))
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
        pad = -len(x) % batch_size
        return jnp.pad(x, ((0, pad), *((0, 0),) * (x.ndim - 1))).reshape(-1, batch_size, *x.shape[1:])

    return jax.tree.map(reshape, tree)


def choose_vmap_size(apply: Apply, params: Params, inputs: Inputs) -> int:
    """How many combinations a device should evaluate in one `vmap`: one on CPU, else as many as fit into its memory.

    On CPU, XLA turns a convolution that is mapped over its kernels into a grouped one, which is slow.
    """
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if not stats or "bytes_limit" not in stats:
        return 1
    free = stats["bytes_limit"] - stats["bytes_in_use"]
    return max(1, int(0.8 * free) // footprint(apply, params, inputs))


def footprint(apply: Apply, params: Params, inputs: Inputs) -> int:
    """An estimate of the bytes that one combination needs: weights, coefficients, and twice its largest operation."""
    size = lambda avals: sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)  # noqa: E731
    jaxpr = jax.make_jaxpr(apply)(params, inputs).jaxpr
    largest = max(size([var.aval for var in (*eqn.invars, *eqn.outvars)]) for eqn in jaxpr.eqns)
    return 2 * size(jax.tree.leaves(params)) + 2 * largest


def describe_devices(mesh: Mesh | None = None) -> str:
    """The number and kind of a mesh's devices, by default of all, such as `2 × cpu`."""
    devices = (mesh or device_mesh()).devices
    return f"{len(devices)} × {devices[0].device_kind}"
