"""The cache on disk of trained networks and matchings, and the names of all folders of a run.

    out/<setup>/width-<w>/networks/<network>/      orbax checkpoints
                          matchings/<b>-to-<a>.npz, and <b>-to-<a>,matcher=<m>.npz
                          <experiment>/            results.json, samples.jsonl, figures

A name carries whatever was set differently from its default, as in `uniform,seed=1,points=5`. Of several processes
that want the same network or matching, one makes it while the others wait.
"""

import hashlib
import io
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mcomb.errors import UserError
from mcomb.io.checkpoints import read_checkpoint
from mcomb.io.fingerprints import fingerprint
from mcomb.io.locks import lock
from mcomb.io.paths import AnyPath, atomic, make_writable
from mcomb.lab.cache import versions
from mcomb.lab.data.datasets import Split, Splits
from mcomb.lab.data.splits import Subset
from mcomb.lab.runs.flags import CHECKPOINT_FLAGS, RECIPE_FLAGS, TrainingConfig, identity_flags, recipe, recipe_dict
from mcomb.lab.runs.results import readable_bytes
from mcomb.lab.setups import SETUPS, Setup
from mcomb.lab.training.checkpoints import TrainingCheckpoints
from mcomb.lab.training.side_by_side import Budget, run_side_by_side
from mcomb.lab.training.train import Needs, Stopped, compile_training, initial_state, train, training_bar
from mcomb.matching.matchers import as_matcher
from mcomb.matching.matching import Matching
from mcomb.matching.weights import match_weights
from mcomb.runtime.batching import MEMORY_VARIABLE, free_memory
from mcomb.runtime.devices import describe_devices, device_mesh, matrix_rate, meshes_of, replicate
from mcomb.runtime.interrupts import unsaved
from mcomb.runtime.processes import are_several, from_first, require_agreement, wait_for_all
from mcomb.runtime.progress import say, warn
from mcomb.runtime.training_loop import TrainState, all_finite
from mcomb.symmetry.spec import PermutationSpec
from mcomb.trees import Apply, Params, require_finite

PRETRAINED = Path(__file__).parents[3] / "pretrained"  # in a clone
# JAX's events of the work that it does once for each program.
COMPILATION = ("/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration")
MATCHING_IMAGES = 10_000  # of the train split, for matchers to see: more would change little and cost much
HOUR = 3600.0  # seconds
EMBEDDED = "mlp-digits"  # the setup for a first look
SLOWEST = 1e10  # floating-point operations a second that any machine reaches


class NotKeptError(Exception):
    """Something that is wanted as it is kept has not been made yet."""


class Training(NamedTuple):
    """What one network is trained from: its seed, and its train images if they are not all."""

    seed: int
    images: Subset | None = None


@dataclass(frozen=True)
class Network:
    """A network, the name it goes by in the run folders, and its fingerprint."""

    name: str
    params: Params
    fingerprint: str


@dataclass(frozen=True)
class KeptMatching:
    """A matching, the seconds it took without compilation, and its fingerprint."""

    matching: Matching
    seconds: float
    fingerprint: str


@cache
def _compilations() -> list[float]:
    """Return a list to which JAX adds the seconds of every compilation from now on."""
    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event in COMPILATION:
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return seconds


@cache
def load_data(setup: str, data_dir: Path | None) -> tuple[Splits, str]:
    """A setup's images, and their fingerprint."""
    splits = SETUPS[setup].dataset.load(data_dir)
    found = fingerprint(splits)
    require_agreement("images", found)
    return splits, found


