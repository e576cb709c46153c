"""Combinations of three networks: a grid on the triangle of A, B and C, both others matched to A.

    python -m experiments.triangle --setup mlp-digits
    python -m experiments.triangle --width 40              # the paper's, on an accelerator
    python -m experiments.triangle --setup mlp-digits --beyond 0.5

The paper, at width 40: the worst network on the triangle has a test accuracy above 0.91, and the best, Θ*, can lie
in its interior.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from mcomb import figures
from mcomb.cli import Flag
from mcomb.combine import blend
from mcomb.experiment import Experiment, Finding, Results, main, models_of
from mcomb.results import SPLITS, Rows
from mcomb.workspace import CombinationConfig, Network, Task, Workspace


@dataclass(frozen=True)
class TriangleConfig(CombinationConfig):
    """The flags of the triangle."""

    grid: Annotated[int, Flag("steps along an edge of the triangle", at_least=2)] = 20
    beyond: Annotated[float, Flag("how far past the edges the grid goes", at_least=0)] = 0.0


def grid(steps: int, beyond: float) -> np.ndarray:
    """The shares (λ_B, λ_C) of all grid points whose three shares are at least −beyond."""
    extra = round(steps * beyond)
    i, j = np.meshgrid(*[np.arange(-extra, steps + 2 * extra + 1)] * 2, indexing="ij")
    inside = (steps - i - j) >= -extra
    return (np.stack([i[inside], j[inside]], axis=1) / steps).astype(np.float32)


def place(shares: list[float]) -> str:
    """Where on the triangle a point with the shares (λ_B, λ_C) lies."""
    three = np.array([1 - sum(shares), *shares])
    if (three < -1e-6).any():
        return "outside the triangle"
    on = (three < 1e-6).sum()
    return ("in the interior", "on an edge", "at a corner")[on]


def measure(workspace: Workspace, networks: dict[str, Network], rows: Rows) -> Results:
    """The metrics of every grid point, and the best of them by test accuracy, then by test loss."""
    config = workspace.config
    a, b, c = (networks[letter] for letter in "ABC")
    shares = grid(config.grid, config.beyond)  # type: ignore[attr-defined]
    corners = (a.params, workspace.aligned(a, b), workspace.aligned(a, c))
    scores = workspace.scores({"A": a.params, "B": b.params, "C": c.params})
    references = {split: np.stack([scores[model][split].predicted for model in "AB"]) for split in SPLITS}
    metrics = workspace.measure(rows, {"aligned": Task(blend, corners, shares)}, references, len(shares))["aligned"]
    best = np.lexsort((metrics["test"].loss, -metrics["test"].accuracy))[0]  # by accuracy, then by loss
    return {
        "shares": shares.tolist(),
        "beyond": config.beyond,  # type: ignore[attr-defined]
        "models": models_of(scores),
        "points": {s: {"loss": m.loss.tolist(), "accuracy": m.accuracy.tolist()} for s, m in metrics.items()},
        "best": {"shares": shares[best].tolist(), "place": place(shares[best].tolist())},
        "best_index": int(best),
    }


def conclude(results: Results) -> Finding:
    """Where the best network lies, and whether the worst on the triangle still works."""
    accuracy = np.array(results["points"]["test"]["accuracy"])
    shares = np.array(results["shares"])
    inside = (shares.min(1) > -1e-6) & (shares.sum(1) < 1 + 1e-6)
    corners = [results["models"][model]["test"]["accuracy"] for model in "ABC"]
    worst, best = accuracy[inside].min(), accuracy[results["best_index"]]
    return bool(np.mean(corners) - worst <= 0.1), (
        f"The worst of {inside.sum()} networks on the triangle has a test accuracy of {worst:.1%}; the best, Θ*, has "
        f"{best:.1%} and lies {results['best']['place']}; A, B and C have "
        f"{', '.join(f'{corner:.1%}' for corner in corners)}."
    )


EXPERIMENT = Experiment(
    name="triangle",
    title="test accuracy on the triangle of three networks",
    claim="All convex combinations of three aligned networks work, and the best can be in the interior.",
    alt="Heat map of test accuracy on an equilateral triangle, A, B and C at its corners, the best point marked.",
    networks="ABC",
    config=TriangleConfig,
    measure=measure,
    draw=figures.triangle,
    conclude=conclude,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
