"""Compare matching by weights, activations and straight-through estimator.

    python -m experiments.matchers --setup mlp-digits    # two minutes on two CPU cores, networks included
    python -m experiments.matchers --width 32            # on an accelerator

For each matcher, the experiment measures the inner product of the aligned weights, the time without compilation, and
the barriers of `linear` and `uniform`. The baselines are no matching, and the best of several restarts of weight
matching. In the paper, the three matchers are very close in performance. On digits, expect test loss barriers of
`uniform` of 1.5 naive, 0.06 by weights, 0.07 by activations and 0.03 by ste.
"""

import itertools
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from mcomb.combination import linear, uniform
from mcomb.io.paths import AnyPath
from mcomb.lab.cache.matchings import MatchingKey
from mcomb.lab.cli import Flag
from mcomb.lab.figures import STYLE, save
from mcomb.lab.flags import SweepConfig
from mcomb.lab.runs.command import main
from mcomb.lab.runs.experiment import Experiment
from mcomb.lab.runs.measure import Run, Task
from mcomb.lab.runs.results import METRICS, SPLITS, Curves, Number, spread, table
from mcomb.lab.runs.verdicts import Verdict, clearly_less
from mcomb.lab.tables import columns
from mcomb.matching.matchers import MATCHERS

MATCHER_SWEEPS = {"linear": (linear, 1.0), "uniform": (uniform, 0.5)}  # the distribution and the last value


@dataclass(frozen=True)
class MatchersConfig(SweepConfig):
    """Flags of a sweep, without --matcher, because the experiment compares all matchers."""

    matcher: ClassVar[str] = ""  # type: ignore[misc]
    restarts: Annotated[int, Flag("restarts of weight matching; the best one counts", at_least=2)] = 8


@dataclass(frozen=True)
class Reached:
    """The result of a matcher: the inner product of the weights, and the seconds that matching took."""

    objective: Number
    seconds: Number


@dataclass(frozen=True, kw_only=True)
class MatchersResults(Curves):
    """Results of `matchers`: the result of each, and the inner product of each restart of weight matching."""

    reached: dict[str, Reached]
    tried: list[Number]


def matchings(config: Any) -> list[MatchingKey]:
    """Return each matcher's matching of B to A, and the best of several restarts of weight matching."""
    return [*(MatchingKey("B", "A", matcher) for matcher in MATCHERS), best_of_several(config)]


def best_of_several(config: Any) -> MatchingKey:
    """Return the matching of B to A that is the best of several restarts of weight matching."""
    return MatchingKey("B", "A", "weights", config.restarts)


def measure(run: Run) -> MatchersResults:
    """Measure each matcher's inner product, time and barriers."""
    config, a, b = run.config, *(run.networks[letter].params for letter in "AB")
    by_weights, *others, best_of = matchings(config)
    keys = {key.method: key for key in (by_weights, best_of, *others)}
    kept = {name: run.matchings[key] for name, key in keys.items()}
    pairs = {"naive": (a, b)} | {name: (a, run.align(key)) for name, key in keys.items()}
    tasks: dict[str, Task] = {}
    for sweep, (combine, last) in MATCHER_SWEEPS.items():
        samples = 1 if sweep == "linear" else config.samples
        values = np.repeat(np.linspace(0, last, config.points, dtype=np.float32), samples)
        tasks |= {f"{sweep}, {name}": Task(combine, pair, values, rng_name=sweep) for name, pair in pairs.items()}
    best = run.matchings[best_of].matching
    reached = {name: Reached(it.matching.objective, it.seconds) for name, it in kept.items()}
    return MatchersResults(
        **run.measure_curves(tasks, (config.points, -1)),
        reached={"naive": Reached(kept["weights"].matching.trace[0], 0.0)} | reached,
        tried=list(best.tried),
    )


def tables(results: MatchersResults) -> str:
    """Format the barriers, then each matcher's inner product and time."""
    head = ("", "inner product", "seconds")
    cells = [
        (name, f"{matcher.objective:.2f}", in_seconds(matcher.seconds)) for name, matcher in results.reached.items()
    ]
    return f"{table(results)}\n{columns([head, *cells])}"


