"""Define the flags of the experiments, and derive recipes, command lines and identities from them."""

import argparse
import dataclasses
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from mcomb.errors import UserError
from mcomb.io.paths import AnyPath
from mcomb.keys import LARGEST_SEED
from mcomb.lab.cli import Flag, Output, flags, is_installed_command, parse
from mcomb.lab.data.splits import Subset
from mcomb.lab.setups import SETUPS, STREAM, WIDEST
from mcomb.lab.training.train import Recipe, Training
from mcomb.matching.matchers import MATCHERS
from mcomb.matching.straight_through import STEPS
from mcomb.symmetry.derive import GROUPS

C = TypeVar("C", bound="Config")
T = TypeVar("T", bound="TrainingConfig")
DTYPES = ("float32", "bfloat16")
LEARNED = "ste"


@dataclass(frozen=True)
class TrainingConfig(Output):
    """Flags for training networks."""

    setup: Annotated[str, Flag("model, dataset and recipe", choices=SETUPS)] = "resnet20-cifar10"
    width: Annotated[int, Flag("width multiplier: the first layer has 16·N units", 1, WIDEST)] = 32
    epochs: Annotated[int | None, Flag("training epochs; 0 leaves networks untrained [setup]", at_least=0)] = None
    batch_size: Annotated[int | None, Flag("training examples in a batch [setup]", at_least=1)] = None
    learning_rate: Annotated[float | None, Flag("peak learning rate [setup]", at_least=0)] = None
    weight_decay: Annotated[float | None, Flag("weight decay [setup]", at_least=0)] = None
    dtype: Annotated[str, Flag("dtype of computations; parameters are float32", choices=DTYPES)] = "float32"
    checkpoint_every: Annotated[int | None, Flag("epochs between checkpoints [setup]", at_least=1, identity=False)] = (
        None
    )
    data_dir: Annotated[
        Path | None, Flag("file or folder of the dataset (default: $MCOMB_DATA_DIR, or download)", identity=False)
    ] = None
    out: Annotated[AnyPath, Flag("root folder of all runs, or gs://BUCKET/FOLDER", identity=False)] = Path("runs")
    steps_per_call: Annotated[
        int | None, Flag("training steps in one compiled call (default: automatic)", at_least=1, identity=False)
    ] = None
    plan: Annotated[bool, Flag("only list the steps with their operations, memory and disk space", identity=False)] = (
        False
    )
    distributed: Annotated[
        bool, Flag("connect to the other processes of this SLURM job or TPU pod", identity=False)
    ] = False
    coordinator: Annotated[str | None, Flag("HOST:PORT of process 0, to connect several processes", identity=False)] = (
        None
    )
    processes: Annotated[int | None, Flag("number of connected processes", at_least=1, identity=False)] = None
    process: Annotated[int | None, Flag("index of this process, from 0", at_least=0, identity=False)] = None

    @property
    def frozen(self) -> tuple[str, ...]:
        """The names of permutations to keep in place when matching."""
        return ()

    @property
    def groups(self) -> str:
        """The symmetries to match by."""
        return "permutations"

    @property
    def matcher_steps(self) -> int:
        """The number of gradient steps of a matcher that learns."""
        return STEPS


