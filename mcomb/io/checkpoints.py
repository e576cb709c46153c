"""Read and write parameter trees: orbax folders, and safetensors, NumPy and Flax msgpack files."""

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
from mcomb.io.paths import AnyPath, absolute, as_path, atomic, in_store, read_text, readable, require_folder
from mcomb.io.pytorch_names import Table, to_ours
from mcomb.runtime.interrupts import raise_again
from mcomb.trees import Params, named_leaves

T = TypeVar("T")
SAFETENSORS, NUMPY, MSGPACK = ".safetensors", ".npz", ".msgpack"
FILES = (SAFETENSORS, NUMPY, MSGPACK)
FOREIGN = (".pt", ".pth", ".bin", ".pkl", ".h5")  # formats of other programs
ENDINGS = f"{SAFETENSORS}, {NUMPY} or {MSGPACK}"
FINGERPRINT = "fingerprint"  # key in the metadata of a checkpoint
ITEMS = ("params", "default", "state", "pytree")  # folders of trees; the last two are of orbax's V1 API
WIDE = ("float64", "complex128", "int64", "uint64")


def write_checkpoint(
    path: str | os.PathLike[str], params: Params, *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a parameter tree to a file or folder atomically.

    `.safetensors` files and orbax folders also store a fingerprint of the tree, so that reading detects damage.

    Args:
        path: The file to write. Its ending (`.safetensors`, `.npz`, `.msgpack`) chooses the format; a path without
            an ending becomes an orbax folder. Object stores such as `gs://bucket/network` work too.
        params: The parameters.
        metadata: Text entries to store. Only `.safetensors` files have them.

    Raises:
        UserError: The path cannot be written, or the format cannot store the tree.

    Examples:
        >>> mcomb.write_checkpoint("a.safetensors", a, metadata={"dataset": "digits"})
    """
    path = as_path(path)
    if path.suffix in FOREIGN:
        raise UserError(f"Cannot write {path}, because mcomb does not write {path.suffix} files: use {ENDINGS}.")
    if metadata and path.suffix != SAFETENSORS:
        raise UserError(f"Cannot store metadata in {path}: use {SAFETENSORS}, or drop the metadata.")
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
                for name, leaf in leaves.items():  # np.savez would take some names for its own arguments
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                        write_array(file, np.asarray(leaf), allow_pickle=False)
        elif path.suffix == MSGPACK:
            from flax.serialization import to_bytes  # not everybody needs Flax

            with atomic(path) as temporary:
                temporary.write_bytes(to_bytes(jax.tree.map(np.asarray, params)))
        else:
            import orbax.checkpoint as ocp  # importing it takes half a second

            # Before 0.12.8, orbax cannot store a single leaf. Reading takes the entry `params` out of the tree.
            tree = {"params": np.asarray(params)} if "" in leaves else params
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(absolute(path), tree, custom_metadata=fingerprint_entry(tree))
    except Exception as error:
        raise UserError(
            f"Cannot write checkpoint {path} ({first_words(error)}): fix the cause and try again."
        ) from error


def _require_own_dtypes(path: AnyPath, leaves: Mapping[str, Any]) -> None:
    """Raise an error that names the first leaf whose dtype NumPy's format cannot store."""
    for name, leaf in leaves.items():
        dtype = getattr(leaf, "dtype", None)
        if isinstance(dtype, np.dtype) and dtype.isbuiltin != 1:
            problem = f"NumPy's format cannot store {name} of dtype {dtype}"
            raise UserError(f"Cannot write {path}, because {problem}: use {SAFETENSORS} or an orbax folder.")


def _require_entries(path: AnyPath, leaves: Mapping[str, Any]) -> None:
    """Reject trees that orbax cannot store before it leaks a thread."""
    without = [name or "its only leaf" for name, leaf in leaves.items() if 0 in np.shape(leaf)]
    if without or not leaves:
        problem = f"{without[0]} has no entries" if without else "the tree has no leaves"
        raise UserError(f"Cannot write {path}, because {problem} and orbax cannot store that: use {SAFETENSORS}.")


def _in_order(content: bytes) -> bytes:
    """Sort the metadata of a safetensors file, so that equal networks give equal files."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # to align the arrays
    return len(text).to_bytes(8, "little") + text + content[start:]


def fingerprint_entry(params: Params) -> dict[str, str]:
    """Return the fingerprint for an orbax folder, except for 64-bit numbers, which JAX may read as 32-bit."""
    leaves = named_leaves(params)
    wide = any(str(getattr(leaf, "dtype", "float64")) in WIDE for leaf in leaves.values())
    return {} if wide else {FINGERPRINT: fingerprint(leaves)}


def read_checkpoint(
    path: str | os.PathLike[str], target: Params | None = None, *, names: Table | None = None
) -> Params:
    """Read the parameters in a file or folder.

    If the stored tree has an entry `params`, the result is that entry, or `params` and `batch_stats` if it has both.

    Args:
        path: A `.safetensors`, `.npz` or `.msgpack` file, or an orbax folder. In the folder of a training run, the
            newest checkpoint is read.
        target: A tree of arrays or shapes. The result gets its structure and dtypes.
        names: A table that maps the names and layouts of the weights in the file to those of the result.

    Returns:
        The parameters.

    Raises:
        UserError: The path is not a checkpoint, the checkpoint is damaged, or its leaves differ from `target`.

    Examples:
        >>> mcomb.write_checkpoint("a.safetensors", a)
        >>> params = mcomb.read_checkpoint("a.safetensors", target=a)
        >>> params["up"].shape
        (64, 128)
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
    return tree if target is None else fit_tree(f"Checkpoint {path}", tree, target)


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the metadata of a `.safetensors` file without the fingerprint; other formats have no metadata."""
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
    remedy: str = "use a checkpoint of the same setup and width",
) -> Params:
    """Return the tree in the structure and dtypes of `target`; raise an error that lists the differences.

    A Python number in the target accepts any dtype that can hold it. Error messages call the tree `what` and the target
    `whose`.
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
        more = f", and {len(problems) - 3} more differences" if len(problems) > 3 else ""
        raise UserError(f"{what} {', '.join(problems[:3])}{more}: {remedy}.")
    leaves = [
        found[name] if found[name].dtype == dtype else jnp.asarray(found[name], dtype) for name, dtype in dtypes.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(target), leaves)


def _dtype(leaf: Any, found: Any) -> Any:
    """Return the dtype of a target leaf; for a Python number, the found leaf's dtype, widened to hold the number."""
    return leaf.dtype if hasattr(leaf, "dtype") else np.result_type(found.dtype, leaf)


def _casts(dtype: Any, to: Any) -> bool:
    """Return whether weights may be read in another dtype: only floats may, as floats."""
    return dtype == to or all(jax.dtypes.issubdtype(one, np.floating) for one in (dtype, to))


def _read_file(path: AnyPath) -> Params:
    """Read the tree in a file."""
    if not path.is_file():
        raise UserError(f"There is no file {path}: check the path.")
    if path.suffix == MSGPACK:
        from flax.serialization import msgpack_restore

        return reading(path, lambda: msgpack_restore(path.read_bytes()))
    read = _read_leaves if path.suffix == SAFETENSORS else _read_arrays
    return _as_tree(path, reading(path, lambda: read(path)))


def _read_arrays(path: AnyPath) -> dict[str, np.ndarray]:
    with readable(path) as here, np.load(here, allow_pickle=False) as file:
        return dict(file)


def _as_arrays(path: AnyPath, tree: Params) -> Params:
    """Convert Python numbers to arrays; raise an error that names the file if a leaf is not numeric."""
    try:
        named_leaves(tree)
    except UserError as error:
        raise UserError(f"Cannot use checkpoint {path}: {error}") from error
    return jax.tree.map(lambda leaf: leaf if hasattr(leaf, "shape") else np.asarray(leaf), tree)


def _as_tree(path: AnyPath, leaves: Mapping[str, Any]) -> Params:
    """Build the tree whose leaves have these names, such as `conv1/kernel`."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *modules, last = name.split("/")
        inner = tree
        for depth, module in enumerate(modules, 1):
            if (above := "/".join(modules[:depth])) in leaves:
                raise UserError(f"Checkpoint {path} has {name} and a weight {above} above it: rename one of them.")
            inner = inner.setdefault(module, {})
        inner[last] = leaf
    return tree


def _read_leaves(path: AnyPath) -> dict[str, np.ndarray]:
    with readable(path) as here, safe_open(here, "numpy") as file:
        leaves = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        _require_whole(file.metadata() or {}, leaves)
    return leaves


def _restore_whole(folder: AnyPath) -> Any:
    """Restore the tree in an orbax folder, and check its fingerprint if there is one."""
    tree = restore_tree(folder)
    for place in (folder, folder.parent):
        if (path := place / "_CHECKPOINT_METADATA").is_file():
            _require_whole(json.loads(read_text(path)).get("custom_metadata") or {}, named_leaves(tree))
            break
    return tree


def _require_whole(metadata: Mapping[str, str], leaves: Mapping[str, Any]) -> None:
    if FINGERPRINT in metadata and metadata[FINGERPRINT] != fingerprint(leaves):
        raise ValueError("its weights do not match their fingerprint")


def saved_steps(folder: AnyPath) -> list[int]:
    """Return the steps in the folder of an orbax checkpoint manager, in ascending order."""
    steps = [path for path in folder.glob("*") if path.name.isdecimal()]
    if in_store(folder):  # orbax marks complete checkpoints there with a file instead of a rename
        steps = [path for path in steps if (path / "commit_success.txt").is_file()]
    return sorted(int(path.name) for path in steps)


def restore_tree(folder: AnyPath, target: Any = None) -> Any:
    """Restore a tree to this process's first device, whatever devices it was written from."""
    import orbax.checkpoint as ocp  # importing it takes half a second

    folder = absolute(folder)
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    me = jax.process_index()  # do not wait for other processes
    alone = ocp.options.MultiprocessingOptions(me, {me}, f"process-{me}") if jax.process_count() > 1 else None
    with ocp.Checkpointer(
        ocp.StandardCheckpointHandler(), multiprocessing_options=alone or ocp.options.MultiprocessingOptions()
    ) as checkpointer:
        stored = ocp.StandardCheckpointHandler().metadata(epath.Path(folder)).tree if target is None else target
        shapes = jax.tree.map(lambda leaf: _restored_as(leaf, here), stored)
        return checkpointer.restore(folder, args=ocp.args.StandardRestore(shapes))


def _restored_as(leaf: Any, sharding: jax.sharding.Sharding) -> Any:
    """Return the template of a leaf for orbax: a NumPy array for integers that JAX would truncate to 32 bits."""
    if jnp.issubdtype(leaf.dtype, np.integer) and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def reading(folder: AnyPath, read: Callable[[], T]) -> T:
    """Call `read` and report its errors as an unreadable checkpoint.

    Errors of the system, such as missing memory, file descriptors or permissions, do not concern the checkpoint and are
    raised unchanged.
    """
    try:
        return read()
    except Exception as error:
        raise_again()  # an interrupt does not concern the checkpoint either
        if number := system_error(error):
            raise OSError(number, os.strerror(number), str(folder)) from error
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise
        raise UserError(
            f"Cannot read checkpoint {folder} ({first_words(error)}): replace it, or move it away."
        ) from error


def system_error(error: Exception) -> int | None:
    """Return the errno behind an error, such as one of tensorstore; None for missing files."""
    found = re.search(r"os[ _]error(?:_code)?\W+(\d+)", str(error), re.IGNORECASE)
    number = error.errno if isinstance(error, OSError) else int(found[1]) if found else None
    return None if number in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR) else number


def _find_tree(folder: AnyPath) -> AnyPath:
    """Find the folder of the tree inside the folder of a checkpoint or a training run."""
    for place in (folder, *(folder / str(step) for step in reversed(saved_steps(folder)))):
        for item in (place, *(place / name for name in ITEMS)):
            if (item / "_METADATA").is_file():
                return item
    if folder.is_dir():
        raise UserError(f"{folder} is not an orbax checkpoint: pass the folder that contains one.")
    raise UserError(f"{folder} is not an orbax checkpoint, and does not end in {ENDINGS}: check the path.")
