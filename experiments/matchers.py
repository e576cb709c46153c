"""The three matchers on one pair: by weights, by activations, and by a straight-through estimator (ste).

    python -m experiments.matchers --setup mlp-digits    # two minutes on two CPU cores, networks included
    python -m experiments.matchers --width 32            # on an accelerator

For each the inner product of weights that it reaches, the seconds it takes, compilation among them, and the barriers of
`linear` and of `uniform`, of the very networks that `--matcher` has these measure; beside them no matching, and the
best of several orders in which weight matching may visit the permutations. The paper: the three are very close in
performance. Expect on digits test loss barriers of uniform shares of 1.5 naive, 0.06 by weights, 0.07 by activations
and 0.03 by ste.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from mcomb import figures
from mcomb.cli import Flag
from mcomb.combine import linear, mix, uniform
from mcomb.experiment import Experiment, Finding, Results, main, measure_curves
from mcomb.matchers import MATCHERS
from mcomb.results import METRICS, Rows, columns, table
from mcomb.workspace import Network, SweepConfig, Task, Workspace

SWEEPS = {"linear": (mix(linear), 1.0), "uniform": (mix(uniform), 0.5)}  # how to combine, and the last value


@dataclass(frozen=True)
class MatchersConfig(SweepConfig):
    """The flags of a sweep but for --matcher, which is no field here: all matchers are compared."""

    matcher: ClassVar[str] = ""  # type: ignore[misc]
    orders: Annotated[int, Flag("orders of visits to try in weight matching", at_least=2)] = 8


def measure(workspace: Workspace, networks: dict[str, Network], rows: Rows) -> Results:
    """What each matcher reaches and takes, and its barriers."""
    config: MatchersConfig = workspace.config  # type: ignore[assignment]
    a, b = networks["A"], networks["B"]
    found = {"weights": workspace.matching(a, b, "weights")}
    found |= {f"weights, best of {config.orders}": workspace.matching(a, b, "weights", config.orders)}
    best, _ = found[f"weights, best of {config.orders}"]
    found |= {matcher: workspace.matching(a, b, matcher) for matcher in MATCHERS if matcher not in found}
    pairs = {"naive": (a.params, b.params)}
    pairs |= {name: (a.params, workspace.permuted(b, matching)) for name, (matching, _) in found.items()}
    tasks: dict[str, Task] = {}
    for sweep, (combine, last) in SWEEPS.items():
        samples = 1 if sweep == "linear" else config.samples
        values = np.repeat(np.linspace(0, last, config.points, dtype=np.float32), samples)
        tasks |= {f"{sweep}, {name}": Task(combine, pair, values, like=sweep) for name, pair in pairs.items()}
    matchings = {name: {"objective": it.objective, "seconds": seconds} for name, (it, seconds) in found.items()}
    return {
        "matchings": {"naive": {"objective": best.trace[0], "seconds": 0.0}} | matchings,
        "tried": best.tried,
        **measure_curves(workspace, rows, {"A": a.params, "B": b.params}, tasks, (config.points, -1)),
    }


def tables(results: Results) -> str:
    """The barriers, then what each matcher reaches and how long it takes."""
    head = ("", "inner product", "seconds")
    cells = [
        (name, f"{matching['objective']:.2f}", f"{matching['seconds']:.1f}")
        for name, matching in results["matchings"].items()
    ]
    return f"{table(results)}\n{columns([head, *cells])}"


def conclude(results: Results) -> Finding:
    """Whether the three matchers' barriers differ by less than a tenth of the naive one."""
    barriers = {name: barrier["test"] for name, barrier in results["barriers"].items()}
    close, sentences = True, []
    for sweep in SWEEPS:
        naive, three = barriers[f"{sweep}, naive"], {name: barriers[f"{sweep}, {name}"] for name in MATCHERS}
        for metric in METRICS:
            values = [barrier[metric] for barrier in three.values()]
            close &= max(values) - min(values) <= 0.1 * naive[metric]
        each = [f"{name} {it['loss']:.3f} / {it['accuracy']:.1%}" for name, it in ({"naive": naive} | three).items()]
        sentences.append(f"{sweep}: {', '.join(each)}")
    tried = results["tried"]
    spread = (max(tried) - min(tried)) / abs(max(tried))
    return close, (
        f"By weights, by activations and by ste, barriers differ by {'less' if close else 'more'} than a tenth of the "
        f"naive one. Test loss / accuracy, {'; '.join(sentences)}. Of {len(tried)} orders of visits, the best has an "
        f"inner product {spread:.2%} above the worst."
    )


EXPERIMENT = Experiment(
    name="matchers",
    title="three ways to match",
    claim="Matching weights, matching activations and the straight-through estimator are very close in performance.",
    alt="Barriers in loss and accuracy of no matching and of four matchers, and the inner products they reach.",
    config=MatchersConfig,
    measure=measure,
    draw=figures.matchers,
    conclude=conclude,
    table=tables,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
