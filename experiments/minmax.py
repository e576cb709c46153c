"""Interpolate between the larger and the smaller weight of each pair.

    python -m experiments.minmax --setup mlp-digits

The network 'Max' takes the weight with the larger absolute value of each pair, and 'Min' takes the other. In the paper,
'Min' has low accuracy, so not every point of the cube is a good network.
"""

from mcomb.combination import minmax
from mcomb.evaluation.barriers import barrier
from mcomb.lab.flags import LineConfig
from mcomb.lab.runs.command import main
from mcomb.lab.runs.experiment import sweep_experiment
from mcomb.lab.runs.results import METRICS, SweepResults
from mcomb.lab.runs.verdicts import LIMITS, Verdict, cost


def judge(results: SweepResults) -> Verdict:
    """Require that 'Min' fails in loss and accuracy and that 'Max' is better."""
    curve = results.curves["aligned"]["test"]
    ends = [results.models[letter]["test"] for letter in "AB"]
    lost = [cost(results, {m: barrier(m, curve[m][at], *(end[m] for end in ends)) for m in METRICS}) for at in (0, -1)]
    largest, smallest = (curve["accuracy"][at][0] for at in (0, -1))
    level = sum(end["accuracy"] for end in ends) / 2
    return Verdict(
        all(lost[1][m] > LIMITS[m] and lost[0][m] < lost[1][m] for m in METRICS),
        f"'Max' has a test accuracy of {largest:.1%} and 'Min' has {smallest:.1%}; the mean of A and B is {level:.1%}. "
        f"The losses of 'Max' and 'Min' are {curve['loss'][0][0]:.3f} and {curve['loss'][-1][0]:.3f}.",
    )


EXPERIMENT = sweep_experiment(
    name="minmax",
    title="from the larger to the smaller weight",
    claim="The 'Min' network, which takes the smaller weight of each aligned pair, has low accuracy.",
    alt="Loss and accuracy along the line from 'Max' at 0 to 'Min' at 1, naive and aligned.",
    parameter="λ",
    label="λ: 'Max' at 0, 'Min' at 1",
    values=(0.0, 1.0),
    combine=minmax,
    judge=judge,
    config=LineConfig,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
