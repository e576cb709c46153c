"""Parameter trees read and written: orbax folders, and safetensors, NumPy and Flax msgpack files."""

import errno
import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from zipfile import ZipFile

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from numpy.lib.format import write_array
from safetensors import safe_open
from safetensors.numpy import save

from mcomb.errors import UserError, first_words
from mcomb.io.fingerprints import fingerprint
from mcomb.io.paths import AnyPath, absolute, as_path, atomic, in_store, readable, require_folder
from mcomb.io.pytorch_names import Table, to_ours
from mcomb.runtime.interrupts import raise_again
from mcomb.trees import Params, named_leaves

T = TypeVar("T")
SAFETENSORS, NUMPY, MSGPACK = ".safetensors", ".npz", ".msgpack"
FILES = (SAFETENSORS, NUMPY, MSGPACK)
ENDINGS = f"{SAFETENSORS}, {NUMPY} and {MSGPACK}"
FINGERPRINT = "fingerprint"  # its name in the metadata of a checkpoint
WIDE = ("float64", "complex128", "int64", "uint64")


def write_checkpoint(path: str | os.PathLike[str], params: Params, metadata: Mapping[str, str] | None = None) -> None:
    """Writes a parameter tree, atomically, in the format of the path's ending; without one, to an orbax folder.

    `.safetensors` files and orbax folders hold the tree's fingerprint, by which damage is found when it is read; `.npz`
    and `.msgpack` files do not. Only a `.safetensors` file holds metadata.
    """
    path = as_path(path)
    leaves = named_leaves(params)
    if path.suffix in FILES:
        require_folder(path)
    else:
        _require_entries(path, leaves)
    if path.suffix == NUMPY:
        _require_own_dtypes(path, leaves)
    try:
        if path.suffix == SAFETENSORS:
            arrays = {name: np.asarray(leaf, order="C") for name, leaf in leaves.items()}
            content = save(arrays, {**(metadata or {}), FINGERPRINT: fingerprint(arrays)})
            with atomic(path) as temporary:
                temporary.write_bytes(_in_order(content))
        elif path.suffix == NUMPY:
            with atomic(path) as temporary, ZipFile(temporary, "w") as archive:
                for name, leaf in leaves.items():  # np.savez takes some names for arguments of its own
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                        write_array(file, np.asarray(leaf), allow_pickle=False)
        elif path.suffix == MSGPACK:
            from flax.serialization import to_bytes  # Flax is for those who use it

            with atomic(path) as temporary:
                temporary.write_bytes(to_bytes(jax.tree.map(np.asarray, params)))
        else:
            import orbax.checkpoint as ocp  # it takes half a second, for those who use it

            tree = np.asarray(params) if "" in leaves else params  # of single leaves, it only takes NumPy's arrays
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(absolute(path), tree, custom_metadata=fingerprint_entry(params))
    except Exception as error:
        raise UserError(f"checkpoint {path} cannot be written ({first_words(error)}): mend that") from error


def _require_own_dtypes(path: AnyPath, leaves: Mapping[str, Any]) -> None:
    """An error that names the first leaf of a dtype that is none of NumPy's own: its format has no name for it."""
    for name, leaf in leaves.items():
        dtype = getattr(leaf, "dtype", None)
        if isinstance(dtype, np.dtype) and dtype.isbuiltin != 1:
            problem = f"cannot be written, for it would hold {name} of dtype {dtype}, which NumPy's format has not"
            raise UserError(f"{path} {problem}: give a name that ends in {SAFETENSORS}, or one of an orbax folder")


def _require_entries(path: AnyPath, leaves: Mapping[str, Any]) -> None:
    """An error that says what an orbax folder cannot hold: orbax itself would, but leave a thread that goes on."""
    without = [name or "its only leaf" for name, leaf in leaves.items() if 0 in np.shape(leaf)]
    if without or not leaves:
        problem = f"{without[0]} has no entries" if without else "the tree has no leaves"
        raise UserError(
            f"{path} cannot be written, for {problem}, and orbax takes no such: give a name in {SAFETENSORS}"
        )


def _in_order(content: bytes) -> bytes:
    """A safetensors file whose metadata are sorted, so that the same network is the same file."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that arrays are aligned
    return len(text).to_bytes(8, "little") + text + content[start:]


def fingerprint_entry(params: Params) -> dict[str, str]:
    """The fingerprint that an orbax folder's metadata hold; none of 64-bit numbers, which JAX may read as 32-bit."""
    leaves = named_leaves(params)
    wide = any(str(getattr(leaf, "dtype", "float64")) in WIDE for leaf in leaves.values())
    return {} if wide else {FINGERPRINT: fingerprint(leaves)}


