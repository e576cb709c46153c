"""Mode combinability: align two networks, mix their weights element by element, measure every mixture.

For two sets of parameters `a` and `b` of any network that JAX can trace, as `fn(params, images)`:

    spec = mcomb.permutation_spec(fn, a, images)  # print(spec) shows what may move
    mcomb.check_spec(fn, a, spec, images)
    aligned = spec.apply(mcomb.match(spec, a, b).perms, b)
    between = mcomb.combine(a, aligned, 0.5)
"""

from mcomb.activations import match_activations
from mcomb.align import Alignment, align_many
from mcomb.checkpoint import read_checkpoint, write_checkpoint
from mcomb.combine import bernoulli, centered, combine, hyperplane, linear, mix, subcube, uniform
from mcomb.derive import permutation_spec
from mcomb.evaluate import Metrics, Score, evaluate, score
from mcomb.matchers import match
from mcomb.permute import Blocks, PermutationSpec, Segments, check_spec
from mcomb.repair import repaired
from mcomb.ste import match_straight_through
from mcomb.weights import Matching, match_weights

__all__ = [
    "Alignment",
    "Blocks",
    "Matching",
    "Metrics",
    "PermutationSpec",
    "Score",
    "Segments",
    "align_many",
    "bernoulli",
    "centered",
    "check_spec",
    "combine",
    "evaluate",
    "hyperplane",
    "linear",
    "match",
    "match_activations",
    "match_straight_through",
    "match_weights",
    "mix",
    "permutation_spec",
    "read_checkpoint",
    "repaired",
    "score",
    "subcube",
    "uniform",
    "write_checkpoint",
]
