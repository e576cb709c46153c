"""Sample shares uniformly from a small cube that slides from A to B.

    python -m experiments.subcube --setup mlp-digits

The paper calls this "cube intersect". It reports these aligned barriers at width 32: 0.041 in loss and 0.011 in
accuracy for ResNet-20, 0.32 and 0.07 for Tiny-10.
"""

from mcomb.combination import subcube
from mcomb.lab.runs.command import main
from mcomb.lab.runs.experiment import Paper, sweep_experiment

EXPERIMENT = sweep_experiment(
    name="subcube",
    title="coefficients from a sliding cube",
    claim="Random points of a small cube that moves from A to B have low barriers and high accuracy.",
    alt="Loss and accuracy against the centre of the cube, from A at 0 to B at 1, naive and aligned.",
    parameter="λ",
    label="λ: centre of the cube (A at 0, B at 1)",
    values=(0.0, 1.0),
    combine=subcube,
    paper={
        "resnet20-cifar10": Paper(loss=0.041, accuracy=0.011),
        "tiny10-cifar10": Paper(loss=0.32, accuracy=0.07),
    },
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
