"""The three matchers on one pair: by weights, by activations, and by a straight-through estimator (ste).

    python -m experiments.matchers --setup mlp-digits    # two minutes on two CPU cores, networks included
    python -m experiments.matchers --width 32            # on an accelerator

For each the inner product of weights that it reaches, the seconds it takes without compilation, and the barriers of
`linear` and of `uniform`, of the very networks that `--matcher` has these measure; beside them no matching, and the
best of several restarts of weight matching. The paper: the three are very close in performance. Expect on digits test
loss barriers of uniform shares of 1.5 naive, 0.06 by weights, 0.07 by activations and 0.03 by ste.
"""

import itertools
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from mcomb.combination import linear, uniform
from mcomb.io.paths import AnyPath
from mcomb.lab.cli import Flag
from mcomb.lab.figures import STYLE, save
from mcomb.lab.runs.experiment import Experiment, main
from mcomb.lab.runs.flags import SweepConfig
from mcomb.lab.runs.measure import Run, Task
from mcomb.lab.runs.pairs import spread
from mcomb.lab.runs.results import METRICS, SPLITS, Results, columns, table
from mcomb.lab.runs.verdicts import Verdict, clearly_less
from mcomb.matching.matchers import MATCHERS

SWEEPS = {"linear": (linear, 1.0), "uniform": (uniform, 0.5)}  # how to combine, and the last value


@dataclass(frozen=True)
class MatchersConfig(SweepConfig):
    """The flags of a sweep but for --matcher, which is no field here: all matchers are compared."""

    matcher: ClassVar[str] = ""  # type: ignore[misc]
    restarts: Annotated[int, Flag("restarts of weight matching to try", at_least=2)] = 8


def matchings(config: Any) -> dict[str, tuple[str, int]]:
    """Each matcher's matching of B to A, and that of the best of several restarts of weight matching."""
    methods = {matcher: (matcher, 1) for matcher in MATCHERS} | {best_of(config.restarts): ("weights", config.restarts)}
    return {f"B to A, {name}": method for name, method in methods.items()}


def best_of(restarts: int) -> str:
    """What weight matching with several restarts is called."""
    return f"weights best of {restarts}"


def measure(run: Run) -> Results:
    """What each matcher reaches and takes, and its barriers."""
    config, a, b = run.config, *(run.networks[letter].params for letter in "AB")
    names = ["weights", best_of(config.restarts), *(name for name in MATCHERS if name != "weights")]
    kept = {name: run.matchings[f"B to A, {name}"] for name in names}
    pairs = {"naive": (a, b)} | {name: (a, run.align(f"B to A, {name}")) for name in names}
    tasks: dict[str, Task] = {}
    for sweep, (combine, last) in SWEEPS.items():
        samples = 1 if sweep == "linear" else config.samples
        values = np.repeat(np.linspace(0, last, config.points, dtype=np.float32), samples)
        tasks |= {f"{sweep}, {name}": Task(combine, pair, values, rng_name=sweep) for name, pair in pairs.items()}
    best = kept[best_of(config.restarts)].matching
    reached = {name: {"objective": it.matching.objective, "seconds": it.seconds} for name, it in kept.items()}
    return {
        "reached": {"naive": {"objective": kept["weights"].matching.trace[0], "seconds": 0.0}} | reached,
        "tried": best.tried,
        **run.measure_curves(tasks, (config.points, -1)),
    }


def tables(results: Results) -> str:
    """The barriers, then what each matcher reaches and how long it takes."""
    head = ("", "inner product", "seconds")
    cells = [
        (name, f"{matcher['objective']:.2f}", in_seconds(matcher["seconds"]))
        for name, matcher in results["reached"].items()
    ]
    return f"{table(results)}\n{columns([head, *cells])}"


def in_seconds(seconds: float) -> str:
    """Format seconds, of which weight matching may take a few thousandths."""
    return f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.2g}"


def judge(results: Results) -> Verdict:
    """Whether the three matchers' barriers are all well below the naive one, and differ by less than a tenth of it."""
    barriers = {name: barrier["test"] for name, barrier in results["barriers"].items()}
    close, below, sentences = True, True, []
    for sweep in SWEEPS:
        naive, three = barriers[f"{sweep}, naive"], {name: barriers[f"{sweep}, {name}"] for name in MATCHERS}
        below &= all(clearly_less(barrier, naive) for barrier in three.values())
        for metric in METRICS:
            values = [barrier[metric] for barrier in three.values()]
            close &= max(values) - min(values) <= 0.1 * naive[metric]
        each = [f"{name} {it['loss']:.3f} / {it['accuracy']:.1%}" for name, it in ({"naive": naive} | three).items()]
        sentences.append(f"{sweep}: {', '.join(each)}")
    tried = results["tried"]
    spread = (max(tried) - min(tried)) / abs(max(tried))
    return Verdict(
        bool(close and below),
        f"By weights, by activations and by ste, barriers are {'all' if below else 'not all'} below half of the naive "
        f"one and differ by {'less' if close else 'more'} than a tenth of it. Test loss / accuracy, "
        f"{'; '.join(sentences)}. Of {len(tried)} restarts, the best has an inner product {spread:.2%} above "
        "the worst.",
    )


MARKS = (("linear", "o", "#0072B2", 0.14), ("uniform", "s", "#D55E00", -0.14))


def draw(results: Results, folder: AnyPath) -> None:
    """Draws each matcher's barriers, on the line and of uniform shares, and the inner product it reaches."""
    reached = results["reached"]
    at = np.arange(len(reached))[::-1]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.8, 2.7), layout="constrained")
        *barriers, products = figure.subplots(1, 3, sharey=True)
        for axes, metric in zip(barriers, METRICS, strict=True):
            axes.set_xscale("symlog", linthresh=0.01)  # there are barriers of nothing, and naive ones are far away
            axes.xaxis.set_major_formatter("{x:g}")
            axes.axvline(0, color="0.35", linewidth=0.8)
            for (sweep, marker, colour, offset), split in itertools.product(MARKS, SPLITS):
                values, low, high = (
                    np.array([part["barriers"][f"{sweep}, {name}"][split][metric] for name in reached])
                    for part in (results, *spread(results))
                )
                style: Any = {"color": colour, "markersize": 4.5, "markeredgewidth": 0.9}
                face = colour if split == "test" else "white"
                axes.plot(values, at + offset, marker, markerfacecolor=face, label=f"{sweep}, {split}", **style)
                axes.hlines(at + offset, low, high, color=colour, linewidth=0.8)
            axes.set_xlabel(f"{metric} barrier")
        products.plot([matcher["objective"] for matcher in reached.values()], at, "D", color="black", markersize=4)
        products.set_xlabel("inner product of A and B")
        times = [f"\n{in_seconds(matcher['seconds'])} s" if matcher["seconds"] else "" for matcher in reached.values()]
        barriers[0].set_yticks(at, [name + time for name, time in zip(reached, times, strict=True)])
        barriers[0].set_ylim(-0.6, len(reached) - 0.4)
        handles, labels = barriers[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        figure.suptitle(results["title"], fontsize=9)
        save(figure, folder, results["experiment"])


EXPERIMENT = Experiment(
    name="matchers",
    title="three ways to match",
    claim="Matching weights, matching activations and the straight-through estimator are very close in performance.",
    alt="Barriers in loss and accuracy of no matching and of four matchers, and the inner products they reach.",
    matchings=matchings,
    config=MatchersConfig,
    combinations=lambda config: (2 + len(MATCHERS)) * config.points * (1 + config.samples),  # naive and best of several
    measure=measure,
    draw=draw,
    judge=judge,
    table=tables,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
