import errno
import gc
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.serialization import msgpack_serialize
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import safe_open
from safetensors.numpy import save_file

from mcomb import read_checkpoint, write_checkpoint
from mcomb.errors import UserError
from mcomb.io import checkpoints as checkpoint
from mcomb.io.fingerprints import fingerprint
from mcomb.trees import named_leaves

ROOT = Path(__file__).parents[2]
PARAMS = {"dense": {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3)}}


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_checkpoint_round_trip(tmp_path):
    write_checkpoint(tmp_path / "net", PARAMS)
    assert_same(read_checkpoint(tmp_path / "net"), PARAMS)
    assert_same(read_checkpoint(str(tmp_path / "net"), PARAMS), PARAMS)


def test_checkpoint_reads_plain_orbax_folders(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "train-state", {"params": PARAMS, "step": jnp.array(3)})
    with ocp.CheckpointManager(tmp_path / "manager") as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave(jax.tree.map(lambda x, step=step: x * step, PARAMS)))
    assert_same(read_checkpoint(tmp_path / "train-state", PARAMS), PARAMS)
    assert_same(read_checkpoint(tmp_path / "manager"), jax.tree.map(lambda x: x * 2, PARAMS))
    assert_same(read_checkpoint(tmp_path / "manager" / "1"), PARAMS)


WRITTEN = {"dense": {"kernel": np.arange(6).reshape(2, 3), "bias": np.ones(3)}, "steps": [7]}


@pytest.mark.parametrize("name", ["v0-0.11.24", "v1-0.12.8"])
def test_checkpoint_reads_folders_of_other_versions(name):
    """Folders that this library wrote with orbax 0.11.24, and that orbax's V1 API wrote."""
    assert_same(read_checkpoint(Path(__file__).parent / "orbax" / name), WRITTEN)


def test_checkpoint_of_several_devices_is_read_by_one(tmp_path):
    mesh = Mesh(np.array(jax.devices()), "d")
    values = jnp.arange(4.0 * mesh.size)
    write_checkpoint(tmp_path / "net", jax.device_put({"k": values}, NamedSharding(mesh, PartitionSpec("d"))))
    code = (
        "import jax, mcomb\n"
        "assert jax.device_count() == 1\n"
        f"print(mcomb.read_checkpoint({str(tmp_path / 'net')!r})['k'].tolist())"
    )
    env = {"JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, env=env)
    assert done.stdout.strip() == str(values.tolist())


@pytest.mark.parametrize(
    ("error", "kind", "number"),
    [
        (OSError(errno.EMFILE, "Too many open files"), OSError, errno.EMFILE),
        (OSError(errno.EIO, "Input/output error"), OSError, errno.EIO),
        (PermissionError(errno.EACCES, "Permission denied"), OSError, errno.EACCES),
        (ValueError("RESOURCE_EXHAUSTED: Failed to open [OS error 24: EMFILE Too many open files]"), OSError, 24),
        (ValueError("PERMISSION_DENIED: Error reading local file [os_error_code='13']"), OSError, 13),
        (ValueError("RESOURCE_EXHAUSTED: out of memory while trying to allocate 9 bytes"), ValueError, None),
        (MemoryError(), MemoryError, None),
    ],
)
def test_checkpoint_system_errors_are_not_damage(error, kind, number, tmp_path, monkeypatch):
    def fail(*args):
        raise error

    write_checkpoint(tmp_path / "net", PARAMS)
    monkeypatch.setattr(checkpoint, "restore_tree", fail)
    with pytest.raises(kind) as found:
        read_checkpoint(tmp_path / "net")
    assert getattr(found.value, "errno", None) == number


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "No such file"), ValueError("DATA_LOSS: ...")])
def test_checkpoint_missing_or_broken_part_is_damage(error, tmp_path, monkeypatch):
    def fail(*args):
        raise error

    write_checkpoint(tmp_path / "net", PARAMS)
    monkeypatch.setattr(checkpoint, "restore_tree", fail)
    with pytest.raises(UserError, match=r"Cannot read checkpoint .*net .*: replace it, or move it away"):
        read_checkpoint(tmp_path / "net")


