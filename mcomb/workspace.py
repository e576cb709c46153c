"""What the experiments of one setup and width share: flags, folders, networks, matchings, measuring."""

import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mcomb import cli
from mcomb.base import Apply, Params, progress_bar, stream
from mcomb.checkpoint import Checkpoints, read_checkpoint
from mcomb.cli import Flag
from mcomb.combine import Draw
from mcomb.data import Dataset, Split
from mcomb.derive import permutation_spec
from mcomb.evaluate import BATCH, Metrics, Score, choose_at_once, evaluate, replicate, score
from mcomb.matchers import MATCHERS, match
from mcomb.models import classifier
from mcomb.permute import PermutationSpec, check_spec
from mcomb.repair import repaired
from mcomb.results import Rows, atomic, digest, writable
from mcomb.setups import SETUPS, Setup
from mcomb.train import Recipe, initial_state, train
from mcomb.weights import Matching, match_weights


@dataclass(frozen=True)
class Config:
    """The flags that every experiment has."""

    setup: Annotated[str, Flag("model, dataset and recipe", choices=tuple(SETUPS))] = "resnet20-cifar10"
    width: Annotated[int, Flag("width multiplier: the first layer has 16·N units", at_least=1)] = 32
    matcher: Annotated[str, Flag("how units are matched", choices=MATCHERS)] = "weights"
    train_images: Annotated[int | None, Flag("train images to evaluate on (default: all)", at_least=1)] = None
    test_images: Annotated[int | None, Flag("test images to evaluate on (default: all)", at_least=1)] = None
    seed: Annotated[int, Flag("root seed N; networks A, B, C have seeds 3N, 3N+1, 3N+2", at_least=0)] = 0
    seed_a: Annotated[int | None, Flag("seed of network A (default: from --seed)", at_least=0)] = None
    seed_b: Annotated[int | None, Flag("seed of network B (default: from --seed)", at_least=0)] = None
    seed_c: Annotated[int | None, Flag("seed of network C (default: from --seed)", at_least=0)] = None
    checkpoint_a: Annotated[Path | None, Flag("orbax folder to take network A from instead of training")] = None
    checkpoint_b: Annotated[Path | None, Flag("orbax folder to take network B from instead of training")] = None
    checkpoint_c: Annotated[Path | None, Flag("orbax folder to take network C from instead of training")] = None
    epochs: Annotated[int | None, Flag("training epochs; 0 leaves networks untrained [setup]", at_least=0)] = None
    batch_size: Annotated[int | None, Flag("training images in a batch [setup]", at_least=1)] = None
    learning_rate: Annotated[float | None, Flag("peak learning rate [setup]", at_least=0)] = None
    weight_decay: Annotated[float | None, Flag("weight decay [setup]", at_least=0)] = None
    checkpoint_every: Annotated[int | None, Flag("epochs between checkpoints [setup]", at_least=1, identity=False)] = (
        None
    )
    data_dir: Annotated[
        Path | None, Flag("CIFAR-10's archive or folder (default: $MCOMB_DATA_DIR, else TFDS)", identity=False)
    ] = None
    out: Annotated[Path, Flag("root folder of all runs", identity=False)] = Path("runs")
    steps_per_call: Annotated[
        int | None, Flag("training steps in one dispatch (default: automatic)", at_least=1, identity=False)
    ] = None
    at_once: Annotated[
        int | None, Flag("combinations side by side on a device (default: automatic)", at_least=1, identity=False)
    ] = None


@dataclass(frozen=True)
class CombinationConfig(Config):
    """The flags of an experiment that measures combinations."""

    repair: Annotated[bool, Flag("shift and rescale the units of each combination (REPAIR)")] = False


@dataclass(frozen=True)
class LineConfig(CombinationConfig):
    """The flags of a sweep with one network at each value."""

    points: Annotated[int, Flag("values of the sweep's parameter, end points included", at_least=2)] = 25


@dataclass(frozen=True)
class SweepConfig(LineConfig):
    """The flags of a sweep that samples networks at each value."""

    samples: Annotated[int, Flag("combinations drawn at each value", at_least=1)] = 5


