"""Take layers 1 to l from B and the layers above from A (identity stitching).

    python -m experiments.stitching --setup mlp-digits

In the paper, all stitched networks have high accuracy and low loss if B is aligned. Each model's `layer_of` defines the
order of layers: a norm belongs to its layer, and a shortcut to its block.
"""

import numpy as np

from mcomb.combination import stitch
from mcomb.lab import figures
from mcomb.lab.flags import CurveConfig
from mcomb.lab.runs.command import main
from mcomb.lab.runs.experiment import Experiment
from mcomb.lab.runs.measure import Run
from mcomb.lab.runs.results import VARIANTS, SweepResults
from mcomb.lab.runs.verdicts import judge_sweep
from mcomb.lab.setups import SETUPS


def measure(run: Run) -> SweepResults:
    """Measure the curves from l = 0 (A) to the number of layers (B)."""
    model = run.store.setup.model
    label = "l: number of lower layers from B"
    return run.measure_pair(stitch(model.layer_of), "l", label, np.arange(model.depth + 1))


EXPERIMENT = Experiment(
    name="stitching",
    title="identity stitching",
    claim="Networks with the lower layers of the aligned B and the upper layers of A work for every split.",
    alt="Loss and accuracy against the number of layers taken from B, naive and aligned.",
    config=CurveConfig,
    combinations=lambda config: len(VARIANTS) * (SETUPS[config.setup].model.depth + 1),
    results=SweepResults,
    measure=measure,
    draw=figures.draw_sweep,
    judge=judge_sweep,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