@dataclass(frozen=True)
class Config(TrainingConfig):
    """Flags that all experiments share."""

    matcher: Annotated[str, Flag("method for matching units", choices=MATCHERS.keys())] = "weights"
    matcher_steps: Annotated[int, Flag(f"gradient steps of --matcher {LEARNED}", at_least=1)] = STEPS
    groups: Annotated[
        str, Flag("symmetries to match by: permutations, or all groups (rotations, scales, …)", choices=GROUPS)
    ] = "permutations"
    train_examples: Annotated[
        int | None, Flag("train examples to evaluate on, or all", at_least=1, old_name="train_images", none="all")
    ] = None
    test_examples: Annotated[
        int | None, Flag("test examples to evaluate on, or all", at_least=1, old_name="test_images", none="all")
    ] = None
    frozen: Annotated[
        tuple[str, ...],
        Flag(f"permutations to keep in place when matching, by name; {STREAM} is the one with the most axes"),
    ] = ()
    seed: Annotated[int, Flag("root seed N; networks A, B, C have seeds 3N, 3N+1, 3N+2", 0, LARGEST_SEED // 3 - 1)] = 0
    seed_a: Annotated[int | None, Flag("seed of network A (default: from --seed)", 0, LARGEST_SEED)] = None
    seed_b: Annotated[int | None, Flag("seed of network B (default: from --seed)", 0, LARGEST_SEED)] = None
    seed_c: Annotated[int | None, Flag("seed of network C (default: from --seed)", 0, LARGEST_SEED)] = None
    checkpoint_a: Annotated[AnyPath | None, Flag("orbax folder or safetensors file of network A")] = None
    checkpoint_b: Annotated[AnyPath | None, Flag("orbax folder or safetensors file of network B")] = None
    checkpoint_c: Annotated[AnyPath | None, Flag("orbax folder or safetensors file of network C")] = None
    pairs: Annotated[
        int | None,
        Flag("independent pairs, for consecutive values of --seed, or abc for AB, AC and BC", 1, 1000, none="abc"),
    ] = 1
    pretrained: Annotated[bool, Flag("use the networks of the repository instead of training")] = False
    vmap_size: Annotated[
        int | None, Flag("combinations in one batch on a device (default: automatic)", at_least=1, identity=False)
    ] = None

    def __post_init__(self) -> None:
        if self.matcher_steps != STEPS and self.matcher not in (LEARNED, ""):  # "": all matchers
            given = f"--matcher-steps {self.matcher_steps}"
            raise UserError(f"--matcher {self.matcher} takes no {given}: use --matcher {LEARNED}.")

    # Defaults of flags that only some experiments define.

    @property
    def repair(self) -> bool:
        """Whether to apply REPAIR to combinations."""
        return False

    @property
    def temperatures(self) -> bool:
        """Whether to also measure losses at each network's best temperature."""
        return False

    @property
    def samples(self) -> int:
        """The number of combinations drawn at each value of a sweep."""
        return 1

    @property
    def range(self) -> tuple[float, float] | None:
        """The first and last value of a sweep; None for the experiment's defaults."""
        return None

    @property
    def split(self) -> str | None:
        """The scheme that splits train examples between A and B; None if both have all."""
        return None

    @property
    def evaluation_examples(self) -> dict[str, int | None]:
        """The number of examples of each split to evaluate on; None for all."""
        return {"train": self.train_examples, "test": self.test_examples}

    @property
    def given_networks(self) -> list[str]:
        """The flags that read networks from files, as on a command line."""
        return [shlex.join(flag_words(self, name)) for name in (*CHECKPOINT_FLAGS, "pretrained") if getattr(self, name)]

    def checkpoint_of(self, letter: str) -> AnyPath | None:
        """Return the checkpoint of network A, B or C; None if it has none."""
        return {"A": self.checkpoint_a, "B": self.checkpoint_b, "C": self.checkpoint_c}[letter]

    def seed_of(self, letter: str) -> int:
        """Return the seed of network A, B or C."""
        chosen = {"A": self.seed_a, "B": self.seed_b, "C": self.seed_c}[letter]
        return 3 * self.seed + "ABC".index(letter) if chosen is None else chosen

    def examples_of(self, letter: str) -> Subset | None:
        """Return the train examples of network A, B or C; None if it has all."""
        return None

    def training_of(self, letter: str) -> Training:
        """Return the seed and the train examples of network A, B or C."""
        return Training(self.seed_of(letter), self.examples_of(letter))


@dataclass(frozen=True)
class CombinationConfig(Config):
    """Flags of experiments that measure combinations."""

    repair: Annotated[bool, Flag("restore the variance of activations in each combination (REPAIR)")] = False


@dataclass(frozen=True)
class CurveConfig(CombinationConfig):
    """Flags of experiments that measure curves of combinations between networks."""

    temperatures: Annotated[bool, Flag("also measure test losses at the best softmax temperature of each network")] = (
        False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperatures and self.test_examples == 1:
            raise UserError("--temperatures fits on one half of the test examples: use --test-examples 2 or more.")


@dataclass(frozen=True)
class LineConfig(CurveConfig):
    """Flags of sweeps with one network at each value."""

    points: Annotated[int, Flag("values of the sweep's parameter, including end points", at_least=2)] = 25


@dataclass(frozen=True)
class SweepConfig(LineConfig):
    """Flags of sweeps that sample networks at each value."""

    samples: Annotated[int, Flag("combinations drawn at each value", at_least=1)] = 5


RECIPE_FLAGS = ("epochs", "batch_size", "learning_rate", "weight_decay")  # part of a network's name
PROCESS_FLAGS = ("distributed", "coordinator", "processes", "process")  # differ between the processes of a run
# In an identity only with other values than these, so that older results stay valid.
YOUNGER_FLAGS: dict[str, Any] = {
    "temperatures": False,
    "frozen": (),
    "groups": "permutations",
    "matcher_steps": STEPS,
    "search_steps": 400,
}
YOUNGER_FIELDS = ("algorithm", "stages")  # of a recipe, in a network's key only if changed, for the same reason
SEED_FLAGS = ("seed_a", "seed_b", "seed_c")
CHECKPOINT_FLAGS = ("checkpoint_a", "checkpoint_b", "checkpoint_c")  # results identify networks by fingerprints instead


def require_own_training(experiment: str, config: Config) -> None:
    """Raise UserError if flags read networks from files."""
    if config.given_networks:
        raise UserError(f"{experiment} trains its own networks: remove {config.given_networks[0]}.")


def recipe(config: TrainingConfig) -> Recipe:
    """Return the setup's recipe with the changes that the flags make."""
    chosen = {name: getattr(config, name) for name in (*RECIPE_FLAGS, "checkpoint_every")}
    return dataclasses.replace(
        SETUPS[config.setup].recipe, **{name: value for name, value in chosen.items() if value is not None}
    )


def recipe_dict(config: TrainingConfig) -> dict[str, Any]:
    """Return the entries of the recipe that change the network."""
    own = recipe(config)
    usual = {name for name in YOUNGER_FIELDS if getattr(own, name) == getattr(Recipe, name)}
    return {name: value for name, value in dataclasses.asdict(own).items() if name not in {"checkpoint_every", *usual}}


def parse_flags(
    config: type[T],
    description: str,
    argv: list[str] | None = None,
    epilog: str = "",
    prog: str | None = None,
    without: Collection[str] = (),
) -> T:
    """Parse a command line whose defaults depend on the setup."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--setup", nargs="*", default=())
    chosen = tuple(name for name in first.parse_known_args(argv)[0].setup if name in SETUPS)
    return parse(config, description, argv, epilog, prog, without, default_flags(config, chosen))


def default_flags(config: type[TrainingConfig], setup: str | tuple[str, ...]) -> dict[str, Any]:
    """Return the default of each flag for a setup, or the general defaults for several setups."""
    defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(config)}
    setups = {setup} if isinstance(setup, str) else {*setup}
    for name, value in SETUPS[setups.pop()].flags if len(setups) == 1 else ():
        if name in defaults:
            is_list = isinstance(defaults[name], tuple) and not isinstance(value, tuple)
            defaults[name] = (value,) if is_list else value
    return defaults


def identity_flags(config: TrainingConfig) -> list[str]:
    """Return the flags that change a result, and with it the name of its folder."""
    return [name for name, flag in flags(type(config)).items() if flag.identity]


def command(name: str, config: TrainingConfig) -> str:
    """Return the command line that gives a config, in the form that started this program."""
    words = ["mcomb", name] if is_installed_command() else ["python", "-m", f"experiments.{name}"]
    defaults = default_flags(type(config), config.setup)
    for field in dataclasses.fields(config):
        if getattr(config, field.name) != defaults[field.name] and field.name not in (*vars(Output()), *PROCESS_FLAGS):
            words += flag_words(config, field.name)
    return shlex.join(words)


def flag_words(config: TrainingConfig, name: str) -> list[str]:
    """Return a flag and its values as the words of a command line."""
    value = getattr(config, name)
    value = flags(type(config))[name].none if value is None else value
    parts = value if isinstance(value, tuple) else () if value is True else (value,)
    return ["--" + name.replace("_", "-"), *map(str, parts)]


def differing_flags(config: TrainingConfig, other: TrainingConfig) -> list[str]:
    """Return the flags of `config` that differ from `other`, written as on a command line."""
    found = []
    for name in identity_flags(config):
        value = getattr(config, name)
        if value == getattr(other, name, value):
            continue
        flag = "--" + name.replace("_", "-")
        is_off = value is False or (value is None and flags(type(config))[name].none is None)
        found.append(f"no {flag}" if is_off else shlex.join(flag_words(config, name)))
    return found


def convert_config(config: Config, to: type[C], **changes: Any) -> C:
    """Convert a config to another experiment's: keep the flags that both have, then apply the changes."""
    names = {field.name for field in dataclasses.fields(to)} & {field.name for field in dataclasses.fields(config)}
    shared = {name: getattr(config, name) for name in names} | changes
    return to(**default_flags(to, shared["setup"]) | shared)
