import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_equal

from mcomb.errors import UserError
from mcomb.runtime import batching
from mcomb.runtime.batching import Sizes, _left_by_cgroups, compile_to_fit, free_memory, in_batches
from mcomb.runtime.devices import (
    describe_devices,
    device_mesh,
    mesh_shape,
    meshes_of,
    replicate,
    two_axis_mesh,
    use_a_device_per_core,
)


def test_device_mesh_has_all_devices():
    assert device_mesh().devices.tolist() == jax.devices()


def test_replicate_copies_to_every_device_once():
    tree = {"x": np.arange(3), "y": jnp.ones(2)}
    replicated = replicate(tree)
    assert_equal(replicated, tree)
    for name, leaf in replicated.items():
        assert leaf.sharding.is_fully_replicated
        assert leaf.devices() == set(jax.devices())
        again = replicate(replicated)[name]
        assert [s.data.unsafe_buffer_pointer() for s in again.addressable_shards] == [
            s.data.unsafe_buffer_pointer() for s in leaf.addressable_shards
        ]


@pytest.mark.parametrize("tree", [jnp.arange(1000.0), np.arange(1001.0, dtype=np.float32)[1:]])
def test_replicate_shares_one_copy_on_cpu(tree):
    places = {shard.data.unsafe_buffer_pointer() for shard in replicate(tree).addressable_shards}
    assert len(places) == 1
    if isinstance(tree, jax.Array):
        assert places == {tree.unsafe_buffer_pointer()}
        (shard, *_) = replicate(jax.device_get(tree)).addressable_shards
        assert shard.data.unsafe_buffer_pointer() == tree.unsafe_buffer_pointer()


def test_replicate_copies_writable_arrays():
    own = np.array(jnp.arange(1000.0))
    replicated = replicate(own)
    own[:] = -1
    assert_equal(replicated, jnp.arange(1000.0))


def test_in_batches_keeps_order_and_pads_with_zeros():
    x, y = np.arange(1, 11).reshape(5, 2), np.arange(1, 6)
    batched_x, batched_y = in_batches(3, [x, y])
    assert batched_y.tolist() == [[1, 2, 3], [4, 5, 0]]
    assert_equal(batched_x.reshape(6, 2), np.concatenate([x, [[0, 0]]]))
    assert in_batches(5, y).tolist() == [[1, 2, 3, 4, 5]]
    assert in_batches(3, np.zeros((5, 0, 2))).shape == (2, 3, 0, 2)


@jax.jit
def grow(x):
    """Return the trace of xᵀx, which takes the memory of that matrix."""
    return jnp.sort(x[:, :, None] * x[:, None, :], axis=1).sum()


def lower(sizes):
    return grow.lower(jax.ShapeDtypeStruct((sizes.combinations, sizes.examples), jnp.float32))


def needed(sizes):
    analysis = lower(sizes).compile().memory_analysis()
    return analysis.temp_size_in_bytes + analysis.output_size_in_bytes


@pytest.mark.parametrize("sizes", [Sizes(64, 40), Sizes(1, 400)])
def test_compile_to_fit_chooses_largest_size_in_memory(sizes, monkeypatch):
    assert compile_to_fit(lower, sizes)[0] == sizes
    for part in (1, 0.5, 0.1, 0):
        free = part * needed(sizes)
        monkeypatch.setattr(batching, "free_memory", lambda free=free: free)
        found, program = compile_to_fit(lower, sizes)
        if part:
            assert needed(found) <= free < needed(Sizes(*(4 * size for size in found)))
        else:
            assert found == Sizes(1, 5 if sizes.examples == 40 else 7)
        assert np.isfinite(program(np.ones(found, np.float32)))


def test_compile_to_fit_shrinks_if_compiler_fails():
    def refuse(sizes):
        if sizes.combinations > 3:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: this is too much")
        return lower(sizes)

    assert compile_to_fit(refuse, Sizes(10, 40))[0] == (2, 40)

    def fail(sizes):
        raise jax.errors.JaxRuntimeError("INTERNAL: this is a bug")

    with pytest.raises(jax.errors.JaxRuntimeError, match="bug"):
        compile_to_fit(fail, Sizes(10, 40))


