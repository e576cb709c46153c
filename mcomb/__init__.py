"""Mode combinability: align two networks, mix their weights element by element, measure every mixture.

For two sets of parameters `a` and `b` of any network that JAX can trace, as `fn(params, images)`:

    spec = mcomb.permutation_spec(fn, a, images)  # print(spec) shows what may move
    mcomb.check_spec(fn, a, spec, images)
    aligned = spec.apply(mcomb.match(spec, a, b).perms, b)
    between = mcomb.combine(a, aligned, 0.5)
"""

from mcomb.checkpoint import read_checkpoint, write_checkpoint
from mcomb.combination import bernoulli, centered, combine, hyperplane, linear, mix, subcube, uniform
from mcomb.early_stopping import fine_tune
from mcomb.evaluation import Metrics, Score, evaluate, score
from mcomb.matching import match
from mcomb.matching.activations import match_activations
from mcomb.matching.core import Matching
from mcomb.matching.many import Alignment, align_many
from mcomb.matching.straight_through import match_straight_through
from mcomb.matching.weights import match_weights
from mcomb.merging import LearnedShares, learn_shares, merge
from mcomb.objectives import Objective, accuracy, cross_entropy, squared_error, token_cross_entropy
from mcomb.partial_merging import PartlyMerged, merge_partly
from mcomb.repair import repaired
from mcomb.running_statistics import estimate_statistics
from mcomb.symmetry.check import check_spec
from mcomb.symmetry.derive import permutation_spec
from mcomb.symmetry.spec import Blocks, PermutationSpec, Segments

__all__ = [
    "Alignment",
    "Blocks",
    "LearnedShares",
    "Matching",
    "Metrics",
    "Objective",
    "PartlyMerged",
    "PermutationSpec",
    "Score",
    "Segments",
    "accuracy",
    "align_many",
    "bernoulli",
    "centered",
    "check_spec",
    "combine",
    "cross_entropy",
    "estimate_statistics",
    "evaluate",
    "fine_tune",
    "hyperplane",
    "learn_shares",
    "linear",
    "match",
    "match_activations",
    "match_straight_through",
    "match_weights",
    "merge",
    "merge_partly",
    "mix",
    "permutation_spec",
    "read_checkpoint",
    "repaired",
    "score",
    "squared_error",
    "subcube",
    "token_cross_entropy",
    "uniform",
    "write_checkpoint",
]