def test_checkpoint_of_other_width_names_leaf(tmp_path):
    write_checkpoint(tmp_path / "net", PARAMS)
    wide = {"dense": {"kernel": jnp.zeros((2, 6)), "bias": jnp.ones(6)}}
    both = r"net has dense/bias of shape \(3,\) where the model has \(6,\), has dense/kernel of shape \(2, 3\) where"
    with pytest.raises(UserError, match=both):
        read_checkpoint(tmp_path / "net", wide)
    with pytest.raises(UserError, match="has no other/scale"):
        read_checkpoint(tmp_path / "net", PARAMS | {"other": {"scale": jnp.ones(2)}})
    with pytest.raises(UserError, match="has dense/bias, which the model does not"):
        read_checkpoint(tmp_path / "net", {"dense": {"kernel": jnp.zeros((2, 3))}})


def test_checkpoint_rejects_unknown_ending(tmp_path):
    (tmp_path / "net.safetensor").write_bytes(b"x")
    with pytest.raises(UserError, match=r"not an orbax checkpoint, and does not end in \.safetensors, \.npz or \.msg"):
        read_checkpoint(tmp_path / "net.safetensor")


@pytest.mark.parametrize("ending", ["safetensors", "npz", "msgpack"])
def test_checkpoint_names_missing_folder(tmp_path, ending):
    with pytest.raises(UserError, match=r"there is no folder .*nowhere: create it first"):
        write_checkpoint(tmp_path / "nowhere" / f"net.{ending}", PARAMS)


def test_checkpoint_names_folder_without_checkpoint(tmp_path):
    with pytest.raises(UserError, match="is not an orbax checkpoint"):
        read_checkpoint(tmp_path / "nowhere")


# Orbax leaves coroutines of the failed read behind, whose complaints are not ours to mend.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_checkpoint_names_truncated_folder(tmp_path):
    big = {"kernel": jnp.asarray(np.random.default_rng(0).normal(size=(300, 300)).astype(np.float32))}
    write_checkpoint(tmp_path / "net", big)
    files = [path for path in Path(tmp_path / "net").rglob("*") if path.is_file() and path.stat().st_size > 10_000]
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[:5_000])
    with pytest.raises(UserError, match=r"Cannot read checkpoint .*: replace it, or move it away"):
        read_checkpoint(tmp_path / "net")


LEAF = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize(
    "leaf",
    [
        LEAF,
        np.asfortranarray(LEAF),
        LEAF.T,
        LEAF[:, ::2],
        np.broadcast_to(np.float32(1), (2, 3)),
        jnp.asarray(LEAF),
        jnp.asarray(LEAF, jnp.bfloat16),
        LEAF.astype(np.int32),
        np.float32(2.5),
        np.zeros((0, 3), np.float32),
    ],
    ids=["plain", "fortran", "transposed", "strided", "broadcast", "jax", "bfloat16", "integer", "scalar", "empty"],
)
def test_safetensors_keeps_values_of_any_memory_layout(leaf, tmp_path):
    tree = {"dense": {"kernel": leaf, "bias": np.ones(3, np.float32)}}
    write_checkpoint(tmp_path / "net.safetensors", tree)
    for found in (read_checkpoint(tmp_path / "net.safetensors"), read_checkpoint(tmp_path / "net.safetensors", tree)):
        assert_same(found, tree)
        assert found["dense"]["kernel"].dtype == leaf.dtype
    assert [path.name for path in tmp_path.iterdir()] == ["net.safetensors"]


def test_safetensors_keeps_metadata(tmp_path):
    write_checkpoint(tmp_path / "net.safetensors", PARAMS, metadata={"seed": "3"})
    with safe_open(tmp_path / "net.safetensors", "numpy") as file:
        assert file.metadata() == {"seed": "3", "fingerprint": fingerprint(named_leaves(PARAMS))}
        assert set(file.keys()) == {"dense/kernel", "dense/bias"}


def test_safetensors_of_same_network_is_same_file(tmp_path):
    """The order of metadata does not matter."""
    about = {f"key {i}": "x" * i for i in range(8)}
    contents = set()
    for i in range(4):
        write_checkpoint(tmp_path / f"{i}.safetensors", PARAMS, metadata=about)
        contents.add((tmp_path / f"{i}.safetensors").read_bytes())
    assert len(contents) == 1
    with safe_open(tmp_path / "0.safetensors", "numpy") as file:
        assert file.metadata().items() > about.items()