MATCHING_IMAGES = 10_000  # of the train split, for matchers to see: more would change little and cost much
MATCHING_FIELDS = tuple(field.name for field in dataclasses.fields(Matching) if field.name != "perms")
RECIPE_FLAGS = ("epochs", "batch_size", "learning_rate", "weight_decay")  # they name a network
# Train images whose statistics --repair takes; each combination pays for them. On digits more change nothing.
REPAIR_IMAGES = 2 * BATCH


@dataclass(frozen=True)
class Network:
    """A trained network, the name it goes by in the run folders, and its fingerprint."""

    name: str
    params: Params
    digest: str


def _in_a_name(value: Any) -> str:
    """A flag's value as a part of a folder's name."""
    if isinstance(value, tuple):
        return "..".join(map(_in_a_name, value))
    return value.name if isinstance(value, Path) else f"{value:g}" if isinstance(value, float) else str(value)


@cache
def _load(setup: str, data_dir: Path | None) -> Dataset:
    return SETUPS[setup].data(data_dir)


def _write_matching(path: Path, of: list[str], matching: Matching, seconds: float) -> None:
    kept: dict[str, Any] = {name: getattr(matching, name) for name in MATCHING_FIELDS}
    perms = {f"perms/{name}": perm for name, perm in matching.perms.items()}
    with atomic(writable(path.parent) / path.name) as temporary:
        np.savez(temporary, **kept | perms, of=of, seconds=seconds)


def _read_matching(path: Path, of: list[str], spec: PermutationSpec) -> tuple[Matching, float] | None:
    """A matching that was kept and the seconds it took, if it is there, whole, and of just these networks."""
    if not path.is_file():
        return None
    with np.load(path) as file:
        kept: dict[str, Any] = dict(file)
    perms = {name: f"perms/{name}" for name in spec.sizes}
    if not {"of", "seconds", *MATCHING_FIELDS, *perms.values()} <= kept.keys() or kept["of"].tolist() != of:
        return None
    values: dict[str, Any] = {name: kept[name].tolist() for name in MATCHING_FIELDS}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return Matching({name: kept[key] for name, key in perms.items()}, **values), kept["seconds"].item()


class Task(NamedTuple):
    """Combinations to measure: k parameters, each given with its own key to `draw` over the networks.

    `ends` are, for a parameter, the networks that the draw combines, where these are not those given to it.
    """

    draw: Draw
    networks: tuple[Params, ...]
    parameters: Any  # arrays with k rows
    like: str | None = None  # the experiment that has the same keys, if not this one alone
    ends: Callable[..., tuple[Params, ...]] | None = None

    def __len__(self) -> int:
        return len(jax.tree.leaves(self.parameters)[0])


