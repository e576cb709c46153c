"""Take each weight from A or from B at random: the corners of the cube.

    python -m experiments.bernoulli --setup mlp-digits

The parameter p is the probability of B. The paper reports these aligned barriers at width 32: 0.168 in loss and 0.042
in accuracy for ResNet-20, 0.767 and 0.194 for Tiny-10.
"""

from mcomb.combination import bernoulli
from mcomb.lab.runs.command import main
from mcomb.lab.runs.experiment import Paper, sweep_experiment
from mcomb.lab.runs.verdicts import judge_sweep

EXPERIMENT = sweep_experiment(
    name="bernoulli",
    title="each weight from A or from B",
    claim="Networks that take each weight at random from A or from B perform well if the networks are aligned.",
    alt="Loss and accuracy against the probability of B's weights, from A at 0 to B at 1, naive and aligned.",
    parameter="p",
    label="p: probability of taking a weight from B",
    values=(0.0, 1.0),
    combine=bernoulli,
    # Twice the usual limits, because the paper accepts Tiny-10's barriers of 0.767 and 0.194.
    judge=lambda results: judge_sweep(results, {"loss": 0.5, "accuracy": 0.3}),
    paper={
        "resnet20-cifar10": Paper(loss=0.168, accuracy=0.042),
        "tiny10-cifar10": Paper(loss=0.767, accuracy=0.194),
    },
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