class Store:
    """The networks and matchings of one setup and width, trained and matched where they are not kept yet.

    With `make=False` nothing is made: what is missing raises NotKeptError.
    """

    def __init__(self, config: TrainingConfig, make: bool = True):
        self.config: Any = config
        self.make = make
        self.setup: Setup = SETUPS[config.setup]
        self.recipe = recipe(config)
        self.home = config.out / config.setup / f"width-{config.width}"
        self.seconds: dict[str, float] = {}  # spent on each kind of work
        self._networks: dict[Training, Network] = {}  # that were trained and have been read

    @property
    def data(self) -> Splits:
        """The dataset, all of it."""
        return load_data(self.config.setup, self.config.data_dir)[0]

    @property
    def data_fingerprint(self) -> str:
        """The same for the same images, wherever they were read from."""
        return load_data(self.config.setup, self.config.data_dir)[1]

    @property
    def apply(self) -> Apply:
        """The function from parameters and raw pixels to logits."""
        return self.setup.apply(self.config.width, self.config.dtype)

    @property
    def spec(self) -> PermutationSpec:
        """The permutation symmetries of the networks."""
        return self.setup.spec(self.config.width, self.config.dtype)

    @cache  # noqa: B019 (a store lives as long as its run)
    def given(self, letter: str) -> Network | None:
        """Network A, B or C if it is given: by a checkpoint, or as one of those that come with the repository."""
        path = getattr(self.config, f"checkpoint_{letter.lower()}")
        if path is None and not self.config.pretrained:
            return None
        name = _short(path.stem) if path else f"pretrained-{self.seed(letter)}"
        path = path or self._pretrained(letter)
        params = read_checkpoint(path, self.setup.shapes(self.config.width))
        require_finite(f"checkpoint {path}", params)
        return Network(f"{name}-{fingerprint(params)}", params, fingerprint(params))

    def seed(self, letter: str) -> int:
        """The seed of network A, B or C."""
        chosen = getattr(self.config, f"seed_{letter.lower()}")
        return 3 * self.config.seed + "ABC".index(letter) if chosen is None else chosen

    def training(self, letter: str) -> Training:
        """What network A, B or C is trained from."""
        return Training(self.seed(letter), self.config.images_of(letter))

    def trainings(self, letters: str) -> dict[str, Training]:
        """What the networks that are not given are trained from, by letter; an error if two would be the same."""
        seeded = {x: self.training(x) for x in letters if getattr(self.config, f"checkpoint_{x.lower()}") is None}
        for one, other in itertools.combinations(seeded, 2):
            if seeded[one] == seeded[other]:
                raise UserError(f"Networks {one} and {other} both have seed {seeded[one].seed}: use different seeds.")
        return {} if self.config.pretrained else seeded

    def network_name(self, letter: str) -> str:
        """The name of network A, B or C in the run's folders."""
        given = self.given(letter)
        return given.name if given else self._name(self.training(letter))

    def trained_so_far(self, training: Training) -> tuple[str, int]:
        """The name of a network, and for how many epochs it has been trained."""
        return self._name(training), from_first(lambda: self._checkpoints(training).epoch or 0)

    def _pretrained(self, letter: str) -> Path:
        """The file of a network that comes with the repository."""
        if changed := [name for name in RECIPE_FLAGS if getattr(self.config, name) is not None]:
            raise UserError(f"--pretrained networks have a fixed recipe: remove --{changed[0].replace('_', '-')}.")
        path = pretrained_path(self.config.setup, self.config.width, self.seed(letter))
        if not path.is_file():
            raise UserError(
                f"No pretrained network {path.relative_to(PRETRAINED)}: remove --pretrained, or use "
                f"{_there(path.parent)}."
            )
        return path

    def folder(self, experiment: str) -> AnyPath:
        """Where an experiment's results go; given networks are named with their fingerprints."""
        parts = [experiment]
        for name in identity_flags(self.config):
            value, default = getattr(self.config, name), getattr(type(self.config), name)
            if value not in (default, getattr(self.setup.recipe, name, default)) and name not in ("setup", "width"):
                flag = name.replace("_", "-")
                given = self.given(name[-1].upper()) if name in CHECKPOINT_FLAGS else None
                parts.append(flag if value is True else f"{flag}={_in_a_name(given.name if given else value)}")
        return self.home / ",".join(parts)

    def networks(self, letters: str) -> dict[str, Network]:
        """Networks A, B and C, by letter: those that are given, and the others trained from their seeds."""
        wanted = self.trainings(letters)
        given = {letter: self.given(letter) for letter in letters}
        trained = self.train_networks(tuple(wanted.values()))
        return {letter: network or trained[wanted[letter]] for letter, network in given.items()}

    def train_networks(self, trainings: Sequence[Training]) -> dict[Training, Network]:
        """Some networks, trained as far as they are not yet: side by side, on devices of their own.

        Another process that wants one of them waits until all are trained.

        Each has an equal share of the devices, whether others of them are trained already or not, and a training
        goes on with as many devices as it had. So a network depends on what was asked for alone.
        """
        trainings = tuple(dict.fromkeys(trainings))
        unfinished = self._unfinished(trainings)
        if unfinished and not self.make:
            raise NotKeptError(self._name(unfinished[0]))
        if unfinished:
            share = device_share(len(trainings))
            from_first(make_writable, self.home / "networks")
            with ExitStack() as locks:
                for name in sorted(
                    map(self._name, unfinished)
                ):  # in one order, so that no two processes wait for each other
                    path = self.home / "networks" / f".{name}.lock"
                    locks.enter_context(lock(path, f"training {name}"))
                with self.timed("training"):
                    self._train_side_by_side(self._unfinished(unfinished), share)
                    wait_for_all("training")
        return {training: self._trained(training) for training in trainings}

    def _unfinished(self, trainings: Sequence[Training]) -> list[Training]:
        return from_first(lambda: [one for one in trainings if self._read_trained(one) is None])

    def _train_side_by_side(self, trainings: Sequence[Training], share: int) -> None:
        """Trains networks, each on `share` devices or on as many as it has begun with."""
        _ = self.data  # read once, before there are threads
        by_size: dict[int, list[Training]] = {}
        for training in trainings:
            begun_with = None if are_several() else self._checkpoints(training).device_count
            by_size.setdefault(min(begun_with or share, len(jax.devices())), []).append(training)
        on_cpu = jax.default_backend() == "cpu"
        budget = Budget(from_first(free_memory) * (len(jax.local_devices()) if on_cpu else 1))
        for size, group in by_size.items():
            meshes = meshes_of(size)
            lanes = [(mesh, group[i :: len(meshes)], budget) for i, mesh in enumerate(meshes)]
            run_side_by_side(self._train_in_turn, lanes)

    def _train_in_turn(self, lane: tuple[Mesh, Sequence[Training], Budget], stop: Event) -> None:
        mesh, trainings, budget = lane
        for training in trainings:
            self._train(training, mesh, budget, stop)

    def _train(self, training: Training, mesh: Mesh, budget: Budget, stop: Event) -> None:
        checkpoints, data, recipe, seed = self._checkpoints(training), self.data.train, self.recipe, training.seed
        if training.images:
            data = data.take(training.images.rows(data.labels))
        describe = f"training {self._name(training)}"
        with ExitStack() as held:
            # The bar comes first: compiling takes seconds, and making the first state another one or two.
            bar = held.enter_context(training_bar(recipe, len(data.labels), checkpoints.step, describe))
            if recipe.epochs:
                steps = recipe.epochs * (len(data.labels) // recipe.batch_size) - checkpoints.step
                mesh, needs = self._compile_to_fit(data, mesh, budget.size, describe)
                sizes = f"{readable_bytes(needs.memory)} of {readable_bytes(budget.size)}"
                wait = partial(say, f"{describe}: waiting for memory ({sizes})")
                shared = needs.memory if jax.default_backend() == "cpu" else 0.0
                held.enter_context(budget.reserve(shared, stop, wait))
                self._say_if_long(needs.flop * steps, mesh, describe)
            state = initial_state(self.setup.init(self.config.width, seed), recipe, len(data.labels))
            if checkpoints.records:
                state = checkpoints.restore(state)
            elif recipe.epochs == 0:
                checkpoints.save(0, replicate(state, mesh), mesh)
            before = int(state.step)
            how: dict[str, Any] = {"mesh": mesh, "per_call": self.config.steps_per_call, "stop": stop}
            how |= {"describe": describe, "bar": bar, "begun": held.enter_context(unsaved())}
            epochs = train(self.apply, state, data, recipe, seed, **how)
            del state  # a network may fill half of the memory
            try:
                for epoch, trained, _ in epochs:
                    if epoch % recipe.checkpoint_every == 0 or epoch == recipe.epochs:
                        checkpoints.save(epoch, trained, mesh)
            except Stopped as stopped:
                self._save_stopped(checkpoints, stopped.state, before, len(data.labels), mesh)
                raise

    def _compile_to_fit(self, data: Split, mesh: Mesh, free: float, describe: str) -> tuple[Mesh, Needs]:
        """Compile the step of a training on a mesh, or on one device of a CPU if only that fits into the free memory.

        Each device has a copy of the weights, and those of a CPU share its memory.
        """
        alone = [device_mesh(mesh.devices.tolist()[:1])] if mesh.size > 1 and jax.default_backend() == "cpu" else []
        for candidate in (mesh, *([] if are_several() else alone)):
            shapes = self.setup.shapes(self.config.width)
            how = (self.recipe, candidate, self.config.steps_per_call)
            needs = compile_training(self.apply, shapes, data, *how)
            if needs.memory <= free:
                if candidate is not mesh:
                    say(f"{describe} on {describe_devices(candidate)} to fit into {readable_bytes(free)}")
                return candidate, needs
        raise UserError(
            f"{describe} needs {readable_bytes(needs.memory)} of memory, but only {readable_bytes(free)} is free: "
            f"reduce --width or --batch-size, use --setup {EMBEDDED}, or set {MEMORY_VARIABLE}."
        )

    def _say_if_long(self, flop: float, mesh: Mesh, describe: str) -> None:
        """Say how long a training takes if even matrix products at full speed would take more than an hour."""
        if flop < HOUR * SLOWEST:
            return
        hours = flop / matrix_rate(mesh) / HOUR
        if hours > 1:
            time = f"{hours / 24:,.0f} days" if hours > 48 else f"{hours:.0f} hours"
            say(f"{describe} takes {time} or more on {describe_devices(mesh)}: --setup {EMBEDDED} takes a minute")

    def _save_stopped(
        self, checkpoints: TrainingCheckpoints, state: TrainState, before: int, images: int, mesh: Mesh
    ) -> None:
        """Saves how far a training has come beyond the step `before`. With other processes it could not: they go on."""
        epoch, within = divmod(int(state.step), images // self.recipe.batch_size)
        if int(state.step) > before and not are_several() and all_finite(state.params):
            checkpoints.save(None if within else epoch, state, mesh)

    def _trained(self, training: Training) -> Network:
        """A network that is trained already."""
        network = self._read_trained(training)
        if network is None:
            raise UserError(f"{self.home / 'networks' / self._name(training)} changed during the run: run it again.")
        return network

    def _read_trained(self, training: Training) -> Network | None:
        """A network that is trained to its end and whole, read once."""
        if training not in self._networks:
            checkpoints = self._checkpoints(training)
            done = checkpoints.epoch == self.recipe.epochs
            params = checkpoints.read_params(self.setup.shapes(self.config.width)) if done else None
            if params is None:
                return None
            self._networks[training] = Network(self._name(training), params, fingerprint(params))
        return self._networks[training]

    def _checkpoints(self, training: Training) -> TrainingCheckpoints:
        made_from = {"setup": self.config.setup, "width": self.config.width, "seed": training.seed}
        made_from |= recipe_dict(self.config)
        made_from |= {"images": training.images._asdict()} if training.images else {}
        made_from |= {"dtype": self.config.dtype} if self._other_dtype else {}
        return TrainingCheckpoints(self.home / "networks" / self._name(training), made_from)

    def _name(self, training: Training) -> str:
        """The name of a network: its seed, its images if they are not all, and what its recipe has been changed in."""
        changed = [
            f"{name.replace('_', '-')}={getattr(self.recipe, name)}"
            for name in RECIPE_FLAGS
            if getattr(self.recipe, name) != getattr(self.setup.recipe, name)
        ]
        images = [training.images.name] if training.images else []
        return ",".join([f"seed-{training.seed}", *images, *changed, *self._other_dtype])

    @property
    def _other_dtype(self) -> list[str]:
        """What the name of something says of the dtype that it was computed in: nothing of float32."""
        return [f"dtype={self.config.dtype}"] if self.config.dtype != "float32" else []

    def matching(self, a: Network, b: Network, matcher: str, restarts: int = 1) -> KeptMatching:
        """The matching of B to A, found once and kept for just these two networks.

        It depends on the networks, the matcher and the dataset alone: whatever is evaluated, the matcher sees the
        same images. Of several `restarts`, weight matching keeps the best.
        """
        path = self.matching_path(a.name, b.name, matcher, restarts)
        name = path.name.removesuffix(".npz")
        made_from = [a.fingerprint, b.fingerprint, f"version {versions.MATCHING}"]
        if matcher != "weights":
            made_from += [self.data_fingerprint, *self._other_dtype]
        kept = from_first(_read_matching, path, made_from, self.spec)
        if kept is None:
            if not self.make:
                raise NotKeptError(name)
            from_first(make_writable, path.parent)
            with lock(path.parent / f".{name}.lock", f"matching {b.name} to {a.name}"):
                kept = from_first(_read_matching, path, made_from, self.spec, tell=False)
                if kept is None:
                    kept = from_first(_write_matching, path, made_from, self._match(a, b, matcher, restarts))
        return kept

    def matching_path(self, a: str, b: str, matcher: str, restarts: int = 1) -> AnyPath:
        """Where the matching of network B to network A is kept, by their names."""
        name = f"{b}-to-{a}"
        name += ",".join(["", f"matcher={matcher}", *self._other_dtype]) if matcher != "weights" else ""
        name += f",restarts={restarts}" if restarts > 1 else ""
        if len(name.encode()) > 180:  # a file's name may have 255 bytes, and a temporary one or a lock's is longer
            name = f"{_short(name, 150)}-{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}"
        return self.home / "matchings" / f"{name}.npz"

    def _match(self, a: Network, b: Network, matcher: str, restarts: int) -> KeptMatching:
        how = matcher if restarts == 1 else f"{matcher}, best of {restarts} restarts"
        say(f"matching {b.name} to {a.name} by {how} …")
        import scipy.optimize  # noqa: F401 (slow, and no part of the first matcher's time)

        spec, compilations = self.spec, _compilations()
        compiled, start = sum(compilations), time.monotonic()
        with self.timed("matching"):
            if matcher == "weights":
                matching = from_first(match_weights, spec, a.params, b.params, restarts=restarts)
            else:
                images = self.data.train.first(MATCHING_IMAGES)
                data: Any = dict(zip(("inputs", "labels"), images, strict=True))
                matching = as_matcher(matcher).match(spec, a.params, b.params, apply=self.apply, **data)
        seconds = time.monotonic() - start - (sum(compilations) - compiled)
        return KeptMatching(matching, seconds, fingerprint(matching.perms))

    def permute(self, network: Network, matching: Matching) -> Params:
        """The parameters with their units in another order, which is checked to change nothing else."""
        images = jnp.asarray(self.data.test.images[:64])
        self.spec.check(self.apply, network.params, images, perms=matching.perms)
        return self.spec.apply(matching.perms, network.params)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Adds the seconds that its body takes to those spent on `what`."""
        start = time.monotonic()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + time.monotonic() - start


def device_share(networks: int) -> int:
    """Return how many devices each of some networks trains on.

    Processes that run together train one network after the other, each on all devices.
    """
    return len(jax.devices()) if are_several() else max(1, len(jax.devices()) // networks)


def pretrained_path(setup: str, width: int, seed: int) -> Path:
    """Where a network that comes with the repository is."""
    return PRETRAINED / setup / f"width-{width}" / f"seed-{seed}.safetensors"


def _there(folder: Path) -> str:
    """Which networks come with the repository, as flags give them: the seeds of a folder, or if it is none all else."""
    if seeds := sorted(int(path.stem.removeprefix("seed-")) for path in folder.glob("seed-*.safetensors")):
        return f"one of the seeds {', '.join(map(str, seeds))}"
    widths: dict[str, list[int]] = {}
    for path in PRETRAINED.glob("*/width-*"):
        widths.setdefault(path.parent.name, []).append(int(path.name.removeprefix("width-")))
    there = [f"{setup} --width {' or '.join(map(str, sorted(widths[setup])))}" for setup in sorted(widths)]
    return ", ".join(there) or "a clone of the repository, which contains some"


def _in_a_name(value: Any) -> str:
    """A flag's value as a part of a folder's name."""
    if isinstance(value, tuple):
        return "..".join(map(_in_a_name, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _short(name: str, size: int = 60) -> str:
    """The start of a name of a file, which is to be a part of others: they may have 255 bytes."""
    return name.encode()[:size].decode(errors="ignore")


MATCHING_FIELDS = tuple(field.name for field in fields(Matching) if field.name != "perms")


def _write_matching(path: AnyPath, made_from: list[str], kept: KeptMatching) -> KeptMatching:
    """The matching, after it was written."""
    values: dict[str, Any] = {name: getattr(kept.matching, name) for name in MATCHING_FIELDS}
    perms = {f"perms/{name}": perm for name, perm in kept.matching.perms.items()}
    with atomic(path) as temporary:
        np.savez(temporary, **values | perms, made_from=made_from, seconds=kept.seconds)
    return kept


def _read_matching(
    path: AnyPath, made_from: list[str], spec: PermutationSpec, tell: bool = True
) -> KeptMatching | None:
    """A matching that was kept, if it is there, whole, and made from just this; says why it is not used."""
    if not path.is_file():
        return None
    perms = {name: f"perms/{name}" for name in spec.sizes}
    try:
        with np.load(io.BytesIO(path.read_bytes())) as file:  # of a damaged file np.load would leave it open
            kept: dict[str, Any] = dict(file)
        if not {"made_from", "seconds", *MATCHING_FIELDS, *perms.values()} <= kept.keys():
            problem = "is from an older version"
        elif kept["made_from"].tolist() != made_from:
            problem = "belongs to other networks, data or versions"
        else:
            values: dict[str, Any] = {name: kept[name].tolist() for name in MATCHING_FIELDS}
            values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
            matching = Matching({name: kept[key] for name, key in perms.items()}, **values)
            return KeptMatching(matching, kept["seconds"].item(), fingerprint(matching.perms))
    except Exception as error:  # a damaged zip file makes for any kind of error
        problem = f"cannot be read ({type(error).__name__})"
    if tell:
        warn(f"{path} {problem}: matching again")
    return None