class Workspace:
    """Everything the runs of one setup and width share: data, networks and matchings, made once and kept.

    out/<setup>/width-<w>/networks/<network>/      orbax checkpoints
                          matchings/<b>-to-<a>.npz, and <b>-to-<a>,matcher=<m>.npz
                          <experiment>/            results.json, samples.jsonl, figures
    A name carries whatever was set differently from its default, as in `uniform,seed=1,points=5`.
    """

    def __init__(self, config: Config):
        self.config = config
        self.setup: Setup = SETUPS[config.setup]
        self.home = config.out / config.setup / f"width-{config.width}"
        self.seconds: dict[str, float] = {}
        chosen = {name: getattr(config, name) for name in (*RECIPE_FLAGS, "checkpoint_every")}
        self.recipe: Recipe = dataclasses.replace(
            self.setup.recipe, **{name: value for name, value in chosen.items() if value is not None}
        )

    @cached_property
    def data(self) -> Dataset:
        """The dataset, all of it."""
        return _load(self.config.setup, self.config.data_dir)

    @cached_property
    def apply(self) -> Apply:
        """The function from parameters and raw pixels to logits."""
        return classifier(self.setup.model(self.config.width), self.data.mean, self.data.std)

    def init(self, seed: int) -> Params:
        """A new network's parameters."""
        model, images = self.setup.model(self.config.width), jnp.zeros((1, *self.setup.image))
        return jax.jit(model.init)(stream(seed, "init"), images)["params"]

    @cached_property
    def shapes(self) -> Params:
        """The shapes of a network's parameters."""
        return jax.eval_shape(lambda: self.init(0))

    @cached_property
    def spec(self) -> PermutationSpec:
        """The permutation symmetries of the model."""
        images = jax.ShapeDtypeStruct((1, *self.setup.image), jnp.uint8)
        return permutation_spec(self.apply, self.shapes, images)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What a result depends on: the flags that change it, and the recipe they lead to."""
        chosen = {name: getattr(self.config, name) for name in self._identity_flags() if name not in RECIPE_FLAGS}
        return json.loads(json.dumps(chosen | {"recipe": self._recipe_dict()}, default=str))

    def folder(self, experiment: str) -> Path:
        """Where an experiment's results go."""
        parts = [experiment]
        for name in self._identity_flags():
            value, usual = getattr(self.config, name), getattr(type(self.config), name)
            if value not in (usual, getattr(self.setup.recipe, name, usual)) and name not in ("setup", "width"):
                flag = name.replace("_", "-")
                parts.append(flag if value is True else f"{flag}={_in_a_name(value)}")
        return self.home / ",".join(parts)

    def _identity_flags(self) -> list[str]:
        return [name for name, flag in cli.flags(type(self.config)).items() if flag.identity]

    def _recipe_dict(self) -> dict[str, Any]:
        """What of the recipe changes the network."""
        return {name: value for name, value in dataclasses.asdict(self.recipe).items() if name != "checkpoint_every"}

    def network(self, letter: str) -> Network:
        """Network A, B or C: the given checkpoint, or the one trained from its seed."""
        given = getattr(self.config, f"checkpoint_{letter.lower()}", None)
        if given:
            params = read_checkpoint(given, self.shapes)
            return Network(f"{given.name}-{digest(params)}", params, digest(params))
        seed = getattr(self.config, f"seed_{letter.lower()}", None)
        return self.trained(3 * self.config.seed + "ABC".index(letter) if seed is None else seed)

    def trained(self, seed: int) -> Network:
        """The network of a seed, trained as far as it is not yet."""
        changed = [
            f"{name.replace('_', '-')}={getattr(self.recipe, name)}"
            for name in RECIPE_FLAGS
            if getattr(self.recipe, name) != getattr(self.setup.recipe, name)
        ]
        name = ",".join([f"seed-{seed}", *changed])
        checkpoints = Checkpoints(
            self.home / "networks" / name,
            {"setup": self.config.setup, "width": self.config.width, "seed": seed} | self._recipe_dict(),
        )
        if checkpoints.epoch != self.recipe.epochs:
            with self.timed("training"):
                self._train(seed, checkpoints)
        params = read_checkpoint(checkpoints.folder, self.shapes)
        return Network(name, params, digest(params))

    def _train(self, seed: int, checkpoints: Checkpoints) -> None:
        data, recipe = self.data.train, self.recipe
        state = initial_state(self.init(seed), recipe, len(data.labels))
        if checkpoints.epoch is not None:
            state = checkpoints.restore(state)
        elif recipe.epochs == 0:
            checkpoints.save(0, state)
        say = f"training seed {seed}"
        for epoch, trained, _ in train(
            self.apply, state, data, recipe, seed, per_call=self.config.steps_per_call, describe=say
        ):
            if epoch % recipe.checkpoint_every == 0 or epoch == recipe.epochs:
                checkpoints.save(epoch, trained)

    def aligned(self, a: Network, b: Network) -> Params:
        """B's parameters with its units matched to A's by the chosen matcher."""
        return self.permuted(b, self.matching(a, b, self.config.matcher)[0])

    def permuted(self, network: Network, matching: Matching) -> Params:
        """The parameters with their units in another order, which is checked to change nothing else."""
        images = jnp.asarray(self.data.test.images[:64])
        check_spec(self.apply, network.params, self.spec, images, perms=matching.perms)
        return self.spec.apply(matching.perms, network.params)

    def matching(self, a: Network, b: Network, matcher: str, orders: int = 1) -> tuple[Matching, float]:
        """The matching of B to A and the seconds it took, found once and kept for just these two networks.

        It depends on the networks and the matcher alone: whatever is evaluated, the matcher sees the same images. Of
        several `orders` of visits, weight matching keeps the best.
        """
        name = f"{b.name}-to-{a.name}"
        name += f",matcher={matcher}" if matcher != "weights" else ""
        name += f",orders={orders}" if orders > 1 else ""
        path, of = self.home / "matchings" / f"{name}.npz", [a.digest, b.digest]
        if kept := _read_matching(path, of, self.spec):
            return kept
        how = matcher if orders == 1 else f"{matcher}, best of {orders} orders"
        print(f"matching {b.name} to {a.name} by {how} …", flush=True)
        start = time.monotonic()
        with self.timed("matching"):
            if orders > 1:
                matching = match_weights(self.spec, a.params, b.params, restarts=orders)
            else:
                images = self.data.train.first(MATCHING_IMAGES)
                matching = match(self.spec, a.params, b.params, self.apply, *images, matcher=matcher)
        seconds = time.monotonic() - start
        _write_matching(path, of, matching, seconds)
        return matching, seconds

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Adds the seconds that its body takes to those spent on `what`."""
        start = time.monotonic()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + time.monotonic() - start

    @cached_property
    def splits(self) -> dict[str, Split]:
        """The images to evaluate on, on every device."""
        counts = {"train": self.config.train_images, "test": self.config.test_images}
        return {name: replicate(getattr(self.data, name).first(count)) for name, count in counts.items()}

    def scores(self, networks: Mapping[str, Params]) -> dict[str, dict[str, Score]]:
        """The score of each network by itself on each split."""
        with self.timed("evaluation"):
            return {
                name: {split: score(self.apply, params, *images) for split, images in self.splits.items()}
                for name, params in networks.items()
            }

    def _prepared(self, task: Task) -> tuple[Apply, Draw, tuple[Any, ...]]:
        """The function, the draw and the networks that give a task's combinations, repaired or as they are."""
        networks = replicate(task.networks)
        if not getattr(self.config, "repair", False):
            return self.apply, task.draw, networks
        images = self.data.train.first(REPAIR_IMAGES).images
        return repaired(self.spec, self.apply, task.draw, networks, images, ends=task.ends)

    def measure(
        self, rows: Rows, tasks: Mapping[str, Task], references: Mapping[str, np.ndarray], per_call: int = 8
    ) -> dict[str, dict[str, Metrics]]:
        """The metrics of each task on each split, from the rows there are and the evaluation of all others.

        `references` are, for each split, the labels of the two networks to count agreement with. A compiled call
        takes at least `per_call` combinations.
        """
        seed, experiment = self.config.seed, rows.identity["experiment"]
        roots = {name: stream(seed, "coefficients", task.like or experiment) for name, task in tasks.items()}
        network = next(iter(tasks.values())).networks[0]
        at_once = self.config.at_once or choose_at_once(self.apply, network, self.splits["test"].images[:BATCH])
        size = max(per_call, getattr(self.config, "samples", 1), at_once * jax.local_device_count())
        prints = {name: digest(task.networks) for name, task in tasks.items()}
        total = len(self.splits) * sum(len(task) for task in tasks.values())
        with self.timed("evaluation"), progress_bar(total, "net", "evaluating") as bar:
            for split, (name, task) in itertools.product(self.splits, tasks.items()):
                of = prints[name]  # another matching makes other networks of the same name
                missing = [i for i in range(len(task)) if rows.get(f"{name}/{split}/{i}", {}).get("networks") != of]
                bar.update(len(task) - len(missing))
                if not missing:
                    continue
                apply, draw, networks = self._prepared(task)
                for start in range(0, len(missing), size):
                    chunk = missing[start : start + size]
                    same_size = np.resize(chunk, min(size, len(task)))  # repeats some, and compiles once
                    metrics = evaluate(
                        apply,
                        draw,
                        networks,
                        jax.tree.map(lambda values, these=same_size: values[these], task.parameters),
                        jax.vmap(jax.random.fold_in, (None, 0))(roots[name], same_size),
                        *self.splits[split],
                        references=references[split],
                        at_once=at_once,
                    )
                    lists = [values.tolist() for values in metrics]
                    rows.add(
                        {"of": f"{name}/{split}/{i}", "networks": of} | dict(zip(metrics._fields, values, strict=True))
                        for i, *values in zip(chunk, *lists, strict=False)
                    )
                    bar.update(len(chunk))

        def collected(name: str, split: str, field: str) -> np.ndarray:
            return np.array([rows[f"{name}/{split}/{i}"][field] for i in range(len(tasks[name]))])

        return {
            name: {split: Metrics(*(collected(name, split, f) for f in Metrics._fields)) for split in self.splits}
            for name in tasks
        }