def test_safetensors_detects_wrong_byte(tmp_path):
    path = tmp_path / "net.safetensors"
    write_checkpoint(path, PARAMS)
    whole, refused = path.read_bytes(), 0
    for at in range(0, len(whole), 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        try:
            found = read_checkpoint(path)
        except UserError:
            refused += 1
        else:
            assert_same(found, PARAMS)
    assert refused > 0.9 * len(whole) / 3


# Orbax leaves coroutines of the failed read behind, whose complaints are not ours to mend.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_checkpoint_detects_wrong_weight_in_orbax_folder(tmp_path):
    write_checkpoint(tmp_path / "net", PARAMS)
    files = [path for path in (tmp_path / "net").rglob("d/*") if path.is_file()]
    refused = 0
    for path in files:
        whole = path.read_bytes()
        for at in range(5, len(whole), 1 + len(whole) // 4):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
            try:
                assert_same(read_checkpoint(tmp_path / "net"), PARAMS)
            except UserError:
                refused += 1
        path.write_bytes(whole)
    assert refused
    assert_same(read_checkpoint(tmp_path / "net"), PARAMS)
    gc.collect()


def test_safetensors_reads_foreign_files_into_target(tmp_path):
    leaves = {f"params/{name}": np.asarray(leaf, np.float16) for name, leaf in named_leaves(PARAMS).items()}
    save_file(leaves, tmp_path / "net.safetensors")
    found = read_checkpoint(tmp_path / "net.safetensors", PARAMS)
    assert_same(found, PARAMS)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("float32")}
    listed = [PARAMS["dense"]["kernel"], {"bias": PARAMS["dense"]["bias"]}]
    write_checkpoint(tmp_path / "list.safetensors", listed)
    assert_same(read_checkpoint(tmp_path / "list.safetensors", listed), listed)


def test_safetensors_names_single_leaf(tmp_path):
    (tmp_path / "net.msgpack").write_bytes(msgpack_serialize(np.ones(2)))
    with pytest.raises(UserError, match="has a leaf without a name, which the model does not, has no w:"):
        read_checkpoint(tmp_path / "net.msgpack", {"w": jnp.ones(2)})


def test_checkpoint_rejects_other_kind_of_number(tmp_path):
    write_checkpoint(tmp_path / "net.safetensors", jax.tree.map(lambda leaf: leaf.astype(jnp.int32), PARAMS))
    with pytest.raises(UserError, match="has dense/bias of dtype int32 where the model has float32"):
        read_checkpoint(tmp_path / "net.safetensors", PARAMS)


@pytest.mark.parametrize("size", [0, 5, 50, -1])
def test_safetensors_names_truncated_file(size, tmp_path):
    path = tmp_path / "net.safetensors"
    write_checkpoint(path, PARAMS)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UserError, match=r"Cannot read .*net\.safetensors .*: replace it, or move it away"):
        read_checkpoint(path)


def test_safetensors_names_missing_file(tmp_path):
    with pytest.raises(UserError, match=r"There is no file .*net\.safetensors: check the path"):
        read_checkpoint(tmp_path / "net.safetensors")


@pytest.mark.parametrize("above", ["a", "a/b"])
def test_checkpoint_rejects_name_that_is_also_a_branch(above, tmp_path):
    save_file({above: np.zeros(2), "a/b/c": np.zeros(2), "a0": np.zeros(2)}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=rf"x\.safetensors has a/b/c and a weight {above} above it"):
        read_checkpoint(tmp_path / "x.safetensors")


@pytest.mark.parametrize("leaf", [jnp.ones(3, jnp.bfloat16), jnp.ones(3, jnp.float8_e4m3fn)])
def test_checkpoint_unsupported_dtype_keeps_old_file(leaf, tmp_path):
    write_checkpoint(tmp_path / "net.npz", PARAMS)
    with pytest.raises(UserError, match=r"net\.npz.* w of dtype .*float.*: use \.safetensors"):
        write_checkpoint(tmp_path / "net.npz", {"w": leaf})
    assert_same(read_checkpoint(tmp_path / "net.npz"), PARAMS)


