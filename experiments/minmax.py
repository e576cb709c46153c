"""The line from the 'Max' network, of each pair the larger weight in absolute value, to 'Min', the smaller.

    python -m experiments.minmax --setup mlp-digits

The paper: 'Min' has low accuracy, so not every point of the cube is a good network.
"""

from mcomb.combine import minmax
from mcomb.experiment import Finding, Results, main, sweep
from mcomb.workspace import LineConfig


def conclude(results: Results) -> Finding:
    """Whether 'Min' is clearly worse than 'Max' and than A and B."""
    accuracy = [row[0] for row in results["curves"]["aligned"]["test"]["accuracy"]]
    level = sum(results["models"][model]["test"]["accuracy"] for model in "AB") / 2
    return level - accuracy[-1] > 0.1 and accuracy[-1] < accuracy[0], (
        f"'Max' has a test accuracy of {accuracy[0]:.1%} and 'Min' of {accuracy[-1]:.1%}, where A and B have "
        f"{level:.1%} on average."
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
    conclude=conclude,
    config=LineConfig,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
