"""Measure a slice of the cube through A, B and learned shares.

    python -m experiments.landscape --setup mlp-digits
    python -m experiments.landscape --setup mlp-digits --per unit
    python -m experiments.landscape --width 32                       # on an accelerator

The paper samples the cube of all shares and leaves open which of its points are better than others. This experiment
searches for a good point by gradient descent from the midpoint (`mcomb.learn_shares`). It uses nine tenths of the train
examples for gradients and one tenth for early stopping. A and B were trained on all train examples.

The slice is the plane of the shares x + y·(learned − ½). A is at (0, 0), B at (1, 0), the midpoint at (½, 0) and the
learned shares are at (½, 1). Random points (each share uniform on an interval) and corners (each share 0 or 1) lie off
the slice. Their shares have a point of the slice as their mean, and the figure shows their projections. Shares that are
uniform on [0, 1], as in the paper, serve as a baseline; they all project onto the midpoint. A second baseline is
learned shares of a naive pair, because one share for each weight is nearly as flexible as training. On digits, expect
a test loss of 0.02 for the learned shares, 0.04 for A and B, and 0.07 for the midpoint.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import scipy  # imports `scipy.stats`, which is slow, on first use
from jaxtyping import Float, PRNGKeyArray
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from mcomb.combination import Draw, blend, combine
from mcomb.evaluation.barriers import barrier
from mcomb.io.paths import AnyPath
from mcomb.keys import fold_name, unrolled
from mcomb.lab.cli import Flag
from mcomb.lab.figures import COLOURS, LEVELS, LINES, STYLE, save
from mcomb.lab.flags import CombinationConfig
from mcomb.lab.runs.command import main
from mcomb.lab.runs.experiment import Experiment
from mcomb.lab.runs.measure import Run, Task
from mcomb.lab.runs.results import METRICS, SPLITS, VARIANTS, Number, Results, Scores, scores_of, sides, spread
from mcomb.lab.runs.verdicts import Verdict, clearly_less, works
from mcomb.lab.tables import columns, with_range
from mcomb.merging.learned_shares import GRANULARITIES, LearnedShares, learn_shares
from mcomb.trees import Array, Params, map_named

SLICE_MARKS = {"midpoint": (0.5, 0.0), "learned": (0.5, 1.0)}  # positions on the slice


@dataclass(frozen=True)
class LandscapeConfig(CombinationConfig):
    """Flags of `landscape`."""

    per: Annotated[str, Flag("learn one share per layer, unit or weight", choices=GRANULARITIES[1:])] = "weight"
    grid: Annotated[int, Flag("steps from A to the midpoint, and from there to the learned shares", at_least=2)] = 6
    search_steps: Annotated[int, Flag("gradient steps of the search for learned shares", at_least=1)] = 400
    scatter: Annotated[int, Flag("number of random points, and of corners, around the slice", at_least=1)] = 25


@dataclass(frozen=True)
class Slice:
    """The slice: its coordinates x and y, and the scores in rows of y and columns of x."""

    x: list[Number]
    y: list[Number]
    train: dict[str, Any]
    test: dict[str, Any]


@dataclass(frozen=True)
class Samples:
    """Random networks: the projections of their shares onto the slice, and their scores."""

    places: list[list[Number]]
    train: dict[str, Any]
    test: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class LandscapeResults(Results):
    """Results of `landscape`.

    Attributes:
        found: The scores of the midpoint, the learned shares and the best samples.
        slice: The scores on the slice.
        naive: The scores of the naive pair on the path from the midpoint to the learned shares.
        samples: The random networks of each kind.
        deviation: The root mean square of the learned shares minus ½.
        held_out_losses: The losses during learning, naive and aligned.
    """

    found: dict[str, Scores]
    slice: Slice
    naive: Scores
    samples: dict[str, Samples]
    deviation: Number
    held_out_losses: dict[str, list[Any]]


def slice_axes(steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the coordinates x and y of the grid, which extends beyond A, B and the learned shares."""
    half = steps // 2
    x = np.arange(-half, 2 * steps + half + 1) / (2 * steps)
    return x, np.arange(-half, steps + half + 1) / steps


def as_shares(places: np.ndarray) -> Float[np.ndarray, "k 2"]:
    """Convert places (x, y) on the slice to shares of B and of the learned network, the arguments of `blend`.

    A + x·(B − A) + y·(learned − (A + B) / 2) has the share x − y/2 of B and y of the learned network.
    """
    x, y = np.asarray(places, np.float32).T
    return np.stack([x - y / 2, y], axis=1)


def even_places(count: int) -> np.ndarray:
    """Return places that cover the drawn part of the slice evenly: a Halton sequence."""
    return scipy.stats.qmc.Halton(2, scramble=False).random(count) * (1.0, 2.0) + (0.0, -0.5)


