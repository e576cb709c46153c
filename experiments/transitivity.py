"""Interpolation between B and C, both matched to a third network A and never to each other.

    python -m experiments.transitivity --setup mlp-digits

The paper: the two are linearly connected. Beside it, B and C as they are, and C matched to B directly.
"""

import numpy as np

from mcomb import figures
from mcomb.combine import linear, mix
from mcomb.experiment import Experiment, Finding, Results, main, measure_curves
from mcomb.results import Rows
from mcomb.workspace import LineConfig, Network, Task, Workspace


def measure(workspace: Workspace, networks: dict[str, Network], rows: Rows) -> Results:
    """The curves from B to C: naive, through A, and matched directly."""
    a, b, c = (networks[letter] for letter in "ABC")
    values = np.linspace(0, 1, workspace.config.points, dtype=np.float32)  # type: ignore[attr-defined]
    pairs = {
        "naive": (b.params, c.params),
        "through A": (workspace.aligned(a, b), workspace.aligned(a, c)),
        "direct": (b.params, workspace.aligned(b, c)),
    }
    tasks = {name: Task(mix(linear), pair, values) for name, pair in pairs.items()}
    curves = measure_curves(workspace, rows, {"B": b.params, "C": c.params}, tasks, (len(values), 1))
    return {"parameter": {"name": "λ", "label": "λ: B at 0, C at 1", "values": values.tolist()}, **curves}


def conclude(results: Results) -> Finding:
    """Whether B and C are connected through A."""
    lost = {name: barrier["test"]["accuracy"] for name, barrier in results["barriers"].items()}
    return lost["through A"] <= 0.1 and lost["through A"] < lost["naive"], (
        f"On the line from B to C test accuracy falls by {lost['through A']:.1%} at most when both are matched to "
        f"A, by {lost['direct']:.1%} when C is matched to B, and by {lost['naive']:.1%} when nothing is."
    )


EXPERIMENT = Experiment(
    name="transitivity",
    title="B and C through A",
    claim="Two networks matched to a common third one are linearly connected with each other.",
    alt="Loss and accuracy on the line from B to C: naive, both matched to A, and C matched to B.",
    networks="ABC",
    config=LineConfig,
    measure=measure,
    draw=figures.sweep,
    conclude=conclude,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
