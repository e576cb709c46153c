"""Coefficients drawn uniformly from [½ − s, ½ + s], each weight its own.

    python -m experiments.uniform --setup mlp-digits    # about a minute on two CPU cores
    python -m experiments.uniform --width 32            # the paper's experiment, on an accelerator

Aligned, every sampled network works: the paper's barriers at width 32 are 0.044 in loss and 0.012 in accuracy for
ResNet-20, 0.332 and 0.07 for Tiny-10. Naive, they are far worse.
"""

from mcomb.combination import uniform
from mcomb.lab.runs.experiment import Paper, main, sweep

EXPERIMENT = sweep(
    name="uniform",
    title="uniform coefficients",
    claim="All sampled combinations of aligned networks have high accuracy and low loss.",
    alt="Loss and accuracy against s: naive combinations fail, aligned ones stay at the level of A and B.",
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
