"""Mode combinability: align two networks, mix their weights element by element, measure every mixture."""

from mcomb.checkpoint import read_checkpoint, write_checkpoint
from mcomb.combine import combine, linear, mix, uniform
from mcomb.evaluate import Metrics, Score, evaluate, score
from mcomb.match import Matching, match_weights
from mcomb.permute import PermutationSpec, check_permuted

__all__ = [
    "Matching",
    "Metrics",
    "PermutationSpec",
    "Score",
    "check_permuted",
    "combine",
    "evaluate",
    "linear",
    "match_weights",
    "mix",
    "read_checkpoint",
    "score",
    "uniform",
    "write_checkpoint",
]