def read_checkpoint(path: str | os.PathLike[str], target: Params | None = None, names: Table | None = None) -> Params:
    """The parameters in a file of a known ending, or in an orbax folder: a saved tree, or a training run's newest.

    Of a tree with a `params` entry, that entry; with Flax's `batch_stats` beside it, these two. With a table of
    `names`, weights have other names and layouts in the file, and the result those that the table says. With `target`,
    a tree of arrays or shapes, the result has its structure and dtypes, and a difference is an error that names the
    leaf.
    """
    path = as_path(path)
    if path.suffix in FILES:
        tree = _read_file(path)
    else:
        tree_folder = _find_tree(path)
        tree = reading(path, lambda: _restore_whole(tree_folder))
    tree = _as_arrays(path, tree)
    if isinstance(tree, dict) and "params" in tree:
        has_statistics = "batch_stats" in tree
        tree = {name: tree[name] for name in ("params", "batch_stats")} if has_statistics else tree["params"]
    if names is not None:
        tree = _as_tree(path, to_ours(names, {name: np.asarray(leaf) for name, leaf in named_leaves(tree).items()}))
    return tree if target is None else fit_tree(f"checkpoint {path}", tree, target)


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the metadata of a `.safetensors` file without the fingerprint; other formats have none."""
    path = as_path(path)
    if path.suffix != SAFETENSORS:
        return {}

    def read() -> dict[str, str]:
        with readable(path) as here, safe_open(here, "numpy") as file:
            return file.metadata() or {}

    return {name: value for name, value in reading(path, read).items() if name != FINGERPRINT}


def fit_tree(
    what: str,
    tree: Params,
    target: Params,
    whose: str = "the model",
    remedy: str = "give one of the same setup and width",
) -> Params:
    """The tree in the structure and dtypes of `target`, which is that of `whose`; a difference is an error.

    A plain number in the target says nothing of the dtype.
    """
    found, wanted = named_leaves(tree), named_leaves(target)
    dtypes = {name: _dtype(leaf, found[name]) for name, leaf in wanted.items() if name in found}
    problems = []
    for name in sorted(found.keys() | wanted.keys()):
        called = name or "a leaf without a name"
        if name not in found:
            problems.append(f"has no {name or 'leaf without a name'}")
        elif name not in wanted:
            problems.append(f"has {called}, which {whose} does not")
        elif (shape := found[name].shape) != np.shape(wanted[name]):
            problems.append(f"has {called} of shape {shape} where {whose} has {np.shape(wanted[name])}")
        elif not _casts(dtype := found[name].dtype, dtypes[name]):
            problems.append(f"has {called} of dtype {dtype} where {whose} has {dtypes[name]}")
    if problems:
        more = f", and {len(problems) - 3} more such" if len(problems) > 3 else ""
        raise UserError(f"{what} {', '.join(problems[:3])}{more}: {remedy}")
    leaves = [
        found[name] if found[name].dtype == dtype else jnp.asarray(found[name], dtype) for name, dtype in dtypes.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(target), leaves)


def _dtype(leaf: Any, found: Any) -> Any:
    """The dtype of a leaf of the target; of a plain number, that of what was found in its place if it can hold it."""
    return leaf.dtype if hasattr(leaf, "dtype") else np.result_type(found.dtype, leaf)


def _casts(dtype: Any, to: Any) -> bool:
    """Whether weights may change to another dtype as they are read: the same, or from float to float."""
    return dtype == to or all(jax.dtypes.issubdtype(one, np.floating) for one in (dtype, to))


def _read_file(path: AnyPath) -> Params:
    """The tree of a file."""
    if not path.is_file():
        raise UserError(f"there is no file {path}: give one that is there")
    if path.suffix == MSGPACK:
        from flax.serialization import msgpack_restore

        return reading(path, lambda: msgpack_restore(path.read_bytes()))
    read = _read_leaves if path.suffix == SAFETENSORS else _read_arrays
    return _as_tree(path, reading(path, lambda: read(path)))


def _read_arrays(path: AnyPath) -> dict[str, np.ndarray]:
    with readable(path) as here, np.load(here, allow_pickle=False) as file:
        return dict(file)


def _as_arrays(path: AnyPath, tree: Params) -> Params:
    """The tree with its plain numbers as arrays; an error that names the file if there is anything else in it."""
    try:
        named_leaves(tree)
    except UserError as error:
        raise UserError(f"checkpoint {path} cannot be used: {error}") from error
    return jax.tree.map(lambda leaf: leaf if hasattr(leaf, "shape") else np.asarray(leaf), tree)


def _as_tree(path: AnyPath, leaves: Mapping[str, Any]) -> Params:
    """The tree whose leaves have these names, such as `conv1/kernel`."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *modules, last = name.split("/")
        inner = tree
        for depth, module in enumerate(modules, 1):
            if (above := "/".join(modules[:depth])) in leaves:
                raise UserError(f"checkpoint {path} has {name} and a weight {above} above it: mend its names")
            inner = inner.setdefault(module, {})
        inner[last] = leaf
    return tree


