import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mcomb import read_checkpoint, write_checkpoint
from mcomb.base import UserError

ROOT = Path(__file__).parent.parent
PARAMS = {"dense": {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3)}}


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_tree_comes_back_as_it_was_written(tmp_path):
    write_checkpoint(tmp_path / "net", PARAMS)
    assert_same(read_checkpoint(tmp_path / "net"), PARAMS)
    assert_same(read_checkpoint(str(tmp_path / "net"), PARAMS), PARAMS)


def test_other_peoples_orbax_folders_are_read(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "train-state", {"params": PARAMS, "step": jnp.array(3)})
    with ocp.CheckpointManager(tmp_path / "manager") as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave(jax.tree.map(lambda x, step=step: x * step, PARAMS)))
    assert_same(read_checkpoint(tmp_path / "train-state", PARAMS), PARAMS)
    assert_same(read_checkpoint(tmp_path / "manager"), jax.tree.map(lambda x: x * 2, PARAMS))
    assert_same(read_checkpoint(tmp_path / "manager" / "1"), PARAMS)


def test_what_several_devices_wrote_one_device_reads(tmp_path):
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


def test_another_width_is_an_error_that_names_the_leaf(tmp_path):
    write_checkpoint(tmp_path / "net", PARAMS)
    wide = {"dense": {"kernel": jnp.zeros((2, 6)), "bias": jnp.ones(6)}}
    with pytest.raises(UserError, match=r"net has dense/bias of shape \(3,\) where the model has \(6,\)"):
        read_checkpoint(tmp_path / "net", wide)
    with pytest.raises(UserError, match="has no other/scale"):
        read_checkpoint(tmp_path / "net", PARAMS | {"other": {"scale": jnp.ones(2)}})
    with pytest.raises(UserError, match="has dense/bias, which the model does not"):
        read_checkpoint(tmp_path / "net", {"dense": {"kernel": jnp.zeros((2, 3))}})


def test_a_folder_without_a_checkpoint_is_a_clear_error(tmp_path):
    with pytest.raises(UserError, match="is no orbax checkpoint"):
        read_checkpoint(tmp_path / "nowhere")


# Orbax leaves coroutines of the failed read behind, whose complaints are not ours to mend.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_a_truncated_checkpoint_is_a_clear_error(tmp_path):
    big = {"kernel": jnp.asarray(np.random.default_rng(0).normal(size=(300, 300)).astype(np.float32))}
    write_checkpoint(tmp_path / "net", big)
    files = [path for path in Path(tmp_path / "net").rglob("*") if path.is_file() and path.stat().st_size > 10_000]
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[:5_000])
    with pytest.raises(UserError, match=r"cannot be read .*: replace it, or move it away"):
        read_checkpoint(tmp_path / "net")
