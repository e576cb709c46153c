"""The edge lengths of the box between A and B: |Θ_A − Θ_B| for every weight, naive and aligned.

    python -m experiments.edges --setup mlp-digits
    python -m experiments.edges --setup tiny10-cifar10 --width 16     # the paper's, on an accelerator

The paper: many lengths are near zero, and many are not.
"""

import numpy as np

from mcomb import figures
from mcomb.base import Params, named_leaves
from mcomb.experiment import Experiment, Finding, Results, main
from mcomb.results import Rows
from mcomb.workspace import Network, Workspace

BINS = 80


def lengths_by_layer(workspace: Workspace, a: Params, b: Params) -> dict[int, np.ndarray]:
    """The lengths of all edges, by layer."""
    found: dict[int, list[np.ndarray]] = {}
    others = named_leaves(b)
    for name, leaf in named_leaves(a).items():
        found.setdefault(workspace.setup.model.layer_of(name), []).append(np.abs(leaf - others[name]).ravel())
    return {layer: np.concatenate(parts) for layer, parts in sorted(found.items())}


def measure(workspace: Workspace, networks: dict[str, Network], rows: Rows) -> Results:
    """Histograms of the edge lengths on common bins, overall and by layer."""
    a, b = networks["A"], networks["B"]
    pairs = {"naive": b.params, "aligned": workspace.aligned(a, b)}
    lengths = {name: lengths_by_layer(workspace, a.params, other) for name, other in pairs.items()}
    longest = max(layer.max() for layers in lengths.values() for layer in layers.values())
    bins = np.linspace(0, longest, BINS + 1)
    scale = float(np.sqrt(np.mean(np.concatenate([np.ravel(leaf) for leaf in named_leaves(a.params).values()]) ** 2)))
    everything = {name: np.concatenate(list(layers.values())) for name, layers in lengths.items()}
    return {
        "bins": bins.tolist(),
        "overall": {name: np.histogram(values, bins)[0].tolist() for name, values in everything.items()},
        "layers": {
            name: {str(layer): np.histogram(values, bins)[0].tolist() for layer, values in layers.items()}
            for name, layers in lengths.items()
        },
        "weight_scale": scale,
        "mean": {name: float(values.mean()) for name, values in everything.items()},
        "near_zero": {name: float((values < 0.1 * scale).mean()) for name, values in everything.items()},
        "long": {name: float((values > scale).mean()) for name, values in everything.items()},
    }


def conclude(results: Results) -> Finding:
    """Whether many aligned edges are near zero and many are not."""
    near, long, mean = (results[name] for name in ("near_zero", "long", "mean"))
    return near["aligned"] > 0.05 and long["aligned"] > 0.05, (
        f"Aligned, {near['aligned']:.1%} of the edges are shorter than a tenth of the weights' root mean square "
        f"({near['naive']:.1%} naive) and {long['aligned']:.1%} longer than all of it ({long['naive']:.1%}); "
        f"the mean length is {mean['aligned']:.4f} aligned and {mean['naive']:.4f} naive."
    )


EXPERIMENT = Experiment(
    name="edges",
    title="edge lengths of the box between A and B",
    claim="Edge lengths vary widely: a large part is near zero, and a significant part is not.",
    alt="Histograms of the absolute differences of paired weights on a log scale, overall and by layer.",
    measure=measure,
    draw=figures.edges,
    conclude=conclude,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
