"""Whose label do combinations predict: A's only, B's only, both's or neither's, rightly or wrongly.

    python -m experiments.functional --setup mlp-digits

The paper: the two ends differ on a substantial part of the test set, and the labels change gradually in between. It
needs the sweeps bernoulli, subcube, hyperplane, uniform and linear, and runs what is missing.
"""

import numpy as np

from experiments import bernoulli, hyperplane, linear, subcube, uniform
from mcomb import figures
from mcomb.evaluate import MATCHES
from mcomb.experiment import Experiment, Finding, Results, main, narrowed, run
from mcomb.results import Rows
from mcomb.workspace import Network, SweepConfig, Workspace

SWEEPS = (bernoulli, subcube, hyperplane, uniform, linear)


def measure(workspace: Workspace, networks: dict[str, Network], rows: Rows) -> Results:
    """For each sweep the eight counts of each sample, and the rate at which A and B disagree."""
    sweeps = {}
    for module in SWEEPS:
        experiment = module.EXPERIMENT
        results = run(experiment, narrowed(workspace.config, experiment.config))
        sweeps[experiment.name] = {
            "parameter": results["parameter"],
            "counts": results["curves"]["aligned"]["test"]["agreement"],
        }
    at_a = np.array(sweeps["linear"]["counts"])[0, 0]  # λ = 0 is A itself: where B says otherwise, A is alone
    return {"matches": MATCHES, "sweeps": sweeps, "disagreement": float(at_a[0].sum() / at_a.sum())}


def conclude(results: Results) -> Finding:
    """How often A and B disagree, and whose labels the combinations half way give there."""
    middle = np.array(results["sweeps"]["linear"]["counts"]).mean(1)
    middle = middle[len(middle) // 2].sum(1) / middle[0].sum()
    a, b, _, neither = middle
    rate = results["disagreement"]
    return rate > 0.005, (
        f"A and B give different labels to {rate:.1%} of the test images. Half way on the line, the label is A's alone "
        f"for {a:.1%}, B's alone for {b:.1%} and neither's for {neither:.1%}."
    )


EXPERIMENT = Experiment(
    name="functional",
    title="whose labels combinations predict",
    claim="A and B differ on a substantial part of the test set, and combinations go gradually from one to the other.",
    alt="Stacked areas for five sweeps: test images whose label is that of both networks, A only, B only or neither.",
    config=SweepConfig,
    measure=measure,
    draw=figures.stacks,
    conclude=conclude,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
