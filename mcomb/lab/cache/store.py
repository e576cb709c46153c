"""Combine the config, setup, data, folders, networks and matchings of a run."""

from typing import Any

import jax.numpy as jnp

from mcomb.io.paths import AnyPath
from mcomb.lab.cache.durations import Durations
from mcomb.lab.cache.matchings import MatchingCache
from mcomb.lab.cache.networks import Network, NetworkCache
from mcomb.lab.data.datasets import Splits
from mcomb.lab.flags import TrainingConfig
from mcomb.lab.run_folders import RunFolders
from mcomb.lab.setups import SETUPS, load_data
from mcomb.matching.matching import Matching
from mcomb.symmetry.spec import PermutationSpec
from mcomb.trees import Apply, Params


class Store:
    """The data, networks and matchings of one run. Each run creates one store.

    Attributes:
        config: The flags of the run, an instance of the experiment's config class.
        setup: The model, dataset and recipe.
        folders: The names of the run's folders.
        durations: The seconds spent on each kind of work.
        networks: The cache of networks.
        matchings: The cache of matchings between these networks.
    """

    def __init__(self, config: TrainingConfig):
        self.config: Any = config
        self.setup = SETUPS[config.setup]
        self.folders, self.durations = RunFolders(config), Durations()
        self.networks = NetworkCache(config, self.folders, self.durations)
        self.matchings = MatchingCache(config, self.folders, self.durations)

    @property
    def data(self) -> Splits:
        """The whole dataset."""
        return load_data(self.config.setup, self.config.data_dir).splits

    @property
    def data_fingerprint(self) -> str:
        """The fingerprint of the examples, independent of their location."""
        return load_data(self.config.setup, self.config.data_dir).fingerprint

    @property
    def apply(self) -> Apply:
        """The function from parameters and raw inputs to logits."""
        return self.setup.apply(self.config.width, self.config.dtype)

    @property
    def spec(self) -> PermutationSpec:
        """The permutation symmetries of the networks."""
        return self.setup.spec(self.config.width, self.config.dtype, self.config.frozen)

    @property
    def symmetries(self) -> PermutationSpec:
        """The symmetries that matchings belong to."""
        return self.matchings.spec()

    def folder(self, experiment: str) -> AnyPath:
        """Return the folder of an experiment's results."""
        letters = [letter for letter in "ABC" if self.config.checkpoint_of(letter) is not None]
        given = {letter: network.name for letter in letters if (network := self.networks.given(letter))}
        return self.folders.experiment(experiment, given)

    def permute(self, network: Network, matching: Matching, groups: str | None = None) -> Params:
        """Return the parameters with matched units, and check that the network's outputs do not change."""
        inputs, spec = jnp.asarray(self.data.test.inputs[:64]), self.matchings.spec(groups)
        spec.check(self.apply, network.params, inputs, perms=matching.perms)
        return spec.apply(matching.perms, network.params)
