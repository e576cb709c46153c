"""What a run would take: its steps, and the operations, memory, disk and time of each, before any of them is made.

Floating-point operations are counted from the shapes alone: those of the network on one image as XLA counts them, and
three times as many for a gradient. Times follow from how fast this machine does a little of the same work, or from a
rate that is given; matching by weights is reckoned at the rate of the host's matrix products. Compilation is left out.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mcomb.base import UserError, named_leaves, stream
from mcomb.combination import mix, uniform
from mcomb.devices import BATCH, device_mesh
from mcomb.evaluation import evaluate
from mcomb.files import AnyPath
from mcomb.lab.data import Split
from mcomb.lab.measure import REPAIR_IMAGES, TEMPERATURES
from mcomb.lab.results import columns
from mcomb.lab.store import MATCHING_IMAGES, Store, Training
from mcomb.lab.training import initial_state, train
from mcomb.matching.straight_through import BATCH_SIZE, STEPS
from mcomb.progress import say

GRADIENT = 3  # times the operations of the network itself
SWEEPS = 2  # of weight matching, counted in full ones: after the first, only what has moved is counted anew
SLOWEST = 1e-9  # TFLOP/s that can be planned with: a thousand operations in a second
TRIAL = 1e11  # operations of the work that is timed
# What programs hold at once of the arrays inside a network, by their own account (benchmarks.account):
LIVE, COMPARED = 4, 8  # evaluation and activation matching, as much as so many of the largest array
KEPT = 0.25  # a gradient, this part of all arrays
DTYPE_BYTES = 4.0
IN_ALL = "in all"


class Job(NamedTuple):
    """What one experiment needs: networks to train, matchings by name, and combinations to evaluate."""

    name: str
    store: Store
    trainings: Sequence[Training]
    given: Sequence[str] = ()  # the names of the networks that are not trained
    matchings: Mapping[str, tuple[str, int]] = {}  # the matcher and its restarts
    combinations: int = 0  # on each split
    kept: bool = False  # whether its results are there


class Step(NamedTuple):
    """One thing to do: its floating-point operations, bytes on each device and on disk, and seconds."""

    what: str
    state: str
    flop: float = 0.0
    memory: float = 0.0
    disk: float = 0.0
    seconds: float = 0.0


class Work(NamedTuple):
    """What follows from a setup's shapes at one width."""

    parameters: int
    flop: float  # of the network on one image
    activations: float  # bytes of all arrays inside the network on one image
    largest: float  # bytes of the largest of them
    matching_flop: float  # of one sweep of weight matching


class Rates(NamedTuple):
    """Floating-point operations in a second."""

    training: float
    evaluation: float


def work_of(store: Store) -> Work:
    """What a network of the store costs, from its shapes."""
    shapes, apply = store.setup.shapes(store.config.width), store.apply
    image = jax.ShapeDtypeStruct((1, *store.setup.dataset.image), jnp.uint8)
    sizes = {name: leaf.size for name, leaf in named_leaves(shapes).items()}
    equations = jax.make_jaxpr(apply)(shapes, image).jaxpr.eqns
    inside = [out.aval.size * out.aval.dtype.itemsize for eqn in equations for out in eqn.outvars]
    cost: Any = jax.jit(apply).lower(shapes, image).cost_analysis()
    return Work(
        parameters=sum(sizes.values()),
        flop=float(cost["flops"]),
        activations=float(sum(inside)),
        largest=float(max(inside)),
        matching_flop=2.0
        * sum(sizes[leaf] * size for perm, size in store.spec.sizes.items() for leaf, _ in store.spec.axes_of(perm)),
    )


def measure_rates(store: Store, work: Work) -> Rates:
    """How fast this machine trains and evaluates networks of the store, from a little of both on random images."""
    width, setup, devices = store.config.width, store.setup, len(jax.devices())
    say(f"measuring how fast this machine is with {setup.title}, width {width} …")

    def images(count: float) -> Split:
        rng, n = np.random.default_rng(0), int(np.clip(count, devices, 2000))
        pixels = rng.integers(0, 256, (n, *setup.dataset.image)).astype(np.uint8)
        return Split(pixels, rng.integers(0, setup.dataset.classes, n).astype(np.int32))

    data = images(TRIAL / (GRADIENT * work.flop))
    recipe = replace(store.recipe, epochs=2, batch_size=min(store.recipe.batch_size, len(data.labels)))
    networks = tuple(setup.init(width, seed) for seed in (0, 1))
    epochs = train(store.apply, initial_state(networks[0], recipe, len(data.labels)), data, recipe, 0, describe="trial")
    next(epochs)  # it compiles
    start = time.monotonic()
    next(epochs)
    steps = len(data.labels) // recipe.batch_size
    training = GRADIENT * work.flop * steps * recipe.batch_size / (time.monotonic() - start)

    keys = jax.random.split(stream(0, "trial"), 2 * devices)
    data = images(TRIAL / (work.flop * len(keys)))
    for _ in range(2):  # the first one compiles
        start = time.monotonic()
        shares = np.full(len(keys), 0.5, np.float32)
        evaluate(store.apply, mix(uniform), networks, shares, keys, *data, temperatures=TEMPERATURES)
    return Rates(training, work.flop * len(keys) * len(data.labels) / (time.monotonic() - start))


@cache
def host_rate() -> float:
    """How fast this machine's host multiplies matrices."""
    x, seconds = np.ones((1024, 1024), np.float32), []
    for _ in range(3):
        start = time.monotonic()
        x @ x
        seconds.append(time.monotonic() - start)
    return 2 * 1024**3 / min(seconds)


