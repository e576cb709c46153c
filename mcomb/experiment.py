"""One experiment from its flags to its figure: gets the networks, aligns them, measures a sweep, leaves results."""

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from mcomb import cli, figures
from mcomb.base import Apply, Params, fold_name, stream
from mcomb.checkpoint import Checkpoints, read_checkpoint
from mcomb.cli import Flag
from mcomb.combine import Draw, linear, mix
from mcomb.data import Dataset
from mcomb.evaluate import BATCH, choose_at_once, evaluate, predict, replicate
from mcomb.match import Matching, match_weights
from mcomb.models import classifier
from mcomb.permute import PermutationSpec, check_permuted
from mcomb.results import (
    METRICS,
    SPLITS,
    VARIANTS,
    Rows,
    atomic,
    barriers,
    digest,
    environment,
    table,
    writable,
    write_json,
)
from mcomb.setups import SETUPS, Setup
from mcomb.train import Recipe, initial_state, train


@dataclass(frozen=True)
class Config:
    """The flags that every experiment has."""

    setup: Annotated[str, Flag("model, dataset and recipe", choices=tuple(SETUPS))] = "resnet20-cifar10"
    width: Annotated[int, Flag("width multiplier: the first layer has 16·N units", at_least=1)] = 32
    points: Annotated[int, Flag("values of the sweep's parameter, end points included", at_least=2)] = 25
    samples: Annotated[int, Flag("combinations drawn at each value", at_least=1)] = 5
    train_images: Annotated[int | None, Flag("train images to evaluate on (default: all)", at_least=1)] = None
    test_images: Annotated[int | None, Flag("test images to evaluate on (default: all)", at_least=1)] = None
    seed: Annotated[int, Flag("root seed N; networks A, B, C have seeds 3N, 3N+1, 3N+2", at_least=0)] = 0
    seed_a: Annotated[int | None, Flag("seed of network A (default: from --seed)", at_least=0)] = None
    seed_b: Annotated[int | None, Flag("seed of network B (default: from --seed)", at_least=0)] = None
    checkpoint_a: Annotated[Path | None, Flag("orbax folder to take network A from instead of training")] = None
    checkpoint_b: Annotated[Path | None, Flag("orbax folder to take network B from instead of training")] = None
    epochs: Annotated[int | None, Flag("training epochs; 0 leaves networks untrained [setup]", at_least=0)] = None
    batch_size: Annotated[int | None, Flag("training images in a batch [setup]", at_least=1)] = None
    learning_rate: Annotated[float | None, Flag("peak learning rate [setup]", at_least=0)] = None
    weight_decay: Annotated[float | None, Flag("weight decay [setup]", at_least=0)] = None
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


RECIPE_FLAGS = ("epochs", "batch_size", "learning_rate", "weight_decay")
FOLDER_FLAGS = ("setup", "width")  # they name the folder above


@dataclass(frozen=True)
class Network:
    """A trained network, the name it goes by in the run folders, and its fingerprint."""

    name: str
    params: Params
    digest: str


