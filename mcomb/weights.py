"""Weight matching: the order of one network's units that brings its weights closest to another's.

Permutation coordinate descent (the paper's Algorithm 1) visits the permutations in a random order and solves the
assignment problem of each one's scores, the inner products of A's units with B's, with the others held.

Most of the cost is in the scores. They are a sum over the positions of other permutations; so they are kept, and at
the next visit only those positions are counted anew that have moved since. If none has, the visit is skipped. While a
thread solves one permutation's problem, the scores of those that share no weights with it are computed.
"""

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment
from threadpoolctl import ThreadpoolController

from mcomb.base import Params, UserError, named_leaves, stream
from mcomb.permute import Layout, Perms, PermutationSpec

BLOCK = 1024  # positions in one product
GROUPS = 4  # sums of products side by side: as many on every machine, so that all round alike
SOLVERS = 2  # assignment problems side by side: each takes four times the memory of its scores
RESOLUTION = 8  # the least gain that counts, in roundings of the scores that change


@dataclass(frozen=True)
class Matching:
    """Permutations for B, and the inner product of A's weights with those of the permuted B.

    `trace` has that objective at the start and after each sweep; `tried` that of every order of visits, of which
    the best was kept. `solved` and `skipped` count visits with and without an assignment problem. `losses`, of a
    matcher that lowers them, are held-out losses half way between A and the permuted B, where the trace has their
    objective.
    """

    perms: Perms
    objective: float
    trace: tuple[float, ...]
    tried: tuple[float, ...] = ()
    solved: int = 0
    skipped: int = 0
    losses: tuple[float, ...] = ()


def match_weights(
    spec: PermutationSpec,
    a: Params,
    b: Params,
    *,
    start: Perms | None = None,
    seed: int = 0,
    restarts: int = 1,
    coarse: bool = False,
) -> Matching:
    """The matching of `b` to `a` by permutation coordinate descent, from `start` or from B as it is.

    A descent ends where no permutation can be bettered alone. Where that is depends on the order of visits:
    `restarts` of them are tried, and the best matching is kept. With `coarse`, each is first made with the centres
    of kernels alone, which takes a fraction of the products and leaves few sweeps to do; it ends elsewhere than
    the descent from `start` would, but as high.
    """
    spec.validate(a)
    spec.validate(b)
    if restarts < 1:
        raise UserError(f"{restarts} restarts find nothing: give one or more")
    pieces = list(_pieces(spec, a, b))
    found = []
    for restart in range(restarts):
        begin = start
        if coarse:
            centres = [_centre(spec, piece) for piece in pieces]
            begin = _descend(spec, centres, begin, orders(spec, seed, restart)).perms
        found.append(_descend(spec, pieces, begin, orders(spec, seed, restart)))
    best = max(found, key=lambda matching: matching.objective)
    return replace(best, tried=tuple(matching.objective for matching in found))


def objective(spec: PermutationSpec, a: Params, b: Params, perms: Perms | None = None) -> float:
    """The inner product of A's weights with those of B, permuted if permutations are given."""
    return _inner(spec, _pieces(spec, a, b), perms)


def orders(spec: PermutationSpec, seed: int, restart: int = 0) -> Iterator[list[str]]:
    """The orders in which sweep after sweep visits the permutations."""
    key = stream(seed, "visits", restart)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))  # compiles nothing
    while True:
        yield [list(spec.sizes)[i] for i in rng.permutation(len(spec.sizes))]


class Piece(NamedTuple):
    """A part of a leaf in which every axis is one permutation's or none's: its labels, and A's and B's weights."""

    labels: tuple[Layout, ...]
    a: np.ndarray
    b: np.ndarray


def _pieces(spec: PermutationSpec, a: Params, b: Params) -> Iterator[Piece]:
    """All weights, floats in single precision at least: neither counters nor random keys."""
    leaves_a, leaves_b = named_leaves(a), named_leaves(b)
    for name, layouts in spec.axes.items():
        dtypes = [jnp.result_type(leaves[name]) for leaves in (leaves_a, leaves_b)]
        if all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
            dtype = np.result_type(np.float32, *dtypes)
            both = (np.asarray(leaves[name], dtype) for leaves in (leaves_a, leaves_b))
            for (labels, part_a), (_, part_b) in zip(*(spec.pieces(layouts, leaf) for leaf in both), strict=True):
                yield Piece(labels, part_a, part_b)


