"""The line from the 'Max' network, of each pair the larger weight in absolute value, to 'Min', the smaller.

    python -m experiments.minmax --setup mlp-digits

The paper: 'Min' has low accuracy, so not every point of the cube is a good network.
"""

from mcomb.combination import minmax
from mcomb.lab.runs.barriers import barrier
from mcomb.lab.runs.experiment import main, sweep
from mcomb.lab.runs.flags import LineConfig
from mcomb.lab.runs.results import METRICS, Results
from mcomb.lab.runs.verdicts import LIMITS, Verdict, cost


def judge(results: Results) -> Verdict:
    """Whether 'Min' fails, in loss and accuracy, where 'Max' is clearly better."""
    curve = results["curves"]["aligned"]["test"]
    ends = [results["models"][letter]["test"] for letter in "AB"]
    lost = [cost(results, {m: barrier(m, curve[m][at], *(end[m] for end in ends)) for m in METRICS}) for at in (0, -1)]
    largest, smallest = (curve["accuracy"][at][0] for at in (0, -1))
    level = sum(end["accuracy"] for end in ends) / 2
    return Verdict(
        all(lost[1][m] > LIMITS[m] and lost[0][m] < lost[1][m] for m in METRICS),
        f"'Max' has a test accuracy of {largest:.1%} and 'Min' of {smallest:.1%}, where A and B have {level:.1%} on "
        f"average; their losses are {curve['loss'][0][0]:.3f} and {curve['loss'][-1][0]:.3f}.",
    )


EXPERIMENT = sweep(
    name="minmax",
    title="from the larger to the smaller weight",
    claim="The 'Min' network, of each aligned pair of weights the smaller in absolute value, has low accuracy.",
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
