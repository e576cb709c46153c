"""Sample the share of each weight uniformly from [½ − s, ½ + s].

    python -m experiments.uniform --setup mlp-digits    # about a minute on two CPU cores
    python -m experiments.uniform --width 32            # the paper's experiment, on an accelerator

The paper reports these aligned barriers at width 32: 0.044 in loss and 0.012 in accuracy for ResNet-20, 0.332 and 0.07
for Tiny-10. Naive barriers are much higher.
"""

from mcomb.combination import uniform
from mcomb.lab.runs.command import main
from mcomb.lab.runs.experiment import Paper, sweep_experiment

EXPERIMENT = sweep_experiment(
    name="uniform",
    title="uniform coefficients",
    claim="All sampled combinations of aligned networks have high accuracy and low loss.",
    alt="Loss and accuracy against s. Naive combinations fail; aligned combinations stay close to A and B.",
    parameter="s",
    label="s: shares are uniform on [½ − s, ½ + s]",
    values=(0.0, 0.5),
    combine=uniform,
    paper={
        "resnet20-cifar10": Paper(loss=0.044, accuracy=0.012),
        "tiny10-cifar10": Paper(loss=0.332, accuracy=0.07),
    },
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
