"""Draw how combinations mix the weights of a blue and an orange network.

    python -m experiments.schematic --setup mlp-digits    # no training, a second

The colour of a cell is the share of each network, and its brightness is the value of the weight. The weights are random
numbers. The shares come from the same functions as in the experiments.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from mcomb.combination import bernoulli, mix, stitch, uniform
from mcomb.io.paths import AnyPath
from mcomb.keys import stream
from mcomb.lab.figures import STYLE, save
from mcomb.lab.flags import Config
from mcomb.lab.runs.command import main
from mcomb.lab.runs.experiment import Experiment
from mcomb.lab.runs.measure import Run
from mcomb.lab.runs.results import Number, Results
from mcomb.lab.runs.verdicts import Verdict


@dataclass(frozen=True)
class SchematicConfig(Config):
    """Flags of an experiment without --pairs, because there are no networks."""

    pairs: ClassVar[int] = 1  # type: ignore[misc]


@dataclass(frozen=True, kw_only=True)
class SchematicResults(Results):
    """Results of `schematic`: the shares and the weights of each layer of each picture."""

    panels: dict[str, dict[str, dict[str, list[list[Number]]]]]


SHAPES = {"1": (5, 7), "2": (7, 7), "3": (7, 4)}  # shape of each layer


def measure(run: Run) -> SchematicResults:
    """Compute the share of the orange network and the value of each weight for five pictures."""
    seed = run.config.seed
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
    return SchematicResults(panels=panels)


def judge(results: SchematicResults) -> Verdict:
    """Return no verdict."""
    return Verdict(None, "This figure is an illustration without measurements.")


def draw(results: SchematicResults, folder: AnyPath) -> None:
    """Draw the layers of each combination as grids of cells, coloured by share and shaded by weight."""
    blue, orange = (np.array(to_rgb(colour)) for colour in ("#0072B2", "#E69F00"))
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(6.4, 2.6), layout="constrained")
        panels = figure.subplots(3, len(results.panels))
        for column, (name, panel) in zip(panels.T, results.panels.items(), strict=True):
            for axes, layer in zip(column[::-1], panel["shares"], strict=True):  # first layer at the bottom
                share, weight = (np.array(panel[kind][layer])[..., None] for kind in ("shares", "weights"))
                hue = (1 - share) * blue + share * orange
                height, width, _ = hue.shape
                box = (-width / 2, width / 2, -height / 2, height / 2)  # same cell size in all layers
                axes.imshow(hue * weight + (1 - weight), interpolation="nearest", extent=box)
                axes.set(xlim=(-4, 4), ylim=(-4, 4))
                axes.axis("off")
            column[0].set_title(name)
        figure.supylabel("layers", fontsize=8)
        save(figure, folder, results.experiment)


EXPERIMENT = Experiment(
    name="schematic",
    title="how combinations mix weights",
    claim="An illustration of the combinations (the paper's first figure).",
    alt="Three layers of a blue and an orange network as grids of cells, and their uniform, Bernoulli and "
    "stitched combinations.",
    networks="",
    config=SchematicConfig,
    results=SchematicResults,
    measure=measure,
    draw=draw,
    judge=judge,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
