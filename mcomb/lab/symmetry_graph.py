"""Draw the symmetry graph of a network: its permutations, and the axes of weights that they act on."""

from mcomb.evaluation.plotting import STYLE
from mcomb.io.paths import AnyPath, atomic
from mcomb.symmetry.spec import PermutationSpec


def draw_graph(spec: PermutationSpec, path: AnyPath) -> None:
    """Draw a graph of the permutations and the axes that they act on."""
    import matplotlib  # importing it takes half a second
    from matplotlib.figure import Figure

    perms, leaves = list(spec.sizes), [leaf for leaf in spec.axes if spec.axes[leaf]]
    height = max(len(perms), len(leaves))
    place = {
        name: (x, height * (i + 0.5) / len(names))
        for x, names in ((0.0, perms), (1.0, leaves))
        for i, name in enumerate(names)
    }
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(5.6, 0.8 + 0.24 * height), layout="constrained")
        axes = figure.subplots()
        for i, perm in enumerate(perms):
            colour = f"C{i % 10}"
            for leaf, axis in spec.axes_of(perm):
                (x0, y0), (x1, y1) = place[perm], place[leaf]
                x1 -= 0.06 * (len(spec.axes[leaf]) - axis)
                axes.plot([x0, x1], [y0, y1], color=colour, linewidth=0.8, alpha=0.7, zorder=1)
                axes.plot(x1, y1, "o", color="white", markeredgecolor=colour, markersize=6, zorder=2)
                axes.text(x1, y1, str(axis), fontsize=5, ha="center", va="center_baseline", color=colour, zorder=3)
            axes.text(-0.02, place[perm][1], f"{perm} ({spec.sizes[perm]})", ha="right", va="center", fontsize=7)
        for leaf in leaves:
            axes.text(1.0, place[leaf][1], leaf, ha="left", va="center", fontsize=7)
        axes.set_xlim(-0.4, 1.4)
        axes.invert_yaxis()
        axes.axis("off")
        axes.set_title("permutations with their sizes, and the axes of weights that they act on")
        with atomic(path) as temporary:
            figure.savefig(temporary, dpi=200, format=path.suffix[1:])
