"""Tensors in safetensors files are read and written one at a time."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mcomb.errors import UserError
from mcomb.io.safetensors_shards import INDEX, SINGLE, list_shards, read_header, write_shard


def tensors():
    rng = np.random.default_rng(0)
    found = {f"w{i}": rng.normal(size=(i + 1, 3)).astype(dtype) for i, dtype in enumerate(("f4", "f2", "f8", "c8"))}
    found["half"] = rng.normal(size=(5, 2)).astype(ml_dtypes.bfloat16)
    return found | {"count": np.array(7), "mask": np.array([True, False]), "empty": np.zeros((0, 4), np.float32)}


def test_shard_reads_every_dtype_and_writes_the_same_file(tmp_path):
    save_file(tensors(), tmp_path / "a.safetensors", {"format": "pt"})
    shard = read_header(tmp_path / "a.safetensors")
    for name, tensor in tensors().items():
        found = shard.tensors[name].read()
        assert found.dtype == tensor.dtype, name
        np.testing.assert_array_equal(found, tensor)
    order = []
    write_shard(tmp_path / "b.safetensors", shard, lambda name: order.append(name) or shard.tensors[name].read())
    assert order == list(shard.tensors)
    assert load_file(tmp_path / "b.safetensors").keys() == tensors().keys()
    for name, tensor in load_file(tmp_path / "b.safetensors").items():
        np.testing.assert_array_equal(tensor, tensors()[name])
    assert (tmp_path / "b.safetensors").stat().st_size == (tmp_path / "a.safetensors").stat().st_size
    assert read_header(tmp_path / "b.safetensors").metadata == {"format": "pt"}


def test_shards_of_a_folder_are_those_of_its_index(tmp_path):
    assert list_shards(tmp_path) == []
    save_file({"a": np.ones(3)}, tmp_path / "one.safetensors")
    save_file({"b": np.ones(2)}, tmp_path / "two.safetensors")
    save_file({"old": np.ones(2)}, tmp_path / SINGLE)
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert [list(shard.tensors) for shard in list_shards(tmp_path)] == [["a"], ["b"]]


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ('{"weight_map": {"a": "one.safetensors", "c": "one.safetensors"}}', "lacks c, which its index names"),
        ('{"weight_map": {"a": "gone.safetensors"}}', r"lacks the file gone\.safetensors"),
        ('{"weight_map": {"a": "../outside.safetensors"}}', "lacks the file"),
        ("{", "is damaged"),
        ("[]", "is damaged"),
    ],
)
def test_shards_of_a_wrong_index_are_named(tmp_path, index, words):
    folder = tmp_path / "folder"
    folder.mkdir()
    for place in (folder / "one.safetensors", tmp_path / "outside.safetensors"):
        save_file({"a": np.ones(3)}, place)
    (folder / INDEX).write_text(index)
    with pytest.raises(UserError, match=words):
        list_shards(folder)


def test_shards_name_damaged_files(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": np.ones(30)}, path)
    content = path.read_bytes()
    for damaged in (b"", b"\xff" * 20, content[:-8], content[:20], b"\x02" + bytes(7) + b"[]"):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="is not a safetensors file"):
            read_header(path)