class Workspace:
    """Everything the runs of one setup and width share: data, networks and matchings, made once and kept.

    out/<setup>/width-<w>/networks/<network>/      orbax checkpoints
                          matchings/<b>-to-<a>.npz
                          <experiment>/            results.json, samples.jsonl, figures
    A name carries whatever was set differently from its default, as in `uniform,seed=1,points=5`.
    """

    def __init__(self, config: Config):
        self.config = config
        self.setup: Setup = SETUPS[config.setup]
        self.home = config.out / config.setup / f"width-{config.width}"
        self.seconds: dict[str, float] = {}
        chosen = {name: getattr(config, name) for name in RECIPE_FLAGS}
        self.recipe: Recipe = dataclasses.replace(
            self.setup.recipe, **{name: value for name, value in chosen.items() if value is not None}
        )

    @cached_property
    def data(self) -> Dataset:
        """The dataset, all of it."""
        return self.setup.data(self.config.data_dir)

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
        return jax.eval_shape(self.init, 0)

    @cached_property
    def spec(self) -> PermutationSpec:
        """The permutation symmetries of the model."""
        return self.setup.spec(self.shapes)

    def folder(self, experiment: str) -> Path:
        """Where an experiment's results go."""
        config, default = self.config, type(self.config)()
        named = [
            f"{name}={Path(value).name if isinstance(value, Path) else value}"
            for name, flag in cli.flags(type(config)).items()
            if flag.identity and name not in FOLDER_FLAGS
            if (value := getattr(config, name)) not in (getattr(default, name), getattr(self.setup.recipe, name, None))
        ]
        return self.home / ",".join([experiment, *named]).replace("_", "-")

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
        recipe = dataclasses.asdict(self.recipe)
        del recipe["checkpoint_every"]
        checkpoints = Checkpoints(
            self.home / "networks" / name,
            {"setup": self.config.setup, "width": self.config.width, "seed": seed} | recipe,
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
        """B's parameters with its units matched to A's, which is checked to change nothing but their order."""
        permuted = self.spec.apply(self.matching(a, b).perms, b.params)
        check_permuted(self.apply, b.params, permuted, jnp.asarray(self.data.test.images[:64]))
        return permuted

    def matching(self, a: Network, b: Network) -> Matching:
        """The matching of B to A, found once and kept for just these two networks."""
        path = self.home / "matchings" / f"{b.name}-to-{a.name}.npz"
        of = [a.digest, b.digest]
        if path.is_file():
            with np.load(path) as kept:
                if kept["of"].tolist() == of:
                    perms = {name: kept[f"perms/{name}"] for name in self.spec.sizes}
                    return Matching(perms, float(kept["objective"]), tuple(kept["trace"].tolist()))
        print(f"matching {b.name} to {a.name} …", flush=True)
        with self.timed("matching"):
            matching = match_weights(self.spec, a.params, b.params, seed=self.config.seed)
        perms = {f"perms/{name}": perm for name, perm in matching.perms.items()}
        with atomic(writable(path.parent) / path.name) as temporary:
            np.savez(temporary, of=of, objective=matching.objective, trace=matching.trace, **perms)
        return matching

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Adds the seconds that its body takes to those spent on `what`."""
        start = time.monotonic()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + time.monotonic() - start


@dataclass(frozen=True)
class Sweep:
    """An experiment that varies one parameter and draws combinations of A and B at each of its values."""

    name: str
    title: str
    parameter: str
    label: str
    values: tuple[float, float]  # first and last
    draw: Draw
    paper: Mapping[str, Mapping[str, float]]  # the paper's barriers by setup


def measure(
    sweep: Sweep, workspace: Workspace, rows: Rows, values: np.ndarray, a: Network, b: Network
) -> dict[str, Any]:
    """The models, curves and agreement of a sweep, from the rows there are and the evaluation of all others."""
    config, data = workspace.config, workspace.data
    shares = np.repeat(values, config.samples)
    splits = {"train": data.train.first(config.train_images), "test": data.test.first(config.test_images)}
    networks = {"naive": (a.params, b.params), "aligned": (a.params, workspace.aligned(a, b))}
    tasks = [(split, "models", mix(linear), networks["naive"], np.array([0, 1], np.float32)) for split in SPLITS]
    tasks += [(split, name, sweep.draw, networks[name], shares) for split in SPLITS for name in VARIANTS]

    with (
        workspace.timed("evaluation"),
        tqdm(total=sum(len(task[-1]) for task in tasks), desc="evaluating", unit="net", dynamic_ncols=True) as bar,
    ):
        for split, name, draw, pair, parameters in tasks:
            names = [f"{name}/{split}/{i}" for i in range(len(parameters))]
            missing = [i for i, row in enumerate(names) if row not in rows]
            bar.update(len(names) - len(missing))
            if not missing:
                continue
            images, labels = replicate(splits[split])
            at_once = config.at_once or choose_at_once(workspace.apply, pair[0], images[:BATCH])
            per_call = min(len(names), max(config.samples, at_once * jax.local_device_count()))
            root = stream(config.seed, "coefficients", sweep.name)
            references = np.stack([predict(workspace.apply, network, images) for network in networks["naive"]])
            for start in range(0, len(missing), per_call):
                chunk = np.resize(missing[start : start + per_call], per_call)  # always of one shape
                metrics = evaluate(
                    workspace.apply,
                    draw,
                    replicate(pair),
                    parameters[chunk],
                    jnp.stack([fold_name(root, int(i)) for i in chunk]),
                    images,
                    labels,
                    references=references,
                    at_once=at_once,
                )
                done = zip(chunk[: len(missing) - start], *(metric.tolist() for metric in metrics), strict=False)
                new = [dict(zip(("of", *metrics._fields), (names[row[0]], *row[1:]), strict=True)) for row in done]
                rows.add(new)
                bar.update(len(new))

    def collect(name: str, split: str, field: str) -> Any:
        count = 2 if name == "models" else len(shares)
        return np.array([rows[f"{name}/{split}/{i}"][field] for i in range(count)])

    shape = (config.points, config.samples)
    return {
        "models": {
            model: {
                split: {metric: float(collect("models", split, metric)[i]) for metric in METRICS} for split in SPLITS
            }
            for i, model in enumerate("AB")
        },
        "curves": {
            name: {
                split: {metric: collect(name, split, metric).reshape(shape).tolist() for metric in METRICS}
                for split in SPLITS
            }
            for name in VARIANTS
        },
        "agreement": {
            name: {split: collect(name, split, "agreement").reshape(*shape, 4, 2).tolist() for split in SPLITS}
            for name in VARIANTS
        },
    }


def run_sweep(sweep: Sweep, config: Config) -> dict[str, Any]:
    """The results of a sweep, measured where they are not yet, and left in the run's folder with their figure."""
    start = time.monotonic()
    workspace = Workspace(config)
    folder = workspace.folder(sweep.name)
    print(f"results go to {writable(folder)}", flush=True)
    a, b = workspace.network("A"), workspace.network("B")
    values = np.linspace(*sweep.values, config.points, dtype=np.float32)
    identity = {
        "config": config_dict(workspace),
        "networks": {"A": a.digest, "B": b.digest},
        "values": values.tolist(),
    }
    results = finished(folder, identity)
    if results is None:
        measured = measure(sweep, workspace, Rows(folder, identity), values, a, b)
        results = {
            "experiment": sweep.name,
            "title": f"{workspace.setup.title}, width {config.width}: {sweep.title}",
            **identity,
            "environment": environment(),
            "parameter": {"name": sweep.parameter, "label": sweep.label, "values": values.tolist()},
            **measured,
            "barriers": barriers(measured["models"], measured["curves"]),
            "paper": sweep.paper.get(config.setup),
            "durations": workspace.seconds,
            "seconds": time.monotonic() - start,
        }
        write_json(folder / "results.json", results)
    figures.sweep(results, folder)
    print(results["title"])
    print(table(results))
    return results


def config_dict(workspace: Workspace) -> dict[str, Any]:
    """What a result depends on: the flags that change it, and the recipe they lead to."""
    config = workspace.config
    chosen = {name: getattr(config, name) for name, flag in cli.flags(type(config)).items() if flag.identity}
    return json.loads(json.dumps(chosen | {"recipe": dataclasses.asdict(workspace.recipe)}, default=str))


def finished(folder: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """The results in a folder, if they are there and of just this run."""
    path = folder / "results.json"
    results = json.loads(path.read_text()) if path.is_file() else {}
    return results if all(results.get(name) == value for name, value in identity.items()) and results else None


def main(sweep: Sweep, description: str, argv: list[str] | None = None) -> None:
    """The command line of a sweep."""
    setups = "\n".join(
        f"  {name:18}{recipe.epochs} epochs, batch {recipe.batch_size}, "
        f"learning rate {recipe.learning_rate:g}, weight decay {recipe.weight_decay:g}"
        for name, recipe in ((name, setup.recipe) for name, setup in SETUPS.items())
    )
    cli.run(lambda: run_sweep(sweep, cli.parse(Config, description, argv, epilog=f"setups:\n{setups}")))