def point(u: Array, mean: Array) -> Array:
    """Map uniform numbers on [0, 1] to shares with this mean, uniform on [0, 2·mean] or [2·mean − 1, 1]."""
    low, high = jnp.maximum(0, 2 * mean - 1), jnp.minimum(1, 2 * mean)
    return low + u * (high - low)


def corner(u: Array, mean: Array) -> Array:
    """Map uniform numbers on [0, 1] to shares of 0 and 1 with this mean."""
    return (u < mean).astype(mean.dtype)


KINDS = {"uniform": point, "random point": point, "corner": corner}
SCATTERED = ("random point", "corner")  # without "uniform", whose samples all project onto the midpoint


@cache  # return the same function object, so that JAX compiles it once
def random_shares(kind: Callable[[Array, Array], Array]) -> Callable[..., Params]:
    """Return a function of (key, place, learned shares) that samples shares with a place on the slice as their mean."""

    def draw(key: PRNGKeyArray, place: Float[Array, "2"], learned: Params) -> Params:
        key = unrolled(key)

        def draw_leaf(name: str, share: Array) -> Array:
            mean = jnp.clip(place[0] + place[1] * (share - 0.5), 0, 1)
            return kind(jax.random.uniform(fold_name(key, name), share.shape, share.dtype), mean)

        return map_named(draw_leaf, learned)

    return draw


@cache
def random_network(kind: Callable[[Array, Array], Array]) -> Draw:
    """Return a draw that combines A and B with random shares around a place on the slice."""

    def draw(key: PRNGKeyArray, place: Float[Array, "2"], a: Params, b: Params, learned: Params) -> Params:
        shares = random_shares(kind)(key, place, learned)
        return combine(a, b, shares)

    return draw


def project(shares: Callable[..., Params], keys: Array, places: np.ndarray, learned: Params) -> np.ndarray:
    """Project sampled shares onto the slice."""

    def mean(*trees: Params) -> Array:
        """Return the mean over all weights of the product of trees."""
        products = [math.prod(leaves).sum() for leaves in zip(*map(jax.tree.leaves, trees), strict=True)]
        return sum(products) / sum(leaf.size for leaf in jax.tree.leaves(trees[0]))

    @jax.jit
    def inner_products(keys: Array, places: Array, learned: Params) -> Any:
        direction = jax.tree.map(lambda share: share - 0.5, learned)

        def of_one(drawn: tuple[Array, Array]) -> Array:
            found = shares(*drawn, learned)
            return jnp.stack([mean(found), mean(found, direction)])

        along = mean(direction)
        gram = jnp.stack([jnp.ones_like(along), along, along, mean(direction, direction)]).reshape(2, 2)
        return gram, jax.lax.map(of_one, (keys, places))

    gram, products = jax.device_get(inner_products(keys, jnp.asarray(places), learned))
    return products @ np.linalg.pinv(gram, hermitian=True)  # singular if all learned shares are ½


def learn(run: Run, b: Params) -> LearnedShares:
    """Learn shares of B on the train examples."""
    store, per, networks = run.store, run.config.per, (run.networks["A"].params, b)
    with store.durations.timed("learning"):
        how: Any = {"per": per, "spec": store.spec, "seed": run.config.seed, "steps": run.config.search_steps}
        return learn_shares(store.apply, networks, *store.data.train, **how)