class Accelerator:
    """Stands for a device that may report its memory."""

    platform = "gpu"

    def __init__(self, **stats):
        self.stats = stats

    def memory_stats(self):
        return self.stats


def test_free_memory_follows_environment(monkeypatch):
    monkeypatch.setenv("MCOMB_MEMORY_GB", "1.5")
    assert free_memory() == 1.5e9 / len(jax.local_devices())
    monkeypatch.setattr(jax, "local_devices", lambda: [Accelerator(bytes_limit=1500, bytes_in_use=500)] * 2)
    assert free_memory() == 1.5e9
    monkeypatch.setenv("MCOMB_MEMORY_GB", "much")
    with pytest.raises(UserError, match="MCOMB_MEMORY_GB=much is not a number"):
        free_memory()


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/pod/job", "", ("memory.max", "memory.current", "inactive_file")),
        ("4:memory:/pod/job", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ],
    ids=["v2", "v1"],
)
def test_free_memory_respects_cgroup_limits(line, folder, names, tmp_path):
    """The parent group has the lower limit; the root has none."""
    groups = tmp_path / "proc"
    groups.write_text(f"1:cpu:/\n{line}\n")
    assert _left_by_cgroups(groups, tmp_path) == np.inf
    for group, limit, used, cached in (("pod", "1000", 400, 100), ("pod/job", "900", 150, 50), ("", "max", 9, 0)):
        place = tmp_path / folder / group
        place.mkdir(parents=True, exist_ok=True)
        for name, text in zip(names, (limit, str(used), ""), strict=True):
            (place / name).write_text(text)
        (place / "memory.stat").write_text(f"anon 7\n{names[2]} {cached}\n")
    assert _left_by_cgroups(groups, tmp_path) == 1000 - (400 - 100)


def test_free_memory_is_four_fifths_of_available(monkeypatch):
    has_total = hasattr(os, "sysconf")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if has_total else np.inf
    assert 0 < free_memory() < total / len(jax.local_devices())
    monkeypatch.setattr(jax, "local_devices", lambda: [Accelerator(bytes_limit=1500, bytes_in_use=500)])
    assert free_memory() == 800
    monkeypatch.setattr(jax, "local_devices", lambda: [Accelerator()])
    assert free_memory() == np.inf


@pytest.mark.parametrize(
    ("devices", "shapes"),
    [(8, {100: (8, 1), 8: (8, 1), 7: (4, 2), 3: (2, 4), 1: (1, 8)}), (3, {5: (3, 1), 2: (1, 3)}), (1, {4: (1, 1)})],
)
def test_two_axis_mesh_shares_images_on_idle_devices(devices, shapes):
    assert {k: mesh_shape(k, devices) for k in shapes} == shapes
    assert two_axis_mesh(1).devices.tolist() == [jax.devices()]


@pytest.mark.parametrize("chosen", ["", pytest.param("3", marks=pytest.mark.slow)])
def test_use_a_device_per_core_unless_number_is_set(chosen):
    program = "from mcomb.runtime.devices import *; use_a_device_per_core(); print(describe_devices())"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | ({"JAX_NUM_CPU_DEVICES": chosen} if chosen else {})
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert found.stdout == f"{chosen or min(8, cores)} × cpu\n"


def test_use_a_device_per_core_keeps_devices_in_use():
    before = jax.local_devices()
    use_a_device_per_core(at_most=1)
    assert jax.local_devices() == before


def test_meshes_of_size_share_no_device():
    devices = jax.local_devices()
    for size in range(1, len(devices) + 1):
        meshes = meshes_of(size)
        used = [device for mesh in meshes for device in mesh.devices.tolist()]
        assert len(meshes) == len(devices) // size
        assert len({*used}) == len(used) == size * len(meshes)
        assert describe_devices(meshes[0]) == f"{size} × cpu"
