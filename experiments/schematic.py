"""Small pictures of what combinations do to the weights of a blue and an orange network.

    python -m experiments.schematic --setup mlp-digits    # no training, a second

Colour is the share of each network, brightness the value of the weight; the weights here are random numbers, but the
shares are drawn by the very functions that the experiments use.
"""

import jax
import jax.numpy as jnp

from mcomb import figures
from mcomb.base import stream
from mcomb.combine import bernoulli, mix, stitch, uniform
from mcomb.experiment import Experiment, Finding, Results, main
from mcomb.results import Rows
from mcomb.workspace import Network, Workspace

SHAPES = {"1": (5, 7), "2": (7, 7), "3": (7, 4)}  # layers


def measure(workspace: Workspace, networks: dict[str, Network], rows: Rows) -> Results:
    """The share of the orange network and the value of each weight, for five pictures."""
    seed = workspace.config.seed
    blue, orange = (
        {layer: jax.random.uniform(stream(seed, colour, layer), shape) for layer, shape in SHAPES.items()}
        for colour in ("blue", "orange")
    )
    none, all_of_it = (jax.tree.map(lambda leaf, v=v: jnp.full_like(leaf, v), blue) for v in (0, 1))
    draws = {
        "blue network": (stitch(int), 0.0),
        "orange network": (stitch(int), 3.0),
        "uniform": (mix(uniform), 0.5),
        "Bernoulli": (mix(bernoulli), 0.5),
        "stitching": (stitch(int), 1.0),
    }
    panels = {}
    for name, (draw, parameter) in draws.items():
        arguments = (stream(seed, name), jnp.float32(parameter))
        panels[name] = {
            "shares": jax.tree.map(lambda leaf: leaf.tolist(), draw(*arguments, none, all_of_it)),
            "weights": jax.tree.map(lambda leaf: leaf.tolist(), draw(*arguments, blue, orange)),
        }
    return {"panels": panels}


def conclude(results: Results) -> Finding:
    """Nothing: it is an illustration."""
    return None, "An illustration: nothing is measured."


EXPERIMENT = Experiment(
    name="schematic",
    title="what combinations do to weights",
    claim="An illustration of the combinations (the paper's first figure).",
    alt="Three layers of a blue and an orange network as grids of cells, and their uniform, Bernoulli and "
    "stitched combinations.",
    networks="",
    measure=measure,
    draw=figures.schematic,
    conclude=conclude,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
