"""How much of a layer's matching matters: its k least correlated pairs are re-matched at random.

    python -m experiments.robustness --setup mlp-digits
    python -m experiments.robustness --setup tiny10-cifar10 --width 32     # the paper's, on an accelerator

For each permutation the matched pairs are ordered by the correlation of their activations; a random derangement of
the k lowest is applied to the aligned B, and the barrier of the line to A is measured. The paper, for Tiny-10: a large
part of each layer can be re-matched, and layers 1, 6, 7 and 8 survive even k = N.
"""

import zlib
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import numpy as np

from mcomb import figures
from mcomb.activations import correlations
from mcomb.base import Params
from mcomb.cli import Flag
from mcomb.combine import combine
from mcomb.experiment import Experiment, Finding, Results, main, models_of
from mcomb.permute import Perms, PermutationSpec
from mcomb.results import METRICS, SPLITS, Rows, barrier
from mcomb.workspace import CombinationConfig, Network, Task, Workspace


@dataclass(frozen=True)
class RobustnessConfig(CombinationConfig):
    """The flags of the re-matching."""

    counts: Annotated[int, Flag("values of k for each layer, from 2 to all its units", at_least=2)] = 8
    line_points: Annotated[int, Flag("points on each line, end points included", at_least=3)] = 5


def derangement(rng: np.random.Generator, n: int) -> np.ndarray:
    """A permutation of n ≥ 2 things that leaves none in place, uniform among all such."""
    while True:  # one in e permutations is a derangement
        order = rng.permutation(n)
        if (order != np.arange(n)).all():
            return order


def rematched(scores: np.ndarray, k: int, rng: np.random.Generator) -> np.ndarray:
    """The permutation that deranges the k units of lowest score and leaves the others."""
    lowest = np.argsort(scores, kind="stable")[:k]
    order = np.arange(len(scores))
    order[lowest] = lowest[derangement(rng, k)]
    return order


def lines(spec: PermutationSpec) -> tuple[Any, Any]:
    """The draw of the line from A to B under further permutations, which come with the parameter; and its ends."""

    def ends(parameter: tuple[Any, Any], a: Params, b: Params) -> tuple[Params, Params]:
        return a, spec.apply(parameter[1], b)

    def draw(key: Any, parameter: tuple[Any, Any], a: Params, b: Params) -> Params:
        return combine(*ends(parameter, a, b), 1 - parameter[0])

    return draw, ends


def measure(workspace: Workspace, networks: dict[str, Network], rows: Rows) -> Results:
    """For each permutation, the barriers of the line over k."""
    config: RobustnessConfig = workspace.config  # type: ignore[assignment]
    a, b = networks["A"], networks["B"]
    spec, aligned = workspace.spec, workspace.aligned(a, b)
    correlation = correlations(spec, a.params, aligned, workspace.apply, workspace.splits["train"].images)

    shares = np.linspace(0, 1, config.line_points, dtype=np.float32)
    cases: list[tuple[str, int, Perms]] = [("as matched", 0, spec.identity())]
    for perm in spec.sizes:
        counts = np.unique(np.linspace(2, spec.sizes[perm], config.counts).round().astype(int))
        for k in map(int, counts):
            rng = np.random.default_rng([config.seed, zlib.crc32(perm.encode()), k])
            cases.append((perm, k, spec.identity() | {perm: rematched(correlation[perm], k, rng)}))
    stacked = jax.tree.map(lambda *orders: np.repeat(np.stack(orders), len(shares), axis=0), *(c[2] for c in cases))
    draw, ends = lines(spec)
    task = Task(draw, (a.params, aligned), (np.tile(shares, len(cases)), stacked), ends=ends)

    scores = workspace.scores({"A": a.params, "B": b.params})
    references = {split: np.stack([scores[name][split].predicted for name in "AB"]) for split in SPLITS}
    measured = workspace.measure(rows, {"lines": task}, references, len(shares))["lines"]
    models = models_of(scores)

    def barriers(case: int) -> Results:
        part = slice(case * len(shares), (case + 1) * len(shares))
        return {
            split: {
                m: barrier(m, getattr(measured[split], m)[part], *(models[x][split][m] for x in "AB")) for m in METRICS
            }
            for split in SPLITS
        }

    layers: Results = {}
    for perm in spec.sizes:
        mine = [i for i, case in enumerate(cases) if case[0] == perm]
        found = [barriers(i) for i in mine]
        layers[perm] = {
            "units": spec.sizes[perm],
            "k": [cases[i][1] for i in mine],
            "correlation": np.sort(correlation[perm]).tolist(),
            "barriers": {split: {m: [at[split][m] for at in found] for m in METRICS} for split in SPLITS},
        }
    return {"models": models, "layers": layers, "unperturbed": barriers(0)}


def conclude(results: Results) -> Finding:
    """How much more accuracy the line loses when half and all of each layer are re-matched."""
    half, whole = {}, {}
    as_matched = results["unperturbed"]["test"]["accuracy"]
    for name, layer in results["layers"].items():
        cost = [max(0, at - as_matched) for at in layer["barriers"]["test"]["accuracy"]]
        half[name] = float(np.interp(layer["units"] / 2, layer["k"], cost))
        whole[name] = cost[-1]
    survive = [name for name, cost in whole.items() if cost <= 0.1]
    return max(half.values()) <= 0.1, (
        f"Re-matching the lower half of a layer's pairs costs at most {max(half.values()):.1%} of test accuracy "
        f"({max(half, key=half.__getitem__)}); re-matching all of them costs at most 10% in "
        f"{len(survive)} of {len(whole)} layers ({', '.join(survive) or 'none'})."
    )


EXPERIMENT = Experiment(
    name="robustness",
    title="re-matching the least correlated pairs of a layer",
    claim="A large part of each layer's matching can be exchanged at random; some layers survive it whole.",
    alt="For each layer, loss and accuracy barriers against the number of re-matched pairs.",
    config=RobustnessConfig,
    measure=measure,
    draw=figures.robustness,
    conclude=conclude,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
