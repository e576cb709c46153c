"""Identity stitching: layers 1 to l from B and those above from A, with nothing in between.

    python -m experiments.stitching --setup mlp-digits

The paper: all stitched networks have high accuracy and low loss when B is aligned. The order of the layers is each
model's `layer_of`; a norm goes with its layer and a shortcut with its block.
"""

import numpy as np

from mcomb.combination import stitch
from mcomb.lab import figures
from mcomb.lab.runs.experiment import Experiment, main
from mcomb.lab.runs.flags import CurveConfig
from mcomb.lab.runs.measure import Run
from mcomb.lab.runs.results import VARIANTS, Results
from mcomb.lab.runs.verdicts import judge_sweep
from mcomb.lab.setups import SETUPS


def measure(run: Run) -> Results:
    """The curves over l = 0 (A) to the number of layers (B)."""
    model = run.store.setup.model
    label = "l: how many of the lower layers are B's"
    return run.measure_pair(stitch(model.layer_of), "l", label, np.arange(model.depth + 1))


EXPERIMENT = Experiment(
    name="stitching",
    title="identity stitching",
    claim="The lower part of the aligned B stitched to the upper part of A works at every layer.",
    alt="Loss and accuracy against the number of layers taken from B, naive and aligned.",
    config=CurveConfig,
    combinations=lambda config: len(VARIANTS) * (SETUPS[config.setup].model.depth + 1),
    measure=measure,
    draw=figures.sweep,
    judge=judge_sweep,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
