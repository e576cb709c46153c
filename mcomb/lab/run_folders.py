"""Name the folders and files of a run.

    out/<setup>/width-<w>/networks/<network>/      orbax checkpoints
                          matchings/<b>-to-<a>.npz, and <b>-to-<a>,matcher=<m>.npz
                          <experiment>/            results.json, samples.jsonl, figures

A name contains every flag that differs from its default, as in `uniform,seed=1,points=5`.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcomb.io.paths import AnyPath
from mcomb.lab.cli import flags
from mcomb.lab.flags import (
    CHECKPOINT_FLAGS,
    LEARNED,
    RECIPE_FLAGS,
    TrainingConfig,
    default_flags,
    identity_flags,
    recipe,
)
from mcomb.lab.setups import SETUPS
from mcomb.lab.training.train import Training
from mcomb.matching.straight_through import STEPS

# The files in an experiment's folder, besides its figures.
RESULTS = "results.json"
ROWS = "samples.jsonl"
ROW_OBJECTS = "samples"  # replaces ROWS in an object store: a folder with one object per call
FIGURE_RECORD = ".figures.json"  # fingerprints of the figures' files, and the version that drew them
LOCK = ".lock"

PRETRAINED = Path(__file__).parents[2] / "pretrained"  # in a clone


@dataclass(frozen=True)
class RunFolders:
    """The folders and files of one setup and width under `--out`."""

    config: TrainingConfig

    @property
    def home(self) -> AnyPath:
        """The folder of this setup and width, which contains all others."""
        return self.config.out / self.config.setup / f"width-{self.config.width}"

    @property
    def networks(self) -> AnyPath:
        """The folder of all networks."""
        return self.home / "networks"

    def network(self, training: Training) -> AnyPath:
        """Return the folder of one network's checkpoints."""
        return self.networks / self.network_name(training)

    def network_name(self, training: Training) -> str:
        """Return a network's name: its seed, its examples unless it has all, and the changes to its recipe."""
        own, setups = recipe(self.config), SETUPS[self.config.setup].recipe
        changed = [
            f"{name.replace('_', '-')}={getattr(own, name)}"
            for name in RECIPE_FLAGS
            if getattr(own, name) != getattr(setups, name)
        ]
        subset = [training.subset.name] if training.subset else []
        return ",".join([f"seed-{training.seed}", *subset, *changed, *self.other_dtype])

    def matching(self, a: str, b: str, matcher: str, restarts: int = 1, groups: str | None = None) -> AnyPath:
        """Return the file of the matching of network `b` to network `a`, given their names."""
        groups = groups or self.config.groups
        name = f"{b}-to-{a}"
        name += ",".join(["", f"matcher={matcher}", *self.other_dtype]) if matcher != "weights" else ""
        name += f",restarts={restarts}" if restarts > 1 else ""
        steps = self.config.matcher_steps
        name += f",steps={steps}" if matcher == LEARNED and steps != STEPS else ""
        name += f",frozen={_in_a_name(self.config.frozen)}" if self.config.frozen else ""
        name += f",groups={groups}" if groups != "permutations" else ""
        if len(name.encode()) > 180:  # file systems allow 255 bytes, and temporary files and locks extend the name
            name = f"{shorten_name(name, 150)}-{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}"
        return self.home / "matchings" / f"{name}.npz"

    def experiment(self, name: str, given: Mapping[str, str]) -> AnyPath:
        """Return the folder of an experiment's results.

        Args:
            name: The experiment's name.
            given: By letter, the names of networks read from files. The names contain fingerprints.
        """
        parts, own = [name], SETUPS[self.config.setup].recipe
        defaults = default_flags(type(self.config), self.config.setup)
        for flag in identity_flags(self.config):
            value, default = getattr(self.config, flag), defaults[flag]
            if value in (default, getattr(own, flag, default)) or flag in ("setup", "width"):
                continue
            word = flag.replace("_", "-")
            value = given[flag[-1].upper()] if flag in CHECKPOINT_FLAGS else value
            value = flags(type(self.config))[flag].none if value is None else value
            parts.append(word if value is True else f"{word}={_in_a_name(value)}")
        return self.home / ",".join(parts)

    @property
    def other_dtype(self) -> list[str]:
        """The suffix of names for dtypes other than float32."""
        return [f"dtype={self.config.dtype}"] if self.config.dtype != "float32" else []


def pretrained_path(setup: str, width: int, seed: int) -> Path:
    """Return the file of a pretrained network in the repository."""
    return PRETRAINED / setup / f"width-{width}" / f"seed-{seed}.safetensors"


def has_pretrained(setup: str, width: int) -> bool:
    """Return whether the repository has pretrained networks of a setup at a width."""
    return any((PRETRAINED / setup / f"width-{width}").glob("seed-*.safetensors"))


def figure_files(folder: AnyPath, experiment: str) -> list[AnyPath]:
    """Return the files of an experiment's figure in its folder: PNG and PDF."""
    return [folder / f"{experiment}.{kind}" for kind in ("png", "pdf")]


def shorten_name(name: str, size: int = 60) -> str:
    """Truncate a name that becomes part of other file names."""
    return name.encode()[:size].decode(errors="ignore")


def _in_a_name(value: Any) -> str:
    """Format a flag's value for a folder's name."""
    if isinstance(value, tuple):
        return "..".join(map(_in_a_name, value)).replace("/", ".")
    return f"{value:g}" if isinstance(value, float) else str(value)
