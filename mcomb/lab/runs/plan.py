"""Plan a run (`--plan`): its steps, and the operations, memory and disk that each will take.

A plan depends only on shapes and on the cache: planning compiles, times and trains nothing. XLA counts the
floating-point operations of the network on one example; a gradient takes three times as many. A plan contains no times;
long training runs print an estimate when they start.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mcomb.io.paths import AnyPath
from mcomb.lab.cache.matchings import MATCHING_EXAMPLES, MatchingKey
from mcomb.lab.cache.store import Store
from mcomb.lab.flags import LEARNED, Config
from mcomb.lab.runs.experiment import Experiment, count_combinations
from mcomb.lab.runs.measure import REPAIR_EXAMPLES
from mcomb.lab.runs.pairs import over_pairs
from mcomb.lab.runs.reuse import find_results
from mcomb.lab.tables import columns, readable_bytes
from mcomb.lab.training.side_by_side import device_share
from mcomb.lab.training.train import Training
from mcomb.matching.straight_through import BATCH_SIZE
from mcomb.runtime.batching import BATCH
from mcomb.trees import named_leaves

GRADIENT = 3  # operations relative to a forward pass
FULL_SWEEPS = 2  # full sweeps with the cost of weight matching, whose later sweeps skip unchanged parts
# A network's intermediate arrays that are live at once, according to benchmarks.account:
LIVE, COMPARED = 4, 8  # evaluation and activation matching, in multiples of the largest array
KEPT = 0.25  # gradients, as a fraction of all arrays
DTYPE_BYTES = 4.0
IN_ALL = "total"


class Job(NamedTuple):
    """The work of one experiment: networks to train, matchings, and combinations to evaluate."""

    name: str
    store: Store
    trainings: Sequence[Training]
    given: Sequence[str] = ()  # the names of networks from files
    matchings: Sequence[MatchingKey] = ()
    combinations: int = 0  # on each split
    kept: bool = False  # whether its results are saved


def list_jobs(experiment: Experiment, config: Config) -> Iterator[Job]:
    """Yield the jobs of an experiment's parts and of the experiment itself."""
    store = Store(config)
    kept = find_results(experiment, config, store) is not None
    experiment = over_pairs(experiment, config)
    for part in experiment.parts(config).values():
        yield from list_jobs(*part)
    letters = experiment.networks
    given = [network.name for letter in letters if (network := store.networks.given(letter))]
    yield Job(
        experiment.name,
        store,
        trainings=list(store.networks.trainings(letters).values()),
        given=given,
        matchings=experiment.matchings(config) if letters else (),
        combinations=count_combinations(experiment, config),
        kept=kept,
    )


class Step(NamedTuple):
    """A step of a plan: its floating-point operations, and its bytes in memory and on disk.

    Memory is per accelerator, or the total of all devices of a CPU.
    """

    what: str
    state: str
    flop: float = 0.0
    memory: float = 0.0
    disk: float = 0.0


class Work(NamedTuple):
    """Costs of a setup's network at one width, derived from shapes."""

    parameters: int
    flop: float  # of the network on one example
    activations: float  # bytes of all arrays inside the network on one example
    largest: float  # bytes of the largest array
    matching_flop: float  # of one sweep of weight matching


def work_of(store: Store) -> Work:
    """Return the cost of a network of the store, from its shapes."""
    shapes, apply = store.setup.shapes(store.config.width), store.apply
    example = jax.ShapeDtypeStruct((1, *store.setup.dataset.shape), jnp.uint8)
    sizes = {name: leaf.size for name, leaf in named_leaves(shapes).items()}
    equations = jax.make_jaxpr(apply)(shapes, example).jaxpr.eqns
    inside = [out.aval.size * out.aval.dtype.itemsize for eqn in equations for out in eqn.outvars]
    cost: Any = jax.jit(apply).lower(shapes, example).cost_analysis()
    return Work(
        parameters=sum(sizes.values()),
        flop=float(cost["flops"]),
        activations=float(sum(inside)),
        largest=float(max(inside)),
        matching_flop=2.0
        * sum(sizes[leaf] * size for perm, size in store.spec.sizes.items() for leaf, _ in store.spec.axes_of(perm)),
    )


def plan_steps(jobs: Iterable[Job]) -> list[Step]:
    """Return the steps of all jobs, without duplicates."""
    steps: dict[tuple[AnyPath, str], Step] = {}
    known: dict[AnyPath, Work] = {}
    for job in jobs:
        home = job.store.folders.home
        if not job.trainings and not job.given:
            continue
        if home not in known:
            known[home] = work_of(job.store)
        for part in (_training, _matching, _evaluation):
            steps |= {(home, step.what): step for step in part(job, known[home])}
    several = len(known) > 1
    return [
        step._replace(what=f"{home.name}: {step.what}" if several else step.what) for (home, _), step in steps.items()
    ]


