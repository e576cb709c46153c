"""Save checkpoints of a training in progress, and restore them to resume it."""

import errno
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from mcomb.errors import UserError, first_words
from mcomb.io.checkpoints import fingerprint_entry, read_checkpoint, reading, restore_tree, saved_steps, system_error
from mcomb.io.fingerprints import fingerprint
from mcomb.io.paths import AnyPath, absolute, read_text, remove_folder, seal, unseal
from mcomb.lab import algorithm_versions
from mcomb.lab.environment import environment
from mcomb.runtime.devices import describe_devices
from mcomb.runtime.processes import are_several, is_first
from mcomb.runtime.progress import warn
from mcomb.runtime.training_loop import TrainState
from mcomb.trees import Params


class TrainingCheckpoints:
    """The two newest checkpoints of one training run: `folder/<epoch>/{params,optimizer,config}`.

    A run that stopped within an epoch has an additional checkpoint, `folder/stopped/<step>`. Each config contains
    `made_from`, which must not change, and a record of the training. Fingerprints protect the record and the arrays. If
    the newest checkpoint is damaged, `restore` uses the previous one.

    Args:
        folder: The folder of the checkpoints.
        made_from: The setup, recipe and seed of the network, as JSON values.

    Raises:
        UserError: The checkpoints were made from other values, or all of them are damaged.
    """

    def __init__(self, folder: AnyPath, made_from: Mapping[str, Any]):
        """Open a training's folder; raise UserError if it was made from other values."""
        self.folder, self.made_from = folder, json.loads(json.dumps(made_from))
        self.records: dict[AnyPath, dict[str, Any]] = {}  # of intact checkpoints, newest first
        self.problems: dict[AnyPath, UserError] = {}  # of damaged checkpoints
        self.devices: list[str] = []  # every device count and kind used so far, such as `2 × cpu`
        for place in [parent / str(n) for parent in (folder, folder / "stopped") for n in saved_steps(parent)]:
            try:
                self.records[place] = reading(place, partial(_read_record, place))
            except UserError as problem:
                self.problems[place] = problem
        self.records = dict(sorted(self.records.items(), key=lambda item: -item[1]["step"]))
        if self.problems and not self.records:
            raise next(iter(self.problems.values()))
        for record in self.records.values():
            self._require_same_origin(record)
        if self.records:
            self.devices = next(iter(self.records.values())).get("devices", [])

    @property
    def epoch(self) -> int | None:
        """The epoch of the newest checkpoint; None without checkpoints or within an epoch."""
        newest = next(iter(self.records), None)
        return int(newest.name) if newest and newest.parent == self.folder else None

    @property
    def step(self) -> int:
        """The step of the newest checkpoint; 0 without checkpoints."""
        return next((record["step"] for record in self.records.values()), 0)

    @property
    def device_count(self) -> int | None:
        """The number of devices last trained on; None before the first checkpoint."""
        return int(self.devices[-1].split()[0]) if self.devices else None

    def _require_same_origin(self, record: Mapping[str, Any]) -> None:
        version = record.get("version", 1)
        if version != algorithm_versions.TRAINING:
            raise UserError(
                f"{self.folder} was trained by version {version} of the training code, not the current version "
                f"{algorithm_versions.TRAINING}: move it away or use another --out."
            )
        for name, value in self.made_from.items():
            if record.get(name) != value:
                raise UserError(
                    f"{self.folder} was trained with {name} = {record.get(name)}, not {value}: "
                    "move it away or use another --out."
                )

    def save(self, epoch: int | None, state: TrainState, mesh: Mesh | None = None) -> None:
        """Write a checkpoint atomically, and delete all but the two newest.

        Args:
            epoch: The number of completed epochs, or None within an epoch.
            state: The state to save.
            mesh: The devices that the network is trained on.

        Raises:
            UserError: The checkpoint cannot be written.
        """
        devices = describe_devices(mesh)
        self.devices = [*(other for other in self.devices if other != devices), devices]
        record = {
            "step": int(state.step),
            "version": algorithm_versions.TRAINING,
            "devices": self.devices,
            "environment": environment(),
            "optimizer": fingerprint(state.optimizer),
        }
        folder, number = (self.folder / "stopped", int(state.step)) if epoch is None else (self.folder, epoch)
        try:
            import orbax.checkpoint as ocp  # takes half a second and would delay the progress bar

            options = ocp.CheckpointManagerOptions(
                max_to_keep=2, enable_async_checkpointing=False, cleanup_tmp_directories=True
            )
            with ocp.CheckpointManager(absolute(folder), options=options) as manager:
                manager.save(
                    number,
                    args=ocp.args.Composite(
                        params=ocp.args.StandardSave(state.params),
                        optimizer=ocp.args.StandardSave(state.optimizer),
                        config=ocp.args.JsonSave(seal(self.made_from | record, str(folder))),
                    ),
                    custom_metadata=fingerprint_entry(state.params),
                )
        except Exception as error:  # orbax raises many types
            if are_several():  # another process may have caused the error
                raise
            problem = f"Cannot write checkpoint {folder / str(number)} ({first_words(error)})"
            remedy = "free disk space" if system_error(error) in (errno.ENOSPC, errno.EDQUOT) else "fix this"
            raise UserError(f"{problem}: {remedy}, then run the same command to resume.") from error
        if epoch is not None and is_first():
            remove_folder(self.folder / "stopped")

    def read_params(self, target: Params) -> Params | None:
        """Return the newest checkpoint's parameters; None if they are damaged and there is an older checkpoint."""
        try:
            return read_checkpoint(next(iter(self.records)), target)
        except UserError:
            if len(self.records) == 1:
                raise
            return None

    def restore(self, target: TrainState) -> TrainState:
        """Return the newest intact state, in the structure of `target`, and rename newer, damaged checkpoints."""
        for place, record in self.records.items():
            try:
                state = self._restore(place, record, target)
            except UserError as error:
                self.problems[place] = error
                continue
            if is_first():
                self._set_aside_newer(place)
            return state
        raise next(iter(self.problems.values()))

    def _set_aside_newer(self, than: AnyPath) -> None:
        """Rename damaged checkpoints, which would be in the way of later ones."""
        for place, problem in self.problems.items():
            if place.parent == than.parent and int(place.name) < int(than.name):
                continue  # an interrupted deletion of an old checkpoint left it incomplete
            aside = place.with_name(f"damaged-{place.name}")
            remove_folder(aside)
            place.rename(aside)  # not atomic in an object store
            what = str(problem).rpartition(": ")[0]
            warn(f"{what}: renamed it to {aside.name}, training resumes from {than}")

    def _restore(self, place: AnyPath, record: Mapping[str, Any], target: TrainState) -> TrainState:
        params = read_checkpoint(place, target.params)
        optimizer = reading(place, lambda: restore_tree(place / "optimizer", target.optimizer))
        if record.get("optimizer", found := fingerprint(optimizer)) != found:
            raise UserError(f"Checkpoint {place} has a damaged optimizer state: move it away.")
        return TrainState(params, optimizer, jnp.array(record["step"], jnp.int32))


def _read_record(place: AnyPath) -> dict[str, Any]:
    """Return a checkpoint's record; accept older records, which have no digests."""
    text = read_text(place / "config" / "metadata")
    record = unseal(text) or json.loads(text)
    if "digest" in record:
        raise ValueError("its record does not match its digest")
    return record | {"step": int(record["step"])}
