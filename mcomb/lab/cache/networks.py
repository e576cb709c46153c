"""Cache trained networks: read them from disk, or train missing ones.

If several processes need the same network, one trains it and the others wait.
"""

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mcomb.errors import UserError
from mcomb.io.checkpoints import read_checkpoint
from mcomb.io.fingerprints import fingerprint
from mcomb.io.locks import lock
from mcomb.io.paths import make_writable
from mcomb.lab import run_folders
from mcomb.lab.cache.durations import Durations
from mcomb.lab.flags import RECIPE_FLAGS, recipe, recipe_dict
from mcomb.lab.run_folders import RunFolders, pretrained_path, shorten_name
from mcomb.lab.setups import SETUPS, load_data
from mcomb.lab.training.checkpoints import TrainingCheckpoints
from mcomb.lab.training.side_by_side import Trainer, Unfinished, device_share
from mcomb.lab.training.train import Training
from mcomb.runtime.processes import from_first, wait_for_all
from mcomb.trees import Params, require_finite


class NotKeptError(Exception):
    """Exception for an uncached network or matching if `make` is False."""


@dataclass(frozen=True)
class Network:
    """A network, its name in the run folders, and its fingerprint."""

    name: str
    params: Params
    fingerprint: str


class NetworkCache:
    """Cache of the networks of one config: read from files, or trained and saved in the run folders."""

    def __init__(self, config: Any, folders: RunFolders, durations: Durations):
        self.config, self.folders, self.durations = config, folders, durations
        self.setup, self.recipe = SETUPS[config.setup], recipe(config)
        self._given: dict[str, Network] = {}  # by letter
        self._trained: dict[Training, Network] = {}

    def get(self, letters: str, make: bool = True) -> dict[str, Network]:
        """Return networks by letter: read them from files if given, and train the others from their seeds.

        Raises:
            NotKeptError: A network is not trained yet and `make` is False.
        """
        wanted = self.trainings(letters)
        given = {letter: self.given(letter) for letter in letters}
        trained = self.train(tuple(wanted.values()), make)
        return {letter: network or trained[wanted[letter]] for letter, network in given.items()}

    def given(self, letter: str) -> Network | None:
        """Return network A, B or C if the flags read it from a file; otherwise None."""
        path = self.config.checkpoint_of(letter)
        if path is None and not self.config.pretrained:
            return None
        if letter not in self._given:
            name = shorten_name(path.stem) if path else f"pretrained-{self.config.seed_of(letter)}"
            path = path or self._pretrained(letter)
            params = read_checkpoint(path, self.setup.shapes(self.config.width))
            require_finite(f"checkpoint {path}", params)
            self._given[letter] = Network(f"{name}-{fingerprint(params)}", params, fingerprint(params))
        return self._given[letter]

    def _pretrained(self, letter: str) -> Path:
        """Return the file of a pretrained network in the repository."""
        if changed := [name for name in RECIPE_FLAGS if getattr(self.config, name) is not None]:
            raise UserError(f"--pretrained networks have a fixed recipe: remove --{changed[0].replace('_', '-')}.")
        path = pretrained_path(self.config.setup, self.config.width, self.config.seed_of(letter))
        if not path.is_file():
            raise UserError(
                f"No pretrained network {path.relative_to(run_folders.PRETRAINED)}: remove --pretrained, or use "
                f"{_list_pretrained(path.parent)}."
            )
        return path

    def trainings(self, letters: str) -> dict[str, Training]:
        """Return the seed and examples of each network that is not given, by letter.

        Raises:
            UserError: Two networks have the same seed and examples.
        """
        seeded = {x: self.config.training_of(x) for x in letters if self.config.checkpoint_of(x) is None}
        for one, other in itertools.combinations(seeded, 2):
            if seeded[one] == seeded[other]:
                raise UserError(f"Networks {one} and {other} both have seed {seeded[one].seed}: use different seeds.")
        return {} if self.config.pretrained else seeded

    def name(self, letter: str) -> str:
        """Return the name of network A, B or C in the run folders."""
        given = self.given(letter)
        return given.name if given else self.folders.network_name(self.config.training_of(letter))

    def epochs_trained(self, training: Training) -> int:
        """Return the number of epochs that a network has been trained for."""
        self._agree_on_data()
        return from_first(lambda: self._checkpoints(training).epoch or 0)

    def train(self, trainings: Sequence[Training], make: bool = True) -> dict[Training, Network]:
        """Return networks, and train the unfinished ones in parallel on separate devices.

        Other processes that need one of these networks wait until all are trained.

        Each network gets an equal share of the devices, even if other networks are trained already. A resumed run uses
        its previous number of devices. A network therefore does not depend on the state of the cache.

        Raises:
            NotKeptError: A network is unfinished and `make` is False.
        """
        trainings = tuple(dict.fromkeys(trainings))
        unfinished = self._unfinished(trainings)
        if unfinished and not make:
            raise NotKeptError(self.folders.network_name(unfinished[0]))
        if unfinished:
            share = device_share(len(trainings))
            from_first(make_writable, self.folders.networks)
            with ExitStack() as locks:
                # Sorted to prevent deadlocks between processes.
                for name in sorted(map(self.folders.network_name, unfinished)):
                    locks.enter_context(lock(self.folders.networks / f".{name}.lock", f"training {name}"))
                with self.durations.timed("training"):
                    networks = [
                        Unfinished(self.folders.network_name(training), training, self._checkpoints(training))
                        for training in self._unfinished(unfinished)
                    ]
                    self._trainer().train_side_by_side(networks, share)
                    wait_for_all("training")
        return {training: self._read_finished(training) for training in trainings}

    def _trainer(self) -> Trainer:
        config, data = self.config, load_data(self.config.setup, self.config.data_dir).splits
        apply, init = self.setup.apply(config.width, config.dtype), partial(self.setup.init, config.width)
        return Trainer(apply, init, data.train, self.setup.dataset.groups, self.recipe, config.steps_per_call)

    def _unfinished(self, trainings: Sequence[Training]) -> list[Training]:
        self._agree_on_data()
        return from_first(lambda: [training for training in trainings if self._read(training) is None])

    def _agree_on_data(self) -> None:
        """Load data that `cache_key` needs in all processes; the first process alone would wait for the others."""
        if not self.setup.dataset.is_fixed:
            load_data(self.config.setup, self.config.data_dir)

    def _read_finished(self, training: Training) -> Network:
        """Read a network that this run has trained."""
        network = self._read(training)
        if network is None:
            raise UserError(f"{self.folders.network(training)} changed during the run: run it again.")
        return network

    def _read(self, training: Training) -> Network | None:
        """Return a network, read once; None if it is unfinished or damaged."""
        if training not in self._trained:
            checkpoints = self._checkpoints(training)
            done = checkpoints.epoch == self.recipe.epochs
            params = checkpoints.read_params(self.setup.shapes(self.config.width)) if done else None
            if params is None:
                return None
            self._trained[training] = Network(self.folders.network_name(training), params, fingerprint(params))
        return self._trained[training]

    def _checkpoints(self, training: Training) -> TrainingCheckpoints:
        return TrainingCheckpoints(self.folders.network(training), self.cache_key(training))

    def cache_key(self, training: Training) -> dict[str, Any]:
        """Return all values that determine a network; checkpoints record them and require the same values."""
        key = {"setup": self.config.setup, "width": self.config.width, "seed": training.seed}
        key |= recipe_dict(self.config)
        key |= {"images": training.subset._asdict()} if training.subset else {}
        if not self.setup.dataset.is_fixed:
            key["data"] = load_data(self.config.setup, self.config.data_dir).fingerprint
        return key | ({"dtype": self.config.dtype} if self.folders.other_dtype else {})


def _list_pretrained(folder: Path) -> str:
    """List the seeds of the pretrained networks in a folder; if it has none, list the setups and widths that do."""
    if seeds := sorted(int(path.stem.removeprefix("seed-")) for path in folder.glob("seed-*.safetensors")):
        return f"one of the seeds {', '.join(map(str, seeds))}"
    widths: dict[str, list[int]] = {}
    for path in run_folders.PRETRAINED.glob("*/width-*"):
        widths.setdefault(path.parent.name, []).append(int(path.name.removeprefix("width-")))
    there = [f"{setup} --width {' or '.join(map(str, sorted(widths[setup])))}" for setup in sorted(widths)]
    return ", ".join(there) or "a clone of the repository, which contains some"