def in_seconds(seconds: float) -> str:
    """Format seconds, with two digits below one second because weight matching may take milliseconds."""
    return f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.2g}"


def judge(results: MatchersResults) -> Verdict:
    """Require that all matchers' barriers are at most half of the naive one and differ by at most a tenth of it."""
    barriers = {name: barrier["test"] for name, barrier in results.barriers.items()}
    close, below, sentences = True, True, []
    for sweep in MATCHER_SWEEPS:
        naive, three = barriers[f"{sweep}, naive"], {name: barriers[f"{sweep}, {name}"] for name in MATCHERS}
        below &= all(clearly_less(barrier, naive) for barrier in three.values())
        for metric in METRICS:
            values = [barrier[metric] for barrier in three.values()]
            close &= max(values) - min(values) <= 0.1 * naive[metric]
        each = [f"{name} {it['loss']:.3f} / {it['accuracy']:.1%}" for name, it in ({"naive": naive} | three).items()]
        sentences.append(f"{sweep}: {', '.join(each)}")
    tried = results.tried
    spread = (max(tried) - min(tried)) / abs(max(tried))
    return Verdict(
        bool(close and below),
        f"The barriers of the three matchers are {'all' if below else 'not all'} below half of the naive barrier, and "
        f"differ by {'less' if close else 'more'} than a tenth of it. Test loss / accuracy barriers of "
        f"{'; '.join(sentences)}. The best of {len(tried)} restarts has an inner product {spread:.2%} above the worst.",
    )


LABELS = {"ste": "straight-through"}
MARKS = (("linear", "o", "#0072B2", 0.14), ("uniform", "s", "#D55E00", -0.14))


def draw(results: MatchersResults, folder: AnyPath) -> None:
    """Draw each matcher's barriers of `linear` and `uniform`, and its inner product."""
    reached = results.reached
    at = np.arange(len(reached))[::-1]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.8, 2.7), layout="constrained")
        *barriers, products = figure.subplots(1, 3, sharey=True)
        for axes, metric in zip(barriers, METRICS, strict=True):
            axes.set_xscale("symlog", linthresh=0.01)  # barriers may be 0, and naive ones are much larger
            axes.xaxis.set_major_formatter("{x:g}")
            axes.axvline(0, color="0.35", linewidth=0.8)
            for (sweep, marker, colour, offset), split in itertools.product(MARKS, SPLITS):
                values, low, high = (
                    np.array([part.barriers[f"{sweep}, {name}"][split][metric] for name in reached])
                    for part in (results, *spread(results))
                )
                style: Any = {"color": colour, "markersize": 4.5, "markeredgewidth": 0.9}
                face = colour if split == "test" else "white"
                axes.plot(values, at + offset, marker, markerfacecolor=face, label=f"{sweep}, {split}", **style)
                axes.hlines(at + offset, low, high, color=colour, linewidth=0.8)
            axes.set_xlabel(f"{metric} barrier")
        products.plot([matcher.objective for matcher in reached.values()], at, "D", color="black", markersize=4)
        products.set_xlabel("inner product of A and B")
        times = [f"\n{in_seconds(matcher.seconds)} s" if matcher.seconds else "" for matcher in reached.values()]
        barriers[0].set_yticks(at, [LABELS.get(name, name) + time for name, time in zip(reached, times, strict=True)])
        barriers[0].set_ylim(-0.6, len(reached) - 0.4)
        handles, labels = barriers[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        figure.suptitle(results.title, fontsize=9)
        save(figure, folder, results.experiment)


EXPERIMENT = Experiment(
    name="matchers",
    title="three ways to match",
    claim="Matching weights, matching activations and the straight-through estimator are very close in performance.",
    alt="Loss and accuracy barriers without matching and with four matchers, and the inner products of the weights.",
    matchings=matchings,
    config=MatchersConfig,
    combinations=lambda config: (2 + len(MATCHERS)) * config.points * (1 + config.samples),  # 2: naive, best of several
    results=MatchersResults,
    measure=measure,
    draw=draw,
    judge=judge,
    table=tables,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
