"""Compare our weight matching with Git Re-Basin's, with the same weights and visits, in one process.

    python -m benchmarks.matching                                        # widths 1 and 4: a minute
    python -m benchmarks.matching --widths 16 32                         # quarter of an hour, 7 GB
    python -m benchmarks.matching --images 1000 --data-dir ARCHIVE       # networks trained on 1,000 images
    python -m benchmarks.matching --pretrained --setups mlp-cifar10 --widths 32 --repeats 4   # trained, and warm

The reference recomputes all products and solves an assignment problem at every visit, and stops after a sweep without
improvement. `ours` makes the same descent, and `coarse` starts with the centres of the kernels. The matchers run in
turn, `--repeats` times each. The first call includes compilation, but only the reference compiles anything. The last
line of each model compares the fastest calls with each other. It also compares them with the time of the first sweep's
products at the rate of a large matrix product in this process. Memory is the peak minus the memory before the call.
"""

import dataclasses
import itertools
import os
import sys
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import linear_sum_assignment

from benchmarks.tables import TableRow, leave
from mcomb.errors import UserError
from mcomb.io.checkpoints import read_checkpoint, write_checkpoint
from mcomb.lab import cli
from mcomb.lab.cache.store import Store
from mcomb.lab.cli import Flag
from mcomb.lab.flags import Config
from mcomb.lab.setups import SETUPS
from mcomb.lab.training.train import initial_state, train
from mcomb.matching.matching import Matching, objective
from mcomb.matching.weights import match_weights, visit_orders
from mcomb.symmetry.spec import PermutationSpec
from mcomb.trees import Params, named_leaves

RATE_SIZE = 2048  # size of square matrices, to measure the machine's rate
CLOSE = 1e-5  # relative tolerance of objectives
LINE = "{:17} {:>5} {:10}{:>16} {:>13} {:>6} {:>6} {:>7} {:>6} {:>13}"


@dataclass(frozen=True)
class MatchingConfig:
    """Flags of the benchmark."""

    setups: Annotated[tuple[str, ...], Flag("setups", choices=tuple(SETUPS))] = (
        "resnet20-cifar10",
        "tiny10-cifar10",
    )
    widths: Annotated[tuple[int, ...], Flag("width multipliers", at_least=1)] = (1, 4)
    images: Annotated[int, Flag("images to train each network on; 0 for random networks", at_least=0)] = 0
    pretrained: Annotated[bool, Flag("use the networks of the repository")] = False
    epochs: Annotated[int, Flag("training epochs", at_least=1)] = 1
    batch_size: Annotated[int, Flag("images in a batch", at_least=1)] = 20
    learning_rate: Annotated[float, Flag("peak learning rate", at_least=0)] = 0.01
    repeats: Annotated[int, Flag("calls of each matcher", at_least=1)] = 1
    data_dir: Annotated[
        Path | None, Flag("CIFAR-10's archive or folder (default: $MCOMB_DATA_DIR, else downloaded)")
    ] = None
    out: Annotated[Path, Flag("root folder of trained networks")] = Path("runs")
    json: Annotated[Path | None, Flag("JSON file for the table")] = None


def reference(spec: PermutationSpec, a: Params, b: Params, seed: int = 0) -> Matching:
    """Match weights, recomputing every product and solving an assignment problem at every visit."""
    leaves_a, leaves_b = named_leaves(a), named_leaves(b)
    perms: Any = {name: jnp.arange(size) for name, size in spec.sizes.items()}
    visits, trace = 0, [objective(spec, a, b)]
    for order in visit_orders(list(spec.sizes), seed):
        progress, height = False, trace[-1]
        for name in order:
            n = spec.sizes[name]
            scores = jnp.zeros((n, n))
            for leaf, axis in spec.axes_of(name):
                there = leaves_b[leaf]
                for other, label in enumerate(spec.axes[leaf]):
                    if other != axis and label is not None:
                        there = jnp.take(there, perms[label], axis=other)
                rows_a, rows_b = (jnp.moveaxis(w, axis, 0).reshape(n, -1) for w in (leaves_a[leaf], there))
                scores += rows_a @ rows_b.T
            _, best = linear_sum_assignment(scores, maximize=True)
            old, new = (jnp.vdot(scores, jnp.eye(n)[perm]) for perm in (perms[name], best))
            progress = progress or bool(new > old + 1e-12)
            height += float(new - old)
            perms[name] = jnp.array(best)
            visits += 1
        trace.append(height)
        if not progress:
            break
    perms = jax.tree.map(np.asarray, perms)
    return Matching(perms, objective(spec, a, b, perms), tuple(trace), solved=visits)


TimedMatcher = Callable[..., Matching]
TIMED_MATCHERS: dict[str, TimedMatcher] = {
    "reference": reference,
    "ours": match_weights,
    "coarse": partial(match_weights, coarse=True),
}


@contextmanager
def peak_memory() -> Iterator[list[float]]:
    """Yield a list that holds, after the block, the peak increase of the process's memory in MB."""
    page, peak, stop = os.sysconf("SC_PAGE_SIZE") / 1e6, [0.0], threading.Event()
    resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * page  # noqa: E731
    start = resident()

    def watch() -> None:
        while not stop.wait(0.01):
            peak[0] = max(peak[0], resident() - start)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:  # also after an interrupt, because the thread would keep the process alive
        stop.set()
        thread.join()