def plan_steps(jobs: Iterable[Job], tflops: float | None = None) -> list[Step]:
    """The steps of some jobs, each once, at the rates of this machine or at so many TFLOP/s of all devices."""
    if tflops is not None and not SLOWEST <= tflops < np.inf:
        raise UserError(f"--device-tflops {tflops:g} is no rate: give {SLOWEST:g} or more, or leave it out to measure")
    steps: dict[tuple[AnyPath, str], Step] = {}
    known: dict[AnyPath, tuple[Work, Rates]] = {}
    for job in jobs:
        home = job.store.home
        if not job.trainings and not job.given:
            continue
        if home not in known:
            work = work_of(job.store)
            known[home] = work, Rates(tflops * 1e12, tflops * 1e12) if tflops else measure_rates(job.store, work)
        for part in (_training, _matching, _evaluation):
            steps |= {(home, step.what): step for step in part(job, *known[home])}
    several = len(known) > 1
    return [
        step._replace(what=f"{home.name}: {step.what}" if several else step.what) for (home, _), step in steps.items()
    ]


def _training(job: Job, work: Work, rates: Rates) -> Iterator[Step]:
    store, devices = job.store, device_mesh().size
    recipe, size = store.recipe, DTYPE_BYTES * work.parameters
    for name in job.given:
        yield Step(f"read {name}", "given")
    for training in job.trainings:
        name, done = store.trained_so_far(training)
        there = store.setup.dataset.images[0]
        there = training.images.expected_count(there) if training.images else there
        images = (recipe.epochs - done) * (there // recipe.batch_size) * recipe.batch_size
        flop = GRADIENT * work.flop * images
        if not images:
            yield Step(f"train {name}", "kept")
            continue
        state = f"from epoch {done} of {recipe.epochs}" if done else f"{recipe.epochs} epochs"
        # Weights, momentum, gradient and the new weights; of the first two there are two checkpoints.
        memory = 4 * size + recipe.batch_size / devices * KEPT * work.activations
        yield Step(f"train {name}", state, flop, memory, 4 * size, flop / rates.training)


def _matching(job: Job, work: Work, rates: Rates) -> Iterator[Step]:
    store, size, devices = job.store, DTYPE_BYTES * work.parameters, device_mesh().size
    for name, (matcher, restarts) in job.matchings.items():
        b, a = (store.network_name(letter) for letter in (name[0], name.split()[2][0]))
        what = f"match {b} to {a} by {matcher}" + (f", {restarts} restarts" if restarts > 1 else "")
        if store.matching_path(a, b, matcher, restarts).is_file():
            yield Step(what, "kept")
            continue
        on_host, on_device, memory = SWEEPS * work.matching_flop * restarts, 0.0, 4 * size
        if matcher == "activations":
            on_host, on_device = 0.0, 2 * work.flop * min(MATCHING_IMAGES, store.setup.dataset.images[0])
            memory = 2 * (size + BATCH * COMPARED * work.largest)
        elif matcher == "ste":
            on_host, on_device = STEPS * on_host, STEPS * BATCH_SIZE * GRADIENT * work.flop
            memory = 6 * size + BATCH_SIZE / devices * KEPT * work.activations
        seconds = on_host / host_rate() + on_device / rates.evaluation
        yield Step(what, "", on_host + on_device, memory, 0.0, seconds)


def _evaluation(job: Job, work: Work, rates: Rates) -> Iterator[Step]:
    if not job.combinations:
        return
    config, repair = job.store.config, getattr(job.store.config, "repair", False)
    what = f"evaluate {job.combinations:,} combinations, {job.store.folder(job.name).name}"
    if job.kept:
        yield Step(what, "kept")
        return
    counts = zip((config.train_images, config.test_images), job.store.setup.dataset.images, strict=True)
    images = sum(min(asked or there, there) + (REPAIR_IMAGES if repair else 0) for asked, there in counts)
    flop = work.flop * images * job.combinations
    networks = (len(job.trainings) + len(job.given) + 2) * DTYPE_BYTES * work.parameters
    memory = networks + min(BATCH, images) * LIVE * work.largest
    yield Step(what, f"{images:,} images each", flop, memory, 0.0, flop / rates.evaluation)


def table(steps: list[Step]) -> str:
    """The steps for a person to read, and what they come to together."""
    rows = [("", "", "TFLOP", "memory a device", "disk", "time")]
    for step in (*steps, total(steps)):
        numbers = (f"{step.flop / 1e12:.3g}", _bytes(step.memory), _bytes(step.disk), _time(step.seconds))
        rows.append((step.what, step.state, *(numbers if step.flop or step.what == IN_ALL else ("",) * 4)))
    return columns(rows)


def total(steps: list[Step]) -> Step:
    """What some steps come to: the memory of the one that needs most, and the sum of everything else."""
    flop, disk, seconds = (sum(getattr(step, name) for step in steps) for name in ("flop", "disk", "seconds"))
    return Step(IN_ALL, "", flop, max((step.memory for step in steps), default=0.0), disk, seconds)


def _bytes(count: float) -> str:
    unit, name = next(((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB")) if count >= unit), (1e3, "kB"))
    return f"{count / unit:.1f} {name}" if count else ""


def _time(seconds: float) -> str:
    units = ((86400, "days"), (3600, "h"), (60, "min"))
    unit, name = next(((unit, name) for unit, name in units if seconds >= 2 * unit), (1, "s"))
    return f"{seconds / unit:.1f} {name}"