def _copies(devices: int) -> int:
    """Return the number of copies of a replicated array in the same memory."""
    return devices if jax.default_backend() == "cpu" else 1


def _training(job: Job, work: Work) -> Iterator[Step]:
    store, recipe, size = job.store, job.store.networks.recipe, DTYPE_BYTES * work.parameters
    for name in job.given:
        yield Step(f"read {name}", "given")
    for training in job.trainings:
        name, done = store.folders.network_name(training), store.networks.epochs_trained(training)
        there = store.setup.dataset.count()[0]
        there = training.subset.expected_count(there) if training.subset else there
        examples = recipe.work_after(done) * (there // recipe.batch_size) * recipe.batch_size
        if not examples:
            yield Step(f"train {name}", "kept")
            continue
        state = f"from epoch {done} of {recipe.epochs}" if done else f"{recipe.epochs} epochs"
        devices = device_share(len(job.trainings))
        # Weights, momentum and gradient, plus the initial state. The disk stores two checkpoints.
        each = 3 * size + recipe.batch_size / devices * KEPT * work.activations
        memory = _copies(devices) * each + 2 * size + there * math.prod(store.setup.dataset.shape)
        yield Step(f"train {name}", state, GRADIENT * work.flop * examples, memory, 4 * size)


def _matching(job: Job, work: Work) -> Iterator[Step]:
    store, size, devices = job.store, DTYPE_BYTES * work.parameters, len(jax.devices())
    for key in job.matchings:
        b, a = (store.networks.name(letter) for letter in (key.moved, key.reference))
        matcher, restarts = key.matcher or store.config.matcher, key.restarts
        what = f"match {b} to {a} by {matcher}" + (f", {restarts} restarts" if restarts > 1 else "")
        what += ", all groups" if key.groups == "all" else ""
        if store.folders.matching(a, b, matcher, restarts, key.groups).is_file():
            yield Step(what, "kept")
            continue
        flop, memory = FULL_SWEEPS * work.matching_flop * restarts, 4 * size
        if matcher == "activations":
            flop = 2 * work.flop * min(MATCHING_EXAMPLES, store.setup.dataset.count()[0])
            memory = 2 * size + _copies(devices) * 2 * BATCH * COMPARED * work.largest
        elif matcher == LEARNED:
            flop = store.config.matcher_steps * (flop + BATCH_SIZE * GRADIENT * work.flop)
            memory = 2 * size + _copies(devices) * (4 * size + BATCH_SIZE / devices * KEPT * work.activations)
        yield Step(what, "", flop, memory)


def _evaluation(job: Job, work: Work) -> Iterator[Step]:
    if not job.combinations:
        return
    config = job.store.config
    what = f"evaluate {job.combinations:,} combinations, {job.store.folder(job.name).name}"
    if job.kept:
        yield Step(what, "kept")
        return
    counts = zip(config.evaluation_examples.values(), job.store.setup.dataset.count(), strict=True)
    examples = sum(min(asked or there, there) + (REPAIR_EXAMPLES if config.repair else 0) for asked, there in counts)
    size = DTYPE_BYTES * work.parameters
    each = size + min(BATCH, examples) * LIVE * work.largest  # a combination and its activations
    memory = (len(job.trainings) + len(job.given) + 1) * size + _copies(len(jax.devices())) * each
    yield Step(what, f"{examples:,} examples each", work.flop * examples * job.combinations, memory)


def table(steps: list[Step]) -> str:
    """Format the steps and their total as a table."""
    rows: list[tuple[str, ...]] = [("", "", "TFLOP", "memory", "disk")]
    for step in (*steps, total(steps)):
        numbers = (f"{step.flop / 1e12:.3g}", *(readable_bytes(count) if count else "" for count in step[3:]))
        rows.append((step.what, step.state, *(numbers if step.flop or step.what == IN_ALL else ("",) * 3)))
    return columns(rows)


def total(steps: list[Step]) -> Step:
    """Return the total of the steps: the maximum of their memory, and the sum of all other numbers."""
    flop, disk = (sum(getattr(step, name) for step in steps) for name in ("flop", "disk"))
    return Step(IN_ALL, "", flop, max((step.memory for step in steps), default=0.0), disk)
