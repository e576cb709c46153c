"""Parameter trees in orbax folders, read and written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath

from mcomb.base import Params, UserError, named_leaves

T = TypeVar("T")


def write_checkpoint(folder: str | Path, params: Params) -> None:
    """Writes a parameter tree to an orbax folder, atomically."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder).absolute(), params)


def read_checkpoint(folder: str | Path, target: Params | None = None) -> Params:
    """The parameters in an orbax folder: a saved tree, a tree with a `params` entry, or a training run's newest.

    With `target`, a tree of arrays or shapes, the result has its structure, and a difference is an error
    that names the leaf.
    """
    folder = Path(folder)
    tree_folder = _find_tree(folder)
    tree = reading(folder, lambda: restore_tree(tree_folder))
    if isinstance(tree, dict) and "params" in tree:
        tree = tree["params"]
    if target is None:
        return tree
    found, wanted = named_leaves(tree), named_leaves(target)
    for name in sorted(found.keys() | wanted.keys()):
        if name not in found or name not in wanted:
            problem = f"has no {name}" if name not in found else f"has {name}, which the model does not"
        elif found[name].shape != wanted[name].shape:
            problem = f"has {name} of shape {found[name].shape} where the model has {wanted[name].shape}"
        else:
            continue
        raise UserError(f"checkpoint {folder} {problem}: give one of the same setup and width")
    return jax.tree.unflatten(jax.tree.structure(target), [found[name] for name in wanted])


def saved_steps(folder: Path) -> list[int]:
    """The steps that a folder of an orbax manager holds, in ascending order."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())


def restore_tree(folder: Path, target: Any = None) -> Any:
    """The stored tree on this process's first device, wherever and on however many it was written."""
    folder = folder.absolute()
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        stored = ocp.StandardCheckpointHandler().metadata(epath.Path(folder)).tree if target is None else target
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), stored)
        return checkpointer.restore(folder, args=ocp.args.StandardRestore(shapes))


def reading(folder: Path, read: Callable[[], T]) -> T:
    """What `read` returns; whatever else goes wrong in it is a checkpoint that cannot be read."""
    try:
        return read()
    except MemoryError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:150] or type(error).__name__
        raise UserError(f"checkpoint {folder} cannot be read ({reason}): replace it, or move it away") from error


def _find_tree(folder: Path) -> Path:
    """The folder of the tree itself inside what a person calls a checkpoint."""
    for place in (folder, *(folder / str(step) for step in reversed(saved_steps(folder)))):
        for item in (place, place / "params", place / "default"):
            if (item / "_METADATA").is_file():
                return item
    raise UserError(f"{folder} is no orbax checkpoint: give the folder that holds one")
