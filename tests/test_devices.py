import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_equal

from mcomb.devices import (
    choose_vmap_size,
    describe_devices,
    device_mesh,
    footprint,
    in_batches,
    meshes_of,
    replicate,
    use_a_device_per_core,
)


def apply(params, x):
    return jnp.tanh(x @ params["w1"]) @ params["w2"]


PARAMS = {"w1": np.ones((5, 80), np.float32), "w2": np.ones((80, 4), np.float32)}
INPUTS = np.ones((100, 5), np.float32)


def test_the_mesh_has_all_devices():
    assert device_mesh().devices.tolist() == jax.devices()


def test_replicated_arrays_are_on_every_device_and_not_copied_again():
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


def test_batches_have_all_rows_in_order_and_zeros_after_them():
    x, y = np.arange(1, 11).reshape(5, 2), np.arange(1, 6)
    batched_x, batched_y = in_batches(3, [x, y])
    assert batched_y.tolist() == [[1, 2, 3], [4, 5, 0]]
    assert_equal(batched_x.reshape(6, 2), np.concatenate([x, [[0, 0]]]))
    assert in_batches(5, y).tolist() == [[1, 2, 3, 4, 5]]


def test_the_footprint_is_that_of_weights_coefficients_and_the_largest_operation():
    # The largest operation is tanh or a product with its result: 100 × 80 numbers in and at least 100 × 4 out.
    weights, hidden, logits, inputs = 4 * (5 * 80 + 80 * 4), 4 * 100 * 80, 4 * 100 * 4, 4 * 100 * 5
    largest = max(2 * hidden, inputs + 4 * 5 * 80 + hidden, hidden + 4 * 80 * 4 + logits)
    assert footprint(apply, PARAMS, INPUTS) == 2 * weights + 2 * largest


def test_on_cpu_one_combination_is_evaluated_at_a_time():
    assert choose_vmap_size(apply, PARAMS, INPUTS) == 1


class Accelerator:
    """A device that knows how much memory it has."""

    platform = "gpu"

    def __init__(self, **stats):
        self.stats = stats

    def memory_stats(self):
        return self.stats


@pytest.mark.parametrize(("times", "expected"), [(0.5, 1), (12.6, 10), (12.4, 9)])
def test_elsewhere_as_many_as_fit_into_four_fifths_of_the_free_memory(times, expected, monkeypatch):
    free = int(times * footprint(apply, PARAMS, INPUTS))
    device = Accelerator(bytes_limit=1000 + free, bytes_in_use=1000)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert choose_vmap_size(apply, PARAMS, INPUTS) == expected


def test_a_device_that_does_not_tell_its_memory_gets_one_at_a_time(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [Accelerator()])
    assert choose_vmap_size(apply, PARAMS, INPUTS) == 1


@pytest.mark.parametrize("chosen", ["", "3"])
def test_a_cpu_is_a_device_for_each_core_unless_a_number_is_chosen(chosen):
    program = "from mcomb.devices import *; use_a_device_per_core(); print(describe_devices())"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | ({"JAX_NUM_CPU_DEVICES": chosen} if chosen else {})
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout == f"{chosen or min(8, len(os.sched_getaffinity(0)))} × cpu\n"


def test_devices_stay_as_they_are_once_they_are_in_use():
    before = jax.local_devices()
    use_a_device_per_core(at_most=1)
    assert jax.local_devices() == before


def test_meshes_share_no_device():
    devices = jax.local_devices()
    for size in range(1, len(devices) + 1):
        meshes = meshes_of(size)
        used = [device for mesh in meshes for device in mesh.devices.tolist()]
        assert len(meshes) == len(devices) // size
        assert len({*used}) == len(used) == size * len(meshes)
        assert describe_devices(meshes[0]) == f"{size} × cpu"
