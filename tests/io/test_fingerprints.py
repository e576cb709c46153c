"""Fingerprints depend on every value and on nothing else."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcomb.io.fingerprints import fingerprint

ROOT = Path(__file__).parents[2]


TREE = {"x": np.arange(4, dtype=np.float32), "y": {"z": np.ones(2, np.float32)}}


@pytest.mark.parametrize(
    "other",
    [
        {"x": TREE["x"], "y": {"z": np.zeros(2, np.float32)}},
        {"x": TREE["x"], "y": {"u": TREE["y"]["z"]}},
        {"x": TREE["x"], "z": TREE["y"]["z"]},
        {"x": TREE["x"]},
        {"x": TREE["x"].reshape(2, 2), "y": TREE["y"]},
        {"x": TREE["x"].reshape(4, 1), "y": TREE["y"]},
        {"x": TREE["x"].view(np.int32), "y": TREE["y"]},
        {"x": TREE["x"].astype(np.float64), "y": TREE["y"]},
        {"x": TREE["x"].astype(ml_dtypes.bfloat16), "y": TREE["y"]},
        {"x": TREE["x"][::-1], "y": TREE["y"]},
        {"x": TREE["y"]["z"], "y": {"z": TREE["x"]}},
    ],
    ids=["value", "name", "place", "missing", "shape", "rank", "dtype", "width", "kind", "order", "exchanged"],
)
def test_fingerprint_differs_for_different_trees(other):
    assert fingerprint(other) != fingerprint(TREE)


LEAVES = {
    "float32": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
    "bfloat16": np.linspace(-1, 1, 6, dtype=np.float32).astype(ml_dtypes.bfloat16),
    "integer": np.arange(-3, 3, dtype=np.int32),
    "byte": np.arange(6, dtype=np.uint8),
    "boolean": np.array([True, False, True, True, False, False]),
    "scalar": np.float32(2.5),
    "empty": np.zeros((0, 3), np.float32),
}


@pytest.mark.parametrize("kind", LEAVES)
def test_fingerprint_of_numpy_equals_jax(kind):
    leaf = LEAVES[kind]
    assert fingerprint({"x": jnp.asarray(leaf)}) == fingerprint({"x": leaf}) == fingerprint({"x": np.array(leaf)})


@settings(deadline=None)
@given(kind=st.sampled_from([name for name in LEAVES if name != "empty"]), data=st.data())
def test_fingerprint_changes_with_any_bit(kind, data):
    leaf = np.ascontiguousarray(LEAVES[kind])
    changed = leaf.copy()
    raw = changed.reshape(-1).view(np.uint8)
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= 1 if kind == "boolean" else 1 << data.draw(st.integers(0, 7))
    assert fingerprint({"x": changed}) != fingerprint({"x": leaf})


def test_fingerprint_ignores_memory_layout():
    leaf = LEAVES["float32"]
    assert fingerprint(np.asfortranarray(leaf)) == fingerprint(leaf)
    assert fingerprint(np.repeat(leaf, 2, axis=1)[:, ::2]) == fingerprint(leaf)


def test_fingerprint_of_random_keys_is_by_value():
    first, again, other = (fingerprint({"key": jax.random.key(seed)}) for seed in (0, 0, 1))
    assert first == again != other
    assert fingerprint({"key": jax.random.split(jax.random.key(0))}) != first


def test_fingerprint_of_scalars_is_by_value_and_type():
    assert len({fingerprint(value) for value in (0, 1, 1.0, 2.5, True, False)}) == 6
    assert fingerprint(2.5) == fingerprint(np.float64(2.5)) != fingerprint([2.5])