@pytest.mark.parametrize("ending", ["", ".npz", ".safetensors", ".msgpack"])
@pytest.mark.parametrize("leaf", [np.array([{}, None]), np.array(["text"]), np.zeros(2, "V4"), np.zeros(2, "M8[s]")])
def test_checkpoint_rejects_writing_non_numeric_arrays(leaf, ending, tmp_path):
    with pytest.raises(UserError, match=r"w has the dtype .*, which is not numeric: leave it out"):
        write_checkpoint(tmp_path / f"net{ending}", {"w": leaf})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("leaf", [np.array(["text"]), np.zeros(2, "V4"), np.zeros(2, "M8[s]"), np.zeros(2, "i4,f4")])
def test_checkpoint_rejects_reading_non_numeric_arrays(leaf, tmp_path):
    np.savez(tmp_path / "net.npz", w=leaf)
    with pytest.raises(UserError, match=r"Cannot use checkpoint .*net\.npz: w has the dtype .*, which is not numeric"):
        read_checkpoint(tmp_path / "net.npz")


def test_checkpoint_reads_plain_numbers_as_arrays(tmp_path):
    (tmp_path / "net.msgpack").write_bytes(msgpack_serialize({"w": 0.5, "count": 3}))
    found = read_checkpoint(tmp_path / "net.msgpack")
    assert {name: (leaf.shape, leaf.tolist()) for name, leaf in found.items()} == {"w": ((), 0.5), "count": ((), 3)}
    target = {"w": jnp.zeros(()), "count": np.zeros((), int)}
    assert_same(read_checkpoint(tmp_path / "net.msgpack", target), {"w": 0.5, "count": 3})


@pytest.mark.parametrize("ending", ["", ".npz", ".safetensors", ".msgpack"])
def test_checkpoint_target_number_implies_no_dtype(ending, tmp_path):
    path = tmp_path / f"net{ending}"
    write_checkpoint(path, {"w": np.float16(1.5), "count": 3})
    found = read_checkpoint(path, {"w": 0.5, "count": 1})
    assert (found["w"].dtype, found["w"].tolist(), found["count"].tolist()) == (np.float16, 1.5, 3)
    with pytest.raises(UserError, match=r"has count of dtype int\d+ where the model has float64:"):
        read_checkpoint(path, {"w": 0.5, "count": 0.5})
    write_checkpoint(path.with_stem("wide"), {"w": np.ones(2)})
    with pytest.raises(UserError, match=r"has w of shape \(2,\) where the model has \(\):"):
        read_checkpoint(path.with_stem("wide"), {"w": 0.5})


@pytest.mark.parametrize("leaf", [0.5, np.float32(0.5), np.ones(2, np.float32), jnp.ones(2)], ids=repr)
@pytest.mark.parametrize("ending", ["", ".npz", ".safetensors", ".msgpack"])
def test_checkpoint_round_trip_of_single_leaf(leaf, ending, tmp_path):
    write_checkpoint(tmp_path / f"net{ending}", leaf)
    np.testing.assert_array_equal(read_checkpoint(tmp_path / f"net{ending}", leaf), leaf)


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({}, "the tree has no leaves"),
        ([], "the tree has no leaves"),
        (None, "the tree has no leaves"),
        ({"w": np.ones((0, 2))}, "w has no entries"),
        (np.ones(0), "its only leaf has no entries"),
    ],
    ids=str,
)
def test_checkpoint_rejects_trees_that_orbax_cannot_store(tree, problem, tmp_path):
    with pytest.raises(UserError, match=rf"Cannot write .*net, because {problem} and orbax .*: use \.safetensors"):
        write_checkpoint(tmp_path / "net", tree)
    assert not [*tmp_path.iterdir()]


def test_checkpoint_reads_folder_with_numeric_name(tmp_path):
    write_checkpoint(tmp_path / "net" / "3" / "params", PARAMS)
    (tmp_path / "net" / "²").mkdir()
    assert_same(read_checkpoint(tmp_path / "net"), PARAMS)


def test_checkpoint_takes_any_leaf_name(tmp_path):
    tree = {"allow_pickle": np.ones(2), "file": {"a b": np.zeros(1), "kwds": np.arange(3)}}
    write_checkpoint(tmp_path / "net.npz", tree)
    assert_same(read_checkpoint(tmp_path / "net.npz"), tree)