def measure(run: Run) -> LandscapeResults:
    """Measure the slice, random points and corners, and the path to the shares learned for the naive pair."""
    config, a = run.config, run.networks["A"].params
    pairs = {"naive": run.networks["B"].params, "aligned": run.align()}
    learned = {variant: learn(run, b) for variant, b in pairs.items()}
    corners = {variant: (a, b, learned[variant].params) for variant, b in pairs.items()}
    shares = jax.tree.map(lambda share, leaf: np.broadcast_to(share, np.shape(leaf)), learned["aligned"].shares[0], a)
    x, y = slice_axes(config.grid)
    grid = np.stack(np.meshgrid(x, y), axis=-1)
    path = np.stack([np.full(len(y), 0.5), y], axis=1)
    tasks = {
        "slice": Task(blend, corners["aligned"], as_shares(grid.reshape(-1, 2))),
        "naive": Task(blend, corners["naive"], as_shares(path)),
    }
    centre = np.full((config.scatter, 2), SLICE_MARKS["midpoint"])
    around = dict(zip(KINDS, (centre, *np.split(even_places(2 * config.scatter), 2)), strict=True))
    for name, kind in KINDS.items():
        given = (a, pairs["aligned"], shares), around[name].astype(np.float32)
        tasks[name] = Task(random_network(kind), *given, rng_name=name, ends=lambda at, a, b, shares: (a, b))
    measured = {name: scores_of(by_split) for name, by_split in run.evaluate(tasks).items()}
    samples = {
        name: Samples(
            project(random_shares(kind), run.keys(tasks[name]), tasks[name].points, shares).tolist(),
            **_as_lists(measured[name]),
        )
        for name, kind in KINDS.items()
    }
    found: dict[str, Scores] = {}
    for mark, (at_x, at_y) in SLICE_MARKS.items():
        column, row = np.flatnonzero(x == at_x)[0], np.flatnonzero(y == at_y)[0]
        found[mark] = _at(measured["slice"], row * len(x) + column)
        found[f"naive {mark}"] = _at(measured["naive"], row)
    for name in ("slice", *KINDS):
        best = int(np.argmin(measured[name]["train"]["loss"]))
        found["best on the slice" if name == "slice" else f"best {name}"] = _at(measured[name], best)
    deviations = np.concatenate([np.ravel(share) - 0.5 for share in jax.tree.leaves(shares)])
    return LandscapeResults(
        **run.basics,
        found=found,
        slice=Slice(x.tolist(), y.tolist(), **_as_lists(measured["slice"], (len(y), len(x)))),
        naive=_as_lists(measured["naive"]),
        samples=samples,
        deviation=float(np.sqrt(np.mean(np.square(deviations, dtype=np.float64)))),
        held_out_losses={variant: list(it.losses) for variant, it in learned.items()},
    )


def _as_lists(measured: Scores, shape: tuple[int, ...] = (-1,)) -> Scores:
    return {split: {m: at[m].reshape(shape).tolist() for m in METRICS} for split, at in measured.items()}


def _at(measured: Scores, i: int) -> Scores:
    return {split: {m: float(at[m][i]) for m in METRICS} for split, at in measured.items()}


def table(results: LandscapeResults) -> str:
    """Format the metrics of the networks and of the combinations."""
    rows = [("", *(f"{split} {metric}" for metric in METRICS for split in SPLITS))]
    for kind, name in [("models", name) for name in results.models] + [("found", name) for name in results.found]:
        cells = [(side.models if kind == "models" else side.found)[name] for side in sides(results)]
        label = f"network {name}" if kind == "models" else name
        rows.append((label, *(with_range([at[split][m] for at in cells]) for m in METRICS for split in SPLITS)))
    return columns(rows)


def judge(results: LandscapeResults) -> Verdict:
    """Require that learned shares have a lower test loss than the midpoint, uniform shares and naive learned shares.

    They must also work, and matching must clearly lower the midpoint's barrier.
    """
    ends = [results.models[letter]["test"] for letter in "AB"]
    found = {name: at["test"] for name, at in results.found.items()}
    lost = {name: {m: barrier(m, at[m], *(end[m] for end in ends)) for m in METRICS} for name, at in found.items()}
    others = ("midpoint", "best uniform", "naive learned")
    better = all(found["learned"]["loss"] < found[name]["loss"] for name in others)
    matched = clearly_less(lost["midpoint"], lost["naive midpoint"])
    config, count = results.config, results.config["scatter"]

    def said(at: dict[str, float]) -> str:
        return f"{at['loss']:.3f} / {at['accuracy']:.1%}"

    beaten = [letter for letter, end in zip("AB", ends, strict=True) if found["learned"]["loss"] < end["loss"]]
    return Verdict(
        better and matched and works(results, lost["learned"]),
        f"Shares learned per {config['per']} have a test loss / accuracy of {said(found['learned'])}. The "
        f"midpoint has {said(found['midpoint'])}, A has {said(ends[0])} and B has {said(ends[1])}. The learned loss is "
        f"lower than that of {' and '.join(beaten) or 'neither network'}. The samples with the lowest train loss have "
        f"{said(found['best uniform'])} (of {count} uniform points), {said(found['best random point'])} (of {count} "
        f"random points around the slice) and {said(found['best corner'])} (of {count} corners). The learned shares "
        f"differ from ½ by {results.deviation:.2f} (root mean square). Without matching, the midpoint has "
        f"{said(found['naive midpoint'])} and learned shares have {said(found['naive learned'])}.",
    )


def judge_together(pairs: list[LandscapeResults]) -> str:
    """Count the pairs whose learned shares beat both networks."""
    counts = []
    for metric, sign in zip(METRICS, (1, -1), strict=True):
        better = [
            all(sign * at.found["learned"]["test"][metric] < sign * at.models[x]["test"][metric] for x in "AB")
            for at in pairs
        ]
        counts.append(f"in test {metric} for {sum(better)} of {len(pairs)} pairs")
    return f"The learned shares beat both networks {' and '.join(counts)}."


