"""Orbax checkpoints: of a training in progress, and of any parameter tree."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import args

from mcomb.base import Params, UserError, named_leaves
from mcomb.train import State


class Checkpoints:
    """The newest checkpoint of one training run: `folder/<epoch>/{params,optimizer,config}`."""

    def __init__(self, folder: Path, config: Mapping[str, Any]):
        """Opens a run's folder; one that holds a run with another config is an error."""
        self.folder, self.config = folder, json.loads(json.dumps(config))
        self.epoch = max(_steps(folder), default=None)
        if self.epoch is None:
            return
        self.newest = folder / str(self.epoch)
        saved = _reading(folder, lambda: json.loads((self.newest / "config" / "metadata").read_text()))
        self.step = saved.pop("step")
        for name, value in self.config.items():
            if saved.get(name) != value:
                raise UserError(
                    f"{folder} was trained with {name} = {saved.get(name)}, not {value}: "
                    "move it away or give another --out"
                )

    def save(self, epoch: int, state: State) -> None:
        """Writes the state after an epoch, atomically, and then drops the one before."""
        options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
        with ocp.CheckpointManager(self.folder.absolute(), options=options) as manager:
            manager.save(
                epoch,
                args=args.Composite(
                    params=args.StandardSave(state.params),
                    optimizer=args.StandardSave(state.optimizer),
                    config=args.JsonSave(self.config | {"step": int(state.step)}),
                ),
            )

    def restore(self, like: State) -> State:
        """The newest state, in the structure of `like`."""
        params = read_checkpoint(self.newest, like.params)
        optimizer = _reading(self.newest, lambda: _restore(self.newest / "optimizer", like.optimizer))
        return State(params, optimizer, jnp.array(self.step, jnp.int32))


def write_checkpoint(folder: str | Path, params: Params) -> None:
    """Writes a parameter tree to an orbax folder, atomically."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder).absolute(), params)


def read_checkpoint(folder: str | Path, like: Params | None = None) -> Params:
    """The parameters in an orbax folder: a saved tree, a tree with a `params` entry, or a training run's newest.

    With `like`, a tree of arrays or shapes, the result has its structure, and a difference is an error
    that names the leaf.
    """
    folder = Path(folder)
    place = _params_folder(folder)
    tree = _reading(folder, lambda: _restore(place))
    if isinstance(tree, dict) and "params" in tree:
        tree = tree["params"]
    if like is None:
        return tree
    found, wanted = named_leaves(tree), named_leaves(like)
    for name in sorted(found.keys() | wanted.keys()):
        if name not in found or name not in wanted:
            problem = f"has no {name}" if name not in found else f"has {name}, which the model does not"
        elif found[name].shape != wanted[name].shape:
            problem = f"has {name} of shape {found[name].shape} where the model has {wanted[name].shape}"
        else:
            continue
        raise UserError(f"checkpoint {folder} {problem}: give one of the same setup and width")
    return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in wanted])


def _params_folder(folder: Path) -> Path:
    """The folder of the tree itself inside what a person calls a checkpoint."""
    for place in (folder, *(folder / str(step) for step in sorted(_steps(folder), reverse=True))):
        for item in (place, place / "params", place / "default"):
            if (item / "_METADATA").is_file():
                return item
    raise UserError(f"{folder} is no orbax checkpoint: give the folder that holds one")


def _steps(folder: Path) -> list[int]:
    """The steps that a folder of an orbax manager holds."""
    return [int(path.name) for path in folder.glob("*") if path.name.isdigit()]


def _restore(place: Path, like: Any = None) -> Any:
    """The stored tree on this process's first device, wherever and on however many it was written."""
    place = place.absolute()
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        stored = ocp.StandardCheckpointHandler().metadata(epath.Path(place)).tree if like is None else like
        target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), stored)
        return checkpointer.restore(place, args=args.StandardRestore(target))


def _reading(folder: Path, read: Any) -> Any:
    """What `read` returns; whatever else goes wrong in it is a checkpoint that cannot be read."""
    try:
        return read()
    except MemoryError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:150] or type(error).__name__
        raise UserError(f"checkpoint {folder} cannot be read ({reason}): replace it, or move it away") from error