def _read_leaves(path: AnyPath) -> dict[str, np.ndarray]:
    with readable(path) as here, safe_open(here, "numpy") as file:
        leaves = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        _require_whole(file.metadata() or {}, leaves)
    return leaves


def _restore_whole(folder: AnyPath) -> Any:
    """The tree of an orbax folder that is what was written, as far as its metadata tell."""
    tree = restore_tree(folder)
    for place in (folder, folder.parent):
        if (path := place / "_CHECKPOINT_METADATA").is_file():
            _require_whole(json.loads(path.read_text()).get("custom_metadata") or {}, named_leaves(tree))
            break
    return tree


def _require_whole(metadata: Mapping[str, str], leaves: Mapping[str, Any]) -> None:
    if FINGERPRINT in metadata and metadata[FINGERPRINT] != fingerprint(leaves):
        raise ValueError("its weights are not those that were written")


def saved_steps(folder: AnyPath) -> list[int]:
    """The steps that a folder of an orbax manager holds, in ascending order."""
    steps = [path for path in folder.glob("*") if path.name.isdecimal()]
    if in_store(folder):  # where a checkpoint has its name from the start, and a mark at its end
        steps = [path for path in steps if (path / "commit_success.txt").is_file()]
    return sorted(int(path.name) for path in steps)


def restore_tree(folder: AnyPath, target: Any = None) -> Any:
    """The stored tree on this process's first device, wherever and on however many it was written."""
    import orbax.checkpoint as ocp  # it takes half a second, for those who use it

    folder = absolute(folder)
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    me = jax.process_index()  # waits for no other process
    alone = ocp.options.MultiprocessingOptions(me, {me}, f"process-{me}") if jax.process_count() > 1 else None
    with ocp.Checkpointer(
        ocp.StandardCheckpointHandler(), multiprocessing_options=alone or ocp.options.MultiprocessingOptions()
    ) as checkpointer:
        stored = ocp.StandardCheckpointHandler().metadata(epath.Path(folder)).tree if target is None else target
        shapes = jax.tree.map(lambda leaf: _restored_as(leaf, here), stored)
        return checkpointer.restore(folder, args=ocp.args.StandardRestore(shapes))


def _restored_as(leaf: Any, sharding: jax.sharding.Sharding) -> Any:
    """What orbax takes the kind of a leaf from: of integers that JAX would cut to 32 bits, a NumPy array."""
    if jnp.issubdtype(leaf.dtype, np.integer) and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def reading(folder: AnyPath, read: Callable[[], T]) -> T:
    """What `read` returns; whatever goes wrong in it is a checkpoint that cannot be read.

    But for what the machine lacks, such as descriptors, memory or rights: that says nothing of the checkpoint.
    """
    try:
        return read()
    except Exception as error:
        raise_again()  # an interrupt says nothing of the checkpoint, either
        if number := system_error(error):
            raise OSError(number, os.strerror(number), str(folder)) from error
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise
        raise UserError(
            f"checkpoint {folder} cannot be read ({first_words(error)}): replace it, or move it away"
        ) from error


def system_error(error: Exception) -> int | None:
    """The number of the system's error behind another, such as one of tensorstore; None for that of a missing file."""
    said = re.search(r"os[ _]error(?:_code)?\W+(\d+)", str(error), re.IGNORECASE)
    number = error.errno if isinstance(error, OSError) else int(said[1]) if said else None
    return None if number in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR) else number


def _find_tree(folder: AnyPath) -> AnyPath:
    """The folder of the tree itself inside what a person calls a checkpoint."""
    for place in (folder, *(folder / str(step) for step in reversed(saved_steps(folder)))):
        for item in (place, place / "params", place / "default"):
            if (item / "_METADATA").is_file():
                return item
    if folder.is_dir():
        raise UserError(f"{folder} is no orbax checkpoint: give the folder that holds one")
    raise UserError(f"{folder} is no orbax checkpoint, and ends in none of {ENDINGS}: give a folder or a file that is")