def _centre(spec: PermutationSpec, piece: Piece) -> Piece:
    """The piece at the middle of all axes that stay, if permutations meet in it; such a piece has the most weights."""
    if sum(label in spec.sizes for label in piece.labels) < 2:
        return piece
    moves = [label in spec.sizes or label in spec.fixed for label in piece.labels]
    at = tuple(slice(None) if m else slice(n // 2, n // 2 + 1) for m, n in zip(moves, piece.a.shape, strict=True))
    return Piece(piece.labels, piece.a[at], piece.b[at])


class _Sheets(NamedTuple):
    """A piece that at most two permutations order, as a stack of matrices; a label is None if no one's."""

    labels: tuple[str | None, str]
    a: Float[np.ndarray, "k p q"]
    b: Float[np.ndarray, "k p q"]


def _sheets(spec: PermutationSpec, piece: Piece) -> _Sheets | None:
    """The piece as sheets, if each of its permutations is on one axis, and none is of a family or has one inside."""
    moving = [axis for axis, label in enumerate(piece.labels) if label in spec.sizes]
    names = [str(piece.labels[axis]) for axis in moving]
    if len(names) not in (1, 2) or len(set(names)) < len(names) or not all(_is_plain(spec, name) for name in names):
        return None
    last = range(-len(moving), 0)
    a, b = (np.moveaxis(weights, moving, last) for weights in (piece.a, piece.b))
    if len(names) == 1:
        return _Sheets((None, names[0]), a.reshape(1, -1, a.shape[-1]), b.reshape(1, -1, b.shape[-1]))
    return _Sheets((names[0], names[1]), a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]))


def _is_plain(spec: PermutationSpec, name: str) -> bool:
    return name not in spec.families and not any(name in family for family in spec.families.values())


class _Step(NamedTuple):
    """The permutations that a visit changes, and by how much that betters the objective."""

    perms: Perms
    gain: float