def draw(results: LandscapeResults, folder: AnyPath) -> None:
    """Draw test loss and accuracy on the slice and on the path from the midpoint to the learned shares."""
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(7.4, 5.6), layout="constrained")
        panels = figure.subplots(2, 2, width_ratios=(3, 2))
        for (left, right), metric in zip(panels, METRICS, strict=True):
            _draw_slice(figure, left, results, metric)
            _draw_path(right, results, metric)
        panels[1, 0].set_xlabel("x: share of B, A at 0 and B at 1")
        panels[1, 1].set_xlabel("y: midpoint at 0, learned shares at 1")
        panels[0, 0].set_title("on the slice")
        panels[0, 1].set_title("from the midpoint to the learned shares")
        handles, labels = panels[0, 0].get_legend_handles_labels()
        panels[1, 0].legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, frameon=False)
        handles, labels = panels[0, 1].get_legend_handles_labels()
        panels[1, 1].legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, frameon=False)
        figure.suptitle(results.title, fontsize=9)
        save(figure, folder, results.experiment)


def _draw_slice(figure: Figure, axes: Any, results: LandscapeResults, metric: str) -> None:
    """Draw contours over the slice, and the random points and corners around it in the same colours."""
    x, y = results.slice.x, results.slice.y
    values = np.array(results.slice.test[metric])
    samples = [np.array(results.samples[name].test[metric]) for name in SCATTERED]
    every = np.concatenate([values.ravel(), *samples])
    low, high = every[np.isfinite(every)].min(), every[np.isfinite(every)].max()
    norm: Any = Normalize(low, max(high, low + 0.01))
    if metric == "loss":
        norm = LogNorm(max(low, 1e-6), max(high, 1.01 * low, 1e-5))
    levels = norm.inverse(np.linspace(0, 1, 13))
    colours: Any = {"cmap": "viridis_r" if metric == "loss" else "viridis", "norm": norm}
    shades = axes.contourf(x, y, values, levels, **colours)
    axes.contour(x, y, values, levels, colors="white", linewidths=0.3)
    figure.colorbar(shades, ax=axes, label=f"test {metric}", format="%.3g", ticks=levels[::2])
    for name, own, marker in zip(SCATTERED, samples, "os", strict=True):
        places = np.array(results.samples[name].places)
        style: Any = {"marker": marker, "s": 16, "edgecolors": "black", "linewidths": 0.5}
        axes.scatter(*places.T, c=own, label=f"{name}s (projected)", **style, **colours)
    box = {"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 1}
    for name, place in {"A": (0, 0), "B": (1, 0), **SLICE_MARKS}.items():
        axes.plot(*place, "*" if name == "learned" else "X", color="white", markeredgecolor="black", markersize=8)
        axes.annotate(name, place, (0, 7), textcoords="offset points", ha="center").set_bbox(box)
    axes.set_ylabel("y: learned shares at 1")


def _draw_path(axes: Any, results: LandscapeResults, metric: str) -> None:
    """Draw the values from the midpoint to a little beyond the learned shares, naive and aligned."""
    y = results.slice.y
    for letter, dashes in zip("AB", LEVELS, strict=True):
        level = results.models[letter]["test"][metric]
        axes.axhline(level, color="0.35", linewidth=0.8, linestyle=dashes, label=f"network {letter}, test")
    for variant, split in itertools.product(VARIANTS, SPLITS):
        scores = [side.naive if variant == "naive" else vars(side.slice) for side in (results, *spread(results))]
        found = [np.array(by_split[split][metric]) for by_split in scores]
        values, low, high = (at if variant == "naive" else at[:, len(at[0]) // 2] for at in found)  # x = ½
        axes.fill_between(y, low, high, color=COLOURS[variant], alpha=0.2, linewidth=0)
        axes.plot(y, values, LINES[split], color=COLOURS[variant], label=f"{variant}, {split}")
    for place in (0, 1):
        axes.axvline(place, color="0.8", linewidth=0.6, zorder=0)
    if metric == "loss":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel(metric)


EXPERIMENT = Experiment(
    name="landscape",
    title="a slice of the cube through learned shares",
    claim="Are some points of the cube better than others, and can gradient descent find them?",
    is_open=True,
    alt="Left: contours of test loss and accuracy on the plane through A, B and the learned shares, with random points "
    "and corners as dots. Right: loss and accuracy from the midpoint to the learned shares.",
    config=LandscapeConfig,
    combinations=lambda config: (
        math.prod(map(len, slice_axes(config.grid))) + len(slice_axes(config.grid)[1]) + len(KINDS) * config.scatter
    ),
    results=LandscapeResults,
    measure=measure,
    draw=draw,
    judge=judge,
    judge_together=judge_together,
    table=table,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
