"""Sample shares with mean α, from a hyperplane through the cube.

    python -m experiments.hyperplane --setup mlp-digits

The paper calls this "plane intersect". It reports these aligned barriers at width 32: 0.037 in loss and 0.012 in
accuracy for ResNet-20, 0.332 and 0.071 for Tiny-10.
"""

from mcomb.combination import hyperplane
from mcomb.lab.runs.command import main
from mcomb.lab.runs.experiment import Paper, sweep_experiment

EXPERIMENT = sweep_experiment(
    name="hyperplane",
    title="coefficients on a hyperplane",
    claim="Combinations on a hyperplane that moves through the cube from A to B perform well everywhere.",
    alt="Loss and accuracy against the mean share of B, from A at 0 to B at 1, naive and aligned.",
    parameter="α",
    label="α: mean share of B (A at 0, B at 1)",
    values=(0.0, 1.0),
    combine=hyperplane,
    paper={
        "resnet20-cifar10": Paper(loss=0.037, accuracy=0.012),
        "tiny10-cifar10": Paper(loss=0.332, accuracy=0.071),
    },
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