def networks(config: MatchingConfig, store: Store) -> list[Params]:
    """Return two networks, untrained or trained on a few images; read trained networks from the cache."""
    if config.pretrained:
        return [network.params for network in store.networks.get("AB").values()]
    found, width = [], store.config.width
    for seed in (0, 1):
        params = store.setup.init(width, seed)
        if config.images:
            flags = (config.images, config.epochs, config.batch_size, config.learning_rate)
            folder = store.folders.home / "benchmark" / "-".join(map(str, (seed, *flags)))
            if not folder.is_dir():
                chosen = {name: getattr(config, name) for name in ("epochs", "batch_size", "learning_rate")}
                recipe = dataclasses.replace(store.networks.recipe, **chosen)
                data, state = store.data.train.first(config.images), initial_state(params, recipe, config.images)
                describe = f"training {store.config.setup} width {width} seed {seed}"
                for _, trained, _ in train(store.apply, state, data, recipe, seed, describe=describe):
                    params = jax.device_get(trained.params)
                write_checkpoint(folder, params)
            params = read_checkpoint(folder, store.setup.shapes(width))
        found.append(params)
    return jax.block_until_ready(found)  # otherwise the first matcher would wait for them


@dataclass
class Measured:
    """A matcher's result, with the seconds and the peak memory in MB of each call."""

    found: Any = None  # a Matching
    seconds: list[float] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)


def measure(repeats: int, *problem: Any) -> dict[str, Measured]:
    """Call all matchers in turn with one problem, `repeats` times each."""
    runs = {name: Measured() for name in TIMED_MATCHERS}
    for _, (name, run) in itertools.product(range(repeats), runs.items()):
        with peak_memory() as peak:
            start = time.perf_counter()
            run.found = TIMED_MATCHERS[name](*problem)
            run.seconds.append(time.perf_counter() - start)
        run.megabytes += peak
    return runs


def product_seconds(spec: PermutationSpec, a: Params) -> float:
    """Return the seconds of the first sweep's products at the rate of a large matrix product."""
    leaves, (x, y) = named_leaves(a), np.ones((2, RATE_SIZE, RATE_SIZE), np.float32)
    flop = sum(2 * leaves[leaf].size * n for name, n in spec.sizes.items() for leaf, _ in spec.axes_of(name))
    return flop / (2 * RATE_SIZE**3) * min(timeit.repeat(lambda: x @ y, number=1, repeat=5))


def main(config: MatchingConfig) -> None:
    """Print a table with one row for each model, width and matcher."""
    trained = f"trained on {config.images} images" if config.images else "as initialised"
    print(f"networks {'that come with this repository' if config.pretrained else trained}")
    print(
        LINE.format("setup", "width", "matcher", "seconds", "faster", "sweeps", "solved", "skipped", "MB", "objective")
    )
    rows: list[TableRow] = []
    for setup, width in itertools.product(config.setups, config.widths):
        where: Any = {"data_dir": config.data_dir, "out": config.out, "pretrained": config.pretrained}
        store = Store(Config(setup=setup, width=width, **where))
        spec, (a, b) = store.spec, networks(config, store)
        jax.clear_caches()  # so that the first call compiles
        runs = measure(config.repeats, spec, a, b)
        for name, run in runs.items():
            found, ratios = run.found, np.divide(runs["reference"].seconds, run.seconds)
            seconds, faster = "/".join(map("{:.2f}".format, run.seconds)), "/".join(map("{:.1f}×".format, ratios))
            height = objective(spec, a, b, found.perms)
            numbers = len(found.trace) - 1, found.solved, found.skipped, f"{run.megabytes[0]:.0f}", f"{height:.4f}"
            print(LINE.format(setup, width, name, seconds, faster, *numbers), flush=True)
            measured: TableRow = {"seconds": run.seconds, "faster": ratios.tolist(), "megabytes": run.megabytes}
            rows.append({"setup": setup, "width": width, "matcher": name, **measured, "objective": height})
        theirs, ours = runs["reference"], runs["ours"]
        best, limit = min(ours.seconds), product_seconds(spec, a)
        same = sum(np.array_equal(theirs.found.perms[name], ours.found.perms[name]) for name in spec.sizes)
        print(
            f"{'':24}{same} of {len(spec.sizes)} permutations are the reference's; at best ours is "
            f"{min(theirs.seconds) / best:.1f}× as fast, and takes {best / limit:.1f}× the {limit:.2f} s of a first "
            "sweep's products",
            flush=True,
        )
        if not np.isclose(ours.found.objective, theirs.found.objective, rtol=CLOSE, atol=0):
            raise UserError(f"{setup}, width {width}: objectives differ by more than {CLOSE:g}: report this to mcomb.")
    leave(rows, config.json)


if __name__ == "__main__":
    cli.run(lambda: main(cli.parse(MatchingConfig, __doc__ or "", sys.argv[1:])))
