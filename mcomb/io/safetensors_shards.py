"""Read and write the tensors of safetensors files one at a time, for networks larger than memory.

A network is one file, or several files (shards) with an index, as Hugging Face writes them.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from mcomb.errors import UserError, first_words

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
STORED_DTYPES: Mapping[str, Any] = {
    **{"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "C64": np.complex64},
    **{"I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "BOOL": np.bool_},
    **{"U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8},
}
LONGEST_HEADER = 100_000_000  # bytes, the limit of the format


class StoredTensor(NamedTuple):
    """The place of a tensor in a file."""

    path: Path
    start: int  # in bytes, from the start of the file
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def read(self) -> np.ndarray:
        """Return the tensor, mapped to memory: pages are read when they are used, and leave memory with the array."""
        count = math.prod(self.shape)
        if not count:
            return np.zeros(self.shape, self.dtype)
        data = np.memmap(self.path, np.uint8, "r", self.start, (count * self.dtype.itemsize,))
        return data.view(np.ndarray).view(self.dtype).reshape(self.shape)


class Shard(NamedTuple):
    """A safetensors file: its tensors in the order of their data, and its metadata."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]


def list_shards(folder: Path) -> list[Shard]:
    """Return the safetensors files of a Hugging Face folder; empty if it has none."""
    if not (folder / INDEX).is_file():
        return [read_header(folder / SINGLE)] if (folder / SINGLE).is_file() else []
    try:
        names = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = sorted({str(name) for name in names.values()})
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{folder / INDEX} is damaged ({first_words(error)}): download it again.") from error
    for name in files:
        if Path(name).name != name or not (folder / name).is_file():
            raise UserError(f"{folder} lacks the file {name:.80}, which its index names: download it again.")
    shards = [read_header(folder / name) for name in files]
    found = {name for shard in shards for name in shard.tensors}
    if missing := [name for name in names if name not in found]:
        raise UserError(f"{folder} lacks {missing[0]}, which its index names: download it again.")
    return shards


def read_header(path: Path) -> Shard:
    """Return the tensors of a safetensors file without reading their data."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        metadata = header.pop("__metadata__", {})
        start, size = 8 + length, path.stat().st_size
        tensors = {name: _locate(path, start, size, **entry) for name, entry in header.items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{path} is not a safetensors file ({first_words(error)}): download it again.") from error
    in_order = sorted(tensors.items(), key=lambda item: item[1].start)
    return Shard(path, dict(in_order), metadata)


def _locate(
    path: Path, start: int, size: int, *, dtype: str, shape: list[int], data_offsets: list[int]
) -> StoredTensor:
    """Return the place of a tensor, given its entry in the header."""
    if dtype not in STORED_DTYPES:
        raise UserError(f"{path} has tensors of dtype {dtype}: convert them to a float dtype first.")
    found = StoredTensor(path, start + data_offsets[0], np.dtype(STORED_DTYPES[dtype]), tuple(shape))
    length = math.prod(found.shape) * found.dtype.itemsize
    if data_offsets[1] - data_offsets[0] != length or not start <= found.start <= size - length:
        raise ValueError("its data end too early")
    return found


def write_shard(path: Path, like: Shard, compute: Callable[[str], np.ndarray]) -> None:
    """Write a file with the names, shapes, dtypes and metadata of another, computing one tensor at a time."""
    names = {np.dtype(dtype): name for name, dtype in STORED_DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": dict(like.metadata)} if like.metadata else {}
    place = 0
    for name, tensor in like.tensors.items():
        end = place + math.prod(tensor.shape) * tensor.dtype.itemsize
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # to align the data
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in like.tensors.items():
            array = np.asarray(compute(name), order="C")
            assert (array.shape, array.dtype) == (tensor.shape, tensor.dtype), name
            if array.size:
                file.write(array.reshape(-1).view(np.uint8).data)
