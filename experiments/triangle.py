"""Combine three networks on a triangular grid, with B and C matched to A.

    python -m experiments.triangle --setup mlp-digits
    python -m experiments.triangle --setup mlp-digits --pairs 5      # location of the best point for five seeds
    python -m experiments.triangle --width 40                        # the paper's networks, on an accelerator
    python -m experiments.triangle --setup mlp-digits --beyond 0.5

In the paper, at width 40, the worst network on the triangle has a test accuracy above 0.91. The best network, Θ*, may
lie in the interior, and in many cases lies on an edge.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from mcomb.combination import blend
from mcomb.evaluation.barriers import barrier
from mcomb.io.paths import AnyPath
from mcomb.lab.cache.matchings import B_TO_A, C_TO_A
from mcomb.lab.cli import Flag
from mcomb.lab.figures import STYLE, save, wrap
from mcomb.lab.flags import CombinationConfig
from mcomb.lab.runs.command import main
from mcomb.lab.runs.experiment import Experiment
from mcomb.lab.runs.measure import Run, Task
from mcomb.lab.runs.results import METRICS, Number, Results, Scores, scores_of
from mcomb.lab.runs.verdicts import Verdict, works

PLACES = ("in the interior", "on an edge", "at a corner", "outside the triangle")
PAPER_ACCURACY = {("resnet20-cifar10", 40): 0.91}  # test accuracy of the worst network, by setup and width


@dataclass(frozen=True)
class TriangleConfig(CombinationConfig):
    """Flags of `triangle`."""

    grid: Annotated[int, Flag("steps along an edge of the triangle", at_least=2)] = 20
    beyond: Annotated[float, Flag("extent of the grid beyond the edges", 0, 1000)] = 0.0


@dataclass(frozen=True)
class Best:
    """The best network on the grid: its shares (λ_B, λ_C), its place in words, and its index."""

    shares: list[Number]
    place: str | list[str]  # with --pairs, that of each pair unless all are the same
    index: Number


@dataclass(frozen=True, kw_only=True)
class TriangleResults(Results):
    """Results of `triangle`: the shares (λ_B, λ_C) and the scores of each network on the grid, and the best of them."""

    shares: list[list[Number]]
    points: Scores
    best: Best


def count_points(steps: int, beyond: float) -> int:
    """Return the number of grid points."""
    side = steps + 3 * round(steps * beyond)
    return (side + 1) * (side + 2) // 2


def grid(steps: int, beyond: float) -> np.ndarray:
    """Return the shares (λ_B, λ_C) of all grid points with three shares of at least −beyond."""
    extra = round(steps * beyond)
    i, j = np.meshgrid(*[np.arange(-extra, steps + 2 * extra + 1)] * 2, indexing="ij")
    inside = (steps - i - j) >= -extra
    return (np.stack([i[inside], j[inside]], axis=1) / steps).astype(np.float32)


def locate(shares: list[float]) -> str:
    """Describe the location of the point with shares (λ_B, λ_C)."""
    three = np.array([1 - sum(shares), *shares])
    if (three < -1e-6).any():
        return PLACES[3]
    return PLACES[(three < 1e-6).sum()]


def measure(run: Run) -> TriangleResults:
    """Measure every grid point and find the best one."""
    shares = grid(run.config.grid, run.config.beyond)
    corners = (run.networks["A"].params, run.align(B_TO_A), run.align(C_TO_A))
    metrics = run.evaluate({"aligned": Task(blend, corners, shares)})["aligned"]
    points = {split: {m: at[m].tolist() for m in METRICS} for split, at in scores_of(metrics).items()}
    best = find_best(points)
    at_best = shares[best].tolist()
    return TriangleResults(
        **run.basics, shares=shares.tolist(), points=points, best=Best(at_best, locate(at_best), best)
    )


def find_best(points: Scores) -> int:
    """Return the index of the best point by test accuracy, with ties broken by test loss."""
    return int(np.lexsort((points["test"]["loss"], -np.array(points["test"]["accuracy"])))[0])


def judge(results: TriangleResults) -> Verdict:
    """Require that the worst network on the triangle works, and locate the best one."""
    shares, points = np.array(results.shares), results.points["test"]
    inside = (shares.min(1) > -1e-6) & (shares.sum(1) < 1 + 1e-6)
    level = {m: float(np.mean([score["test"][m] for score in results.models.values()])) for m in METRICS}
    lost = {m: barrier(m, np.array(points[m])[inside], level[m], level[m]) for m in METRICS}
    worst, best = (np.array(points["accuracy"])[at] for at in (inside, int(results.best.index)))
    config = results.config
    least = PAPER_ACCURACY.get((config["setup"], config["width"]))
    corners = ", ".join(f"{score['test']['accuracy']:.1%}" for score in results.models.values())
    return Verdict(
        bool(works(results, lost) if least is None else worst.min() >= least),
        f"The lowest test accuracy of {inside.sum()} networks on the triangle is {worst.min():.1%}, and the highest "
        f"loss is {lost['loss']:.3f} above the mean of the corners. The best network, Θ*, has a test accuracy of "
        f"{best:.1%} and lies {results.best.place}. A, B and C have {corners}.",
    )


def judge_together(triangles: list[TriangleResults]) -> str:
    """Count how often the best network lies at each location."""
    counts = Counter(results.best.place for results in triangles)
    return f"The best network lies {', '.join(f'{counts[place]} times {place}' for place in PLACES if counts[place])}."


def draw(results: TriangleResults, folder: AnyPath) -> None:
    """Draw test accuracy over the shares of B and C as an equilateral triangle, with A at the lower left."""
    shares = np.array(results.shares)
    accuracy = np.array(results.points["test"]["accuracy"])
    x, y = _equilateral(shares)
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(4.0, 3.1), layout="constrained")
        axes = figure.subplots()
        shades = axes.tripcolor(x, y, accuracy, shading="gouraud", cmap="viridis")
        figure.colorbar(shades, ax=axes, label="test accuracy", shrink=0.8)
        corners = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
        axes.plot(*_equilateral(corners), color="black", linewidth=0.8)
        best = find_best(results.points)
        for corner, name, (dx, dy) in zip(corners, "ABC", ((-0.08, -0.04), (0.08, -0.04), (0.0, 0.08)), strict=False):
            cx, cy = _equilateral(corner[None])
            level = results.models[name]["test"]["accuracy"]
            called = f"{name} = Θ*" if np.allclose(shares[best], corner) else name
            axes.annotate(f"{called}\n{level:.3f}", (cx[0] + dx, cy[0] + dy), ha="center", va="center")
        axes.plot(x[best], y[best], "*", color="white", markeredgecolor="black", markersize=11, markeredgewidth=0.8)
        if not np.isclose(shares[best], corners).all(axis=1).any():
            style: Any = {"ha": "center", "textcoords": "offset points"}
            note = axes.annotate(f"Θ* {accuracy[best]:.3f}", (x[best], y[best]), (0, 9), **style)
            note.set_bbox({"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 1})
        axes.set_aspect("equal")
        axes.margins(0.13, 0.1)
        axes.axis("off")
        figure.suptitle(wrap(results.title, 48), fontsize=8)
        save(figure, folder, results.experiment)


def _equilateral(shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Convert shares (λ_B, λ_C) to coordinates with A at the origin, B at (1, 0) and C above their midpoint."""
    return shares[:, 0] + shares[:, 1] / 2, shares[:, 1] * np.sqrt(3) / 2


EXPERIMENT = Experiment(
    name="triangle",
    title="test accuracy on the triangle of three networks",
    claim="All convex combinations of three aligned networks work. The best may lie in the interior, and often lies on "
    "an edge.",
    alt="Heat map of test accuracy on an equilateral triangle with corners A, B and C. A star marks the best point.",
    in_paper={"resnet20-cifar10": (40,), "tiny10-cifar10": (40,)},
    networks="ABC",
    matchings=lambda config: (B_TO_A, C_TO_A),
    config=TriangleConfig,
    combinations=lambda config: count_points(config.grid, config.beyond),
    results=TriangleResults,
    measure=measure,
    draw=draw,
    judge=judge,
    judge_together=judge_together,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
