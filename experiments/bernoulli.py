"""Each weight taken from B with probability p and from A otherwise: the vertices of the cube.

    python -m experiments.bernoulli --setup mlp-digits

The paper's barriers at width 32: 0.168 in loss and 0.042 in accuracy for ResNet-20, 0.767 and 0.194 for Tiny-10.
"""

from mcomb.combination import bernoulli
from mcomb.lab.runs.experiment import Paper, main, sweep
from mcomb.lab.runs.verdicts import judge_sweep

EXPERIMENT = sweep(
    name="bernoulli",
    title="each weight from A or from B",
    claim="Networks whose every weight is A's or B's at random still perform well when aligned.",
    alt="Loss and accuracy against the probability of B's weights, from A at 0 to B at 1, naive and aligned.",
    parameter="p",
    label="p: probability of taking a weight from B",
    values=(0.0, 1.0),
    combine=bernoulli,
    # Twice the usual: the paper counts Tiny-10's 0.767 and 0.194 as working.
    judge=lambda results: judge_sweep(results, {"loss": 0.5, "accuracy": 0.3}),
    paper={
        "resnet20-cifar10": Paper(loss=0.168, accuracy=0.042),
        "tiny10-cifar10": Paper(loss=0.767, accuracy=0.194),
    },
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
