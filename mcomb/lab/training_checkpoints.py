"""Checkpoints of a training in progress: saved as it goes, restored to resume it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from mcomb.base import UserError
from mcomb.checkpoint import read_checkpoint, reading, restore_tree, saved_steps
from mcomb.devices import describe_devices
from mcomb.gradient_descent import State
from mcomb.lab import versions
from mcomb.lab.results import environment


class TrainingCheckpoints:
    """The newest checkpoint of one training: `folder/<epoch>/{params,optimizer,config}`.

    Its config has what the training was made from, which must not change, and a record of how it was trained.
    """

    def __init__(self, folder: Path, made_from: Mapping[str, Any]):
        """Opens a training's folder; one that was made from something else is an error."""
        self.folder, self.made_from = folder, json.loads(json.dumps(made_from))
        self.epoch = max(saved_steps(folder), default=None)
        self.devices: list[str] = []  # all numbers and kinds of devices that it was trained on, such as `2 × cpu`
        if self.epoch is None:
            return
        self.newest = folder / str(self.epoch)
        saved = reading(folder, lambda: json.loads((self.newest / "config" / "metadata").read_text()))
        self.step = reading(folder, lambda: int(saved["step"]))
        self.devices = saved.get("devices", [])
        version = saved.get("version", 1)
        if version != versions.TRAINING:
            raise UserError(
                f"{folder} was trained by version {version} of the training code, and this is version "
                f"{versions.TRAINING}: move it away or give another --out"
            )
        for name, value in self.made_from.items():
            if saved.get(name) != value:
                raise UserError(
                    f"{folder} was trained with {name} = {saved.get(name)}, not {value}: "
                    "move it away or give another --out"
                )

    @property
    def device_count(self) -> int | None:
        """The number of devices that it was trained on last; None before the first checkpoint."""
        return int(self.devices[-1].split()[0]) if self.devices else None

    def save(self, epoch: int, state: State, mesh: Mesh | None = None) -> None:
        """Writes the state after an epoch on a mesh, atomically, and then drops the one before."""
        devices = describe_devices(mesh)
        self.devices = [*(other for other in self.devices if other != devices), devices]
        record = {
            "step": int(state.step),
            "version": versions.TRAINING,
            "devices": self.devices,
            "environment": environment(),
        }
        options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
        with ocp.CheckpointManager(self.folder.absolute(), options=options) as manager:
            manager.save(
                epoch,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(state.params),
                    optimizer=ocp.args.StandardSave(state.optimizer),
                    config=ocp.args.JsonSave(self.made_from | record),
                ),
            )

    def restore(self, target: State) -> State:
        """The newest state, in the structure of `target`."""
        params = read_checkpoint(self.newest, target.params)
        optimizer = reading(self.newest, lambda: restore_tree(self.newest / "optimizer", target.optimizer))
        return State(params, optimizer, jnp.array(self.step, jnp.int32))
