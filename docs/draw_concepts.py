"""Draw the figures of concepts.md into docs/concepts/.

    python -m docs.draw_concepts    # a few seconds

The library's distributions draw the shares, for a network of three weights. The symmetry graph is derived from a real
function.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

import mcomb
from docs.pictures import write_picture
from mcomb.combination import Distribution
from mcomb.lab.figures import COLOURS, STYLE
from mcomb.lab.symmetry_graph import draw_graph

FOLDER = Path(__file__).parent / "concepts"
PLAIN = STYLE | {"axes.grid": False}
CORNERS = np.array(np.meshgrid([0, 1], [0, 1], [0, 1])).reshape(3, -1).T
UNITS = ("#0072B2", "#E69F00", "#009E73")  # colours of three hidden units
ORDER = (2, 0, 1)  # the order of the units in B


def project(points: Any) -> np.ndarray:
    """Project points of the cube onto the page, seen from the front, slightly from above and from the left."""
    x, y, z = np.moveaxis(np.asarray(points, float), -1, 0)
    return np.stack([x - 0.4 * z, y + 0.36 * z], -1)


def draw_box(axes: Axes, low: float, high: float, **style: Any) -> None:
    """Draw the edges of a box, the hidden ones dotted."""
    corners = low + (high - low) * CORNERS
    hidden = np.array([1, 0, 1])  # the corner behind all others
    for i, one in enumerate(CORNERS):
        for j, other in enumerate(CORNERS[:i]):
            if np.abs(one - other).sum() == 1:
                behind = (one == hidden).all() or (other == hidden).all()
                ends = project(corners[[i, j]])
                axes.plot(*ends.T, **style | ({"linestyle": ":"} if behind else {}))


def sample(distribution: Distribution, parameter: float, count: int = 150) -> np.ndarray:
    """Draw the shares of a network of three weights, several times."""
    keys = jax.random.split(jax.random.key(0), count)
    return np.asarray(jax.vmap(lambda key: distribution(key, jnp.float32(parameter), jnp.zeros(3)))(keys))


def plane(mean: float) -> np.ndarray:
    """Return the corners of the polygon where the cube intersects the plane of shares with the given mean, in order."""
    ends = [(one, other) for one in CORNERS for other in CORNERS if (other - one).min() == 0 == (other - one).sum() - 1]
    along = [(one, other, 3 * mean - one.sum()) for one, other in ends]
    corners = np.array([one + t * (other - one) for one, other, t in along if 0 <= t <= 1])
    right, up = np.array([[1, -1, 0], [1 / 3**0.5, 1 / 3**0.5, -2 / 3**0.5]]) @ (corners - corners.mean(0)).T
    return corners[np.argsort(np.arctan2(up, right))]


def draw_cube(path: Path) -> None:
    """Draw the shares of a network of three weights, for each distribution."""
    on_plane = sample(mcomb.hyperplane, 0.4, 20_000)
    on_plane = on_plane[np.abs(on_plane.mean(-1) - 0.4) < 0.004][:150]
    line = np.stack([sample(mcomb.linear, share, 1)[0] for share in np.linspace(0, 1, 11)])
    panels: list[tuple[str, np.ndarray, tuple[float, float] | None]] = [
        ("linear: the line from A to B", line, None),
        ("uniform: a box around the middle", sample(mcomb.uniform, 0.25), (0.25, 0.75)),
        ("subcube: a cube that slides from A to B", sample(mcomb.subcube, 0.3), (0, 0.6)),
        ("hyperplane: all shares of one mean", on_plane, None),
        ("bernoulli: corners, each weight A's or B's", CORNERS, None),
        ("centered: a box around A, half outside", sample(mcomb.centered, 0.25), (-0.25, 0.25)),
    ]
    with matplotlib.rc_context(PLAIN):
        figure = Figure(figsize=(6.4, 4.7), layout="constrained")
        for axes, (title, points, box) in zip(figure.subplots(2, 3).flat, panels, strict=True):
            draw_box(axes, 0, 1, color="0.55", linewidth=0.8)
            if box:
                draw_box(axes, *box, color=COLOURS["aligned"], linewidth=0.8)
            if title.startswith("hyperplane"):
                axes.fill(*project(plane(0.4)).T, color=COLOURS["aligned"], alpha=0.15, linewidth=0)
            size, alpha = (4, 0.5) if len(points) > len(line) else (8, 1)
            style: Any = {"color": COLOURS["aligned"], "markersize": size, "alpha": alpha, "markeredgewidth": 0}
            axes.plot(*project(points).T, ".-" if points is line else ".", **style)
            for name, corner, side in (("A", 0, -1), ("B", 1, 1)):
                x, y = project(np.full(3, corner))
                axes.plot(x, y, "o", color="black", markersize=4)
                label: Any = {"fontsize": 10, "weight": "bold", "ha": "center", "va": "center"}
                label["bbox"] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}
                axes.text(x + 0.12 * side, y + 0.1 * side, name, **label)
            axes.set_title(title.replace(": ", "\n"))
            axes.set_xlim(-0.5, 1.15)
            axes.set_ylim(-0.36, 1.5)
            axes.set_aspect("equal")
            axes.axis("off")
        write_picture(figure, path)


def blend(*colours: str) -> tuple[float, ...]:
    """Return the mean of colours."""
    return tuple(np.mean([to_rgb(colour) for colour in colours], axis=0))


def draw_network(axes: Axes, hidden: Sequence[Any], names: Sequence[str], title: str) -> None:
    """Draw a network with two inputs and two outputs; each hidden unit and its weights have one colour."""
    heights, outside = np.linspace(1, 0, len(hidden)), (0.75, 0.25)
    for y, colour, name in zip(heights, hidden, names, strict=True):
        for side in (0, 2):
            for end in outside:
                axes.plot([1, side], [y, end], color=colour, linewidth=1.6, zorder=1)
        axes.plot(1, y, "o", color=colour, markersize=17, zorder=2)
        axes.text(1, y, name, color="white", ha="center", va="center_baseline", fontsize=6.5, weight="bold", zorder=3)
    for side in (0, 2):
        for y in outside:
            axes.plot(side, y, "o", color="white", markeredgecolor="0.3", markersize=9, zorder=2)
    axes.set_title(title)
    axes.set_xlim(-0.3, 2.3)
    axes.set_ylim(-0.2, 1.2)
    axes.axis("off")


def draw_orders(path: Path) -> None:
    """Draw a network, a copy with reordered units, and their naive and aligned means."""
    names = ("1", "2", "3")
    moved = [UNITS[i] for i in ORDER]
    mixed = [blend(a, b) for a, b in zip(UNITS, moved, strict=True)]
    pairs = [f"{a}+{b}" for a, b in zip(names, (names[i] for i in ORDER), strict=True)]
    with matplotlib.rc_context(PLAIN):
        figure = Figure(figsize=(6.4, 1.9), layout="constrained")
        a, b, naive, aligned = figure.subplots(1, 4)
        draw_network(a, UNITS, names, "network A\n")
        draw_network(b, moved, [names[i] for i in ORDER], "B: the same units\nin another order")
        draw_network(naive, mixed, pairs, "½ A + ½ B, naive:\nunrelated units")
        draw_network(aligned, UNITS, [f"{name}+{name}" for name in names], "½ A + ½ B, aligned:\nmatched units")
        write_picture(figure, path)


class Small(nn.Module):
    """A residual network with one block."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(8, name="stem")(x)
        x = x + nn.Dense(8, name="down")(nn.relu(nn.Dense(16, name="up")(x)))
        return nn.Dense(3, name="head")(x)


def draw_symmetry_graph(path: Path) -> None:
    """Draw the symmetry graph of a small residual network, as `python -m mcomb inspect --graph` does."""
    x = jax.ShapeDtypeStruct((1, 4), jnp.float32)
    params = jax.eval_shape(Small().init, jax.random.key(0), x)["params"]
    spec = mcomb.derive_spec(lambda params, x: Small().apply({"params": params}, x), params, x)
    draw_graph(spec, path)


PICTURES: dict[str, Callable[[Path], None]] = {
    "cube": draw_cube,
    "orders": draw_orders,
    "graph": draw_symmetry_graph,
}


def main() -> None:
    """Draw all figures."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        draw(FOLDER / f"{name}.png")
        print(FOLDER / f"{name}.png")


if __name__ == "__main__":
    main()
