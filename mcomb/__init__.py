"""Align neural networks, combine their weights element by element, and measure the result.

`a` and `b` are parameter trees of any function `apply(params, inputs)` that JAX can trace:

    aligned = mcomb.align(apply, a, b, x)
    sweep = mcomb.sweep(apply, (a, aligned.params), x, y, mcomb.uniform)
    print(sweep.barrier.loss, sweep.barrier.accuracy)
    sweep.plot("uniform.png")
    merged = mcomb.merge(apply, (a, aligned.params), x, y, method="refit")
"""

from mcomb import pytorch as pytorch
from mcomb.combination import (
    Distribution,
    bernoulli,
    centered,
    combine,
    hyperplane,
    linear,
    sample,
    subcube,
    uniform,
)
from mcomb.errors import Diverged, UserError
from mcomb.evaluation.barriers import Barrier
from mcomb.evaluation.batch_statistics import estimate_statistics
from mcomb.evaluation.evaluate import Metrics, score
from mcomb.evaluation.objectives import Objective, accuracy, cross_entropy, squared_error, tempered_cross_entropy
from mcomb.evaluation.sweep import Sweep, sweep
from mcomb.io.checkpoints import read_checkpoint, write_checkpoint
from mcomb.matching.align import Alignment, align
from mcomb.matching.many import MultiAlignment, align_many
from mcomb.matching.matchers import Matcher, activations, straight_through, weights
from mcomb.matching.matching import Matching
from mcomb.merging.fine_tuning import FineTuned, fine_tune
from mcomb.merging.learned_shares import LearnedShares, learn_shares
from mcomb.merging.merge import (
    Merged,
    Method,
    average,
    dare,
    fisher,
    learned,
    merge,
    partial,
    refit,
    slerp,
    task_arithmetic,
    ties,
)
from mcomb.merging.partial import PartlyMerged
from mcomb.runtime.progress import set_progress
from mcomb.symmetry.derive import derive_spec
from mcomb.symmetry.matrix_groups import SymmetrySpec
from mcomb.symmetry.spec import Blocks, PermutationSpec, Segments

__version__ = "0.1.0"

__all__ = [
    "Alignment",
    "Barrier",
    "Blocks",
    "Distribution",
    "Diverged",
    "FineTuned",
    "LearnedShares",
    "Matcher",
    "Matching",
    "Merged",
    "Method",
    "Metrics",
    "MultiAlignment",
    "Objective",
    "PartlyMerged",
    "PermutationSpec",
    "Segments",
    "Sweep",
    "SymmetrySpec",
    "UserError",
    "accuracy",
    "activations",
    "align",
    "align_many",
    "average",
    "bernoulli",
    "centered",
    "combine",
    "cross_entropy",
    "dare",
    "derive_spec",
    "estimate_statistics",
    "fine_tune",
    "fisher",
    "hyperplane",
    "learn_shares",
    "learned",
    "linear",
    "merge",
    "partial",
    "read_checkpoint",
    "refit",
    "sample",
    "score",
    "set_progress",
    "slerp",
    "squared_error",
    "straight_through",
    "subcube",
    "sweep",
    "task_arithmetic",
    "tempered_cross_entropy",
    "ties",
    "uniform",
    "weights",
    "write_checkpoint",
]