def _descend(
    spec: PermutationSpec, pieces: Sequence[Piece], start: Perms | None, sweeps: Iterable[list[str]]
) -> Matching:
    """The matching that the descent from `start` ends at."""
    height = _inner(spec, pieces, start)
    if not np.isfinite(height):
        raise UserError("the inner product of A's and B's weights is infinite or not a number: they cannot be matched")
    cores = os.cpu_count() or 1
    products, solvers = ThreadPoolExecutor(min(cores, GROUPS)), ThreadPoolExecutor(min(cores, SOLVERS))
    descent = _Descent(spec, pieces, spec.identity() if start is None else start, products)
    pending: dict[str, tuple[int, Future[_Step]]] = {}

    def settle(names: Iterable[str]) -> None:
        for name in [name for name in names if name in pending]:
            sweep, future = pending.pop(name)
            step = future.result()
            descent.perms |= step.perms
            gains[sweep] += step.gain

    gains: list[float] = []
    solved = skipped = 0
    # The library's own threads wait for one another whenever a core is busy elsewhere: so ours come first.
    with products, solvers, _libraries().limit(limits=max(1, cores // GROUPS), user_api="blas"):
        for sweep, order in enumerate(sweeps):
            before = solved
            gains.append(0.0)
            for name in order:
                settle({name, *descent.neighbours[name]})
                if not descent.is_at_best(name):
                    pending[name] = sweep, solvers.submit(descent.visit(name))
                    solved += 1
            if solved == before:
                gains.pop()
                break
            skipped += len(order) - (solved - before)
        settle(list(pending))
    trace = tuple(itertools.accumulate(gains, initial=height))
    return Matching(descent.perms, trace[-1], trace, solved=solved, skipped=skipped)


@cache  # looking them up takes longer than a small matching
def _libraries() -> ThreadpoolController:
    return ThreadpoolController()


class _Descent:
    """Where a descent stands: the permutations, and of each the scores that were last computed, and for what."""

    def __init__(self, spec: PermutationSpec, pieces: Sequence[Piece], start: Perms, pool: ThreadPoolExecutor):
        self.spec, self.pool = spec, pool
        self.perms: Perms = {name: np.array(start[name]) for name in spec.sizes}
        self.pieces: dict[str, list[Piece]] = {name: [] for name in spec.sizes}
        self.general: dict[str, list[Piece]] = {name: [] for name in spec.sizes}
        self.sheets: dict[str, list[_Sheets]] = {name: [] for name in spec.sizes}
        # Those whose move changes a permutation's scores; it is among them itself if it is on two axes of a piece,
        # or if what is inside its units moves with it.
        self.neighbours: dict[str, set[str]] = {name: {name} if spec.inside(name) else set() for name in spec.sizes}
        for piece in pieces:
            sheets = _sheets(spec, piece)
            labels = [str(label) for label in piece.labels if label in spec.sizes]
            for name in set(labels):
                self.pieces[name].append(piece)
                if sheets:
                    self.sheets[name].append(sheets)
                else:
                    self.general[name].append(piece)
                self.neighbours[name] |= {*labels} if labels.count(name) > 1 else {*labels} - {name}
        self.scores: dict[str, np.ndarray] = {}
        self.seen: dict[str, Perms] = {}

    def is_at_best(self, name: str) -> bool:
        """Whether nothing that a permutation's scores depend on has changed since it was last visited."""
        seen = self.seen.get(name)
        return seen is not None and all(self.perms[other] is seen[other] for other in self.neighbours[name])

    def visit(self, name: str) -> Callable[[], _Step]:
        """A permutation's assignment problem, ready to be solved in another thread."""
        seen, perms = self.seen.get(name), dict(self.perms)
        self.seen[name] = perms
        if not _is_plain(self.spec, name):
            return partial(self._rearrange, name, perms)
        n = self.spec.sizes[name]
        scores = self.scores.setdefault(name, np.zeros((n, n), _dtype(self.pieces[name])))
        terms = [term for sheets in self.sheets[name] for term in _terms(sheets, name, perms, seen)]
        for total in self.pool.map(_total, (terms[i::GROUPS] for i in range(min(GROUPS, len(terms))))):
            scores += total
        if self.general[name]:  # these are not kept
            scores = scores.copy()
            scores[:, perms[name]] += _unit_scores(self.spec, self._permuted(name, perms), (), (name,))[0]
        return partial(self._reorder, name, perms, scores)

    def _reorder(self, name: str, perms: Perms, scores: Float[np.ndarray, "n n"]) -> _Step:
        """The step to the permutation of highest score."""
        best, order = assigned(scores), perms[name]
        moved = np.flatnonzero(best != order)
        if name in self.neighbours[name]:  # then scores only estimate the gain
            return self._if_better(name, perms, {name: best})
        new, old = (scores[moved, to[moved]].astype(np.float64) for to in (best, order))
        gain = float(new.sum() - old.sum())
        least = RESOLUTION * np.finfo(scores.dtype).eps * np.abs([new, old]).sum()
        return _Step({name: best}, gain) if gain > least else _Step({}, 0.0)

    def _rearrange(self, name: str, perms: Perms) -> _Step:
        """The step to the best order of units of which each may be re-ordered inside, or of each member of a family.

        What is inside a unit, such as the dimensions of a head, is matched anew for each pair of units: a head's fit
        to another is that of its best order of dimensions.
        """
        spec, n = self.spec, self.spec.sizes[name]
        family, inside, pieces = spec.families.get(name, ()), spec.inside(name), self._permuted(name, perms)
        scores = _unit_scores(spec, pieces, family, (name,), without=inside)
        inner = {}
        for other in inside:
            m = spec.sizes[other]
            pairs = _unit_scores(spec, pieces, family, (name, other)).reshape(-1, n, m, n, m).swapaxes(2, 3)
            inner[other] = assigned(pairs)
            scores = scores + np.take_along_axis(pairs, inner[other][..., None], -1).sum((-2, -1))
        best = assigned(scores)
        step: Perms = {name: best.reshape(spec.shape(name))}
        for other, perm in inner.items():
            step[other] = np.take_along_axis(perm, best[..., None, None], 2).reshape(spec.shape(other))
        moved = spec.compose(spec.identity() | step, perms)
        return self._if_better(name, perms, {which: moved[which] for which in step})

    def _if_better(self, name: str, perms: Perms, step: Perms) -> _Step:
        """The step with its gain, or none."""
        pieces = self.pieces[name]
        gain = _inner(self.spec, pieces, perms | step) - _inner(self.spec, pieces, perms)
        return _Step(step, gain) if gain > 0 else _Step({}, 0.0)

    def _permuted(self, name: str, perms: Perms) -> list[Piece]:
        """Those pieces of a permutation that are not sheets, with B's weights permuted."""
        return [piece._replace(b=self.spec.moved(perms, piece.labels, piece.b)) for piece in self.general[name]]


def _dtype(pieces: Sequence[Piece]) -> np.dtype:
    return np.result_type(np.float32, *(piece.a for piece in pieces), *(piece.b for piece in pieces))


def _inner(spec: PermutationSpec, pieces: Iterable[Piece], perms: Perms | None) -> float:
    """The inner product of A's weights with B's permuted ones."""
    total = 0.0
    for labels, a, b in pieces:
        there = b if perms is None else spec.moved(perms, labels, b)
        total += float(np.vecdot(np.atleast_1d(a), np.atleast_1d(there)).sum(dtype=np.float64))
    return total


def _terms(sheets: _Sheets, name: str, perms: Perms, seen: Perms | None) -> Iterator[Callable[[], np.ndarray]]:
    """What the sheets add to the scores: all of their products or, if they were `seen`, those of what has moved.

    A score's first index is a unit of A, its second one of B as given.
    """
    axis = sheets.labels.index(name)
    other = sheets.labels[1 - axis]
    if other is None:
        if seen is None:
            yield lambda: sheets.a[0].T @ sheets.b[0]
        return

    moved = np.arange(len(perms[other])) if seen is None else np.flatnonzero(perms[other] != seen[other])

    def product(a: np.ndarray, b: np.ndarray, block: slice) -> np.ndarray:
        if seen is None:
            here = a[block] if axis else a[:, block]
            there = b.take(perms[other][block], 1 - axis)
        else:
            rows = moved[block]
            here = a.take(rows, 1 - axis)
            there = b.take(perms[other][rows], 1 - axis)
            there -= b.take(seen[other][rows], 1 - axis)
        return here.T @ there if axis else here @ there.T

    for start, (a, b) in itertools.product(range(0, len(moved), BLOCK), zip(sheets.a, sheets.b, strict=True)):
        yield partial(product, a, b, slice(start, start + BLOCK))


def _total(terms: Sequence[Callable[[], np.ndarray]]) -> np.ndarray:
    """The sum of terms, of which only one is there at a time."""
    total = terms[0]()
    for term in terms[1:]:
        total += term()
    return total


def assigned(scores: Float[np.ndarray, "*batch n n"]) -> Int[np.ndarray, "*batch n"]:
    """The column assigned to each row, in each assignment problem of a batch."""
    flat = scores.reshape(-1, *scores.shape[-2:])
    return np.stack([linear_sum_assignment(one, maximize=True)[1] for one in flat]).reshape(scores.shape[:-1])


def _unit_scores(
    spec: PermutationSpec,
    pieces: Sequence[Piece],
    family: tuple[str, ...],
    names: tuple[str, ...],
    without: Sequence[str] = (),
) -> Float[np.ndarray, "family n n"]:
    """For each member of a family, the inner product of each unit of A with each of B.

    A unit is a position along all of `names`; pieces that have any axis of `without` do not count.
    """
    members = math.prod(spec.shape(names[0])[:-1])
    count = math.prod(spec.sizes[name] for name in names)
    total = np.zeros((members, count, count), _dtype(pieces))
    for labels, a, b in pieces:
        if set(labels) & set(without):
            continue
        for axis in [axis for axis, label in enumerate(labels) if label == names[-1]]:
            front = [*map(labels.index, family + names[:-1]), axis]
            units = [np.moveaxis(weights, front, range(len(front))) for weights in (a, b)]
            rows_a, rows_b = (unit.reshape(members, count, -1) for unit in units)
            total += rows_a @ rows_b.swapaxes(-1, -2)
    return total
