"""Match the hidden spaces of network B to those of network A by rotations, invertible matrices, signs and permutations.

Both networks are first brought to a canonical form (`SymmetrySpec.balance`), in which only rotations, permutations and
signs are left. These keep norms, so that the best ones have the largest inner product with A. For given moves of all
other spaces, let S_ij be the inner product of A's unit i with B's unit j:

    space                   best move
    permutations            assignment on S
    permutations and signs  assignment on the largest of S with each sign
    rotations               the polar factor of S (Procrustes)
    rotations, mean kept    the polar factor of S among vectors with mean zero
    heads                   assignment on the best scores of each pair, which are nuclear norms for rotations

The first pass visits the spaces one by one, and uses only weights whose other spaces are matched already. It starts at
embeddings and output matrices, whose other axes are frozen. Later passes repeat until nothing improves.

Finally, B takes A's gains, heads and scales. The line between the networks does not depend on this choice, because
these act linearly on both.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from mcomb.errors import UserError, require_whole
from mcomb.matching.assignment import solve_assignment
from mcomb.matching.matching import Matching, check_networks
from mcomb.symmetry.folding import balancing
from mcomb.symmetry.matrix_groups import CENTRED, Element, SymmetrySpec, centring
from mcomb.symmetry.places import Place, unit_axes
from mcomb.symmetry.spec import Layout
from mcomb.trees import Params, is_inexact, named_leaves

TOLERANCE = 1e-6  # stop when a pass adds less than this fraction of the objective
MOST_PASSES = 200
MOST_SIGNS = 3  # scalings of one space whose signs are matched; all combinations are tried


@dataclass(frozen=True)
class Part:
    """The weights of A and B in one part of a leaf, in canonical form, or values of units that move like weights.

    Attributes:
        leaf: The name of the leaf, or None for values of units.
        index: The number of the part.
        labels: For each axis, the name of its space; None or a size if it has no space.
        a: A's weights.
        b: B's weights.
    """

    leaf: str | None
    index: int
    labels: tuple[Layout, ...]
    a: np.ndarray
    b: np.ndarray


def match_groups(
    spec: SymmetrySpec,
    a: Params,
    b: Params,
    *,
    start: Element | None = None,
    seed: int = 0,
    restarts: int = 1,
    coarse: bool = False,
    balanced: bool = False,
) -> Matching:
    """Match `b` to `a` by their weights, and keep the best of several restarts.

    The first restart begins at `start`, an earlier result, or at the weights whose other axes are frozen. The others
    visit the spaces in random orders. With `balanced`, A is a sum of networks in canonical form, and is used
    unchanged. Objectives are inner products of weights in canonical form, with a root mean square of 1 in each leaf.
    """
    check_networks(spec, a, b, start)
    if coarse:
        raise UserError('coarse=True only matches permutations: remove it, or use groups="permutations".')
    to_a = spec.identity() if balanced else balancing(spec, a)
    to_b = balancing(spec, b)
    parts = list(canonical_parts(spec, spec.apply(to_a, wide(a)), spec.apply(to_b, wide(b))))
    first = start and spec.compose(to_a, spec.compose(start, spec.invert(to_b)))
    best = descend(spec, parts, start=first, seed=seed, restarts=restarts)
    return replace(best, perms=spec.compose(spec.invert(to_a), spec.compose(best.perms, to_b)))


def descend(
    spec: SymmetrySpec, parts: Sequence["Part"], *, start: Element | None = None, seed: int = 0, restarts: int = 1
) -> Matching:
    """Return the best of several alternations between networks in canonical form."""
    require_whole(restarts=restarts)
    found = []
    for restart in range(restarts):
        alternation = Alternation(spec, parts, np.random.default_rng([seed, restart]))
        if start is not None and restart == 0:
            alternation.element = _nearest_moves(spec, start)
        else:
            alternation.grow(shuffle=restart > 0)
        found.append(alternation.run())
    best = max(found, key=lambda matching: matching.objective)
    return replace(best, tried=tuple(matching.objective for matching in found))


def _nearest_moves(spec: SymmetrySpec, element: Element) -> Element:
    """Return the rotations, signs and permutations that are nearest to an element."""
    moves = dict(element)
    for name, group in spec.groups.items():
        moves[name] = _nearest(group.kind, np.asarray(element[name], float))
    for name, own in spec.scalings.items():
        moves[name] = np.ones_like(element[name]) if own.gain else np.sign(element[name])
    return moves


def wide(params: Params) -> Params:
    """Return the leaves by name, with floats in float64."""
    return {name: np.asarray(x, float) if is_inexact(x) else np.asarray(x) for name, x in named_leaves(params).items()}


def canonical_parts(spec: SymmetrySpec, a: Params, b: Params) -> Iterator[Part]:
    """Yield the weights of A and B part by part, without gains that are folded and leaves that are not floats.

    Each part is scaled to a root mean square of 1. Otherwise, a few leaves would decide: in a pre-norm decoder, the
    norms of embeddings and output matrix differ by a factor of ten, and the scale of the stream is arbitrary.
    """
    folded = {own.gain for own in spec.scalings.values() if own.gain}
    for name, layouts in spec.axes.items():
        if is_inexact(a[name]) and is_inexact(b[name]):
            both = (spec.simple_parts(layouts, own[name]) for own in (a, b))
            for index, ((labels, part_a), (_, part_b)) in enumerate(zip(*both, strict=True)):
                if not any(Place(name, index, axis) in folded for axis in range(len(labels))):
                    yield Part(name, index, labels, _normalized(part_a), _normalized(part_b))


def canonical_product(spec: SymmetrySpec, a: Params, b: Params) -> float:
    """Return the inner product of the weights of two networks in canonical form."""
    return sum(float(np.vdot(part.a, part.b)) for part in canonical_parts(spec, wide(a), wide(b)))


def _normalized(values: np.ndarray) -> np.ndarray:
    """Scale an array to a root mean square of 1, unless it is zero."""
    return values / (np.sqrt(np.mean(values**2)) or 1.0)


class Alternation:
    """A coordinate descent over the spaces of a spec.

    Attributes:
        element: The current moves, between networks in canonical form.
    """

    def __init__(self, spec: SymmetrySpec, parts: Sequence[Part], rng: np.random.Generator) -> None:
        self.spec, self.parts, self.rng = spec, parts, rng
        self.element = spec.identity()
        self.inside = {name: spec.nested_in(name) for name in spec.sizes}
        self.dependents = {
            name: {other for other, outer in spec.batched_over.items() if name in outer} for name in spec.sizes
        }
        nested = set(itertools.chain.from_iterable(self.inside.values()))
        self.outermost = [name for name in spec.sizes if name not in nested]
        self.signs = {
            name: [key for key, own in spec.scalings.items() if own.space == name and own.values != "positive"]
            for name in spec.sizes
            if name not in spec.groups
        }
        self.signs = {name: keys if len(keys) <= MOST_SIGNS else [] for name, keys in self.signs.items()}

    def run(self) -> Matching:
        """Return the moves at which no visit brings a gain."""
        trace = [self.objective(self.parts)]
        for _ in range(MOST_PASSES):
            for name in self.rng.permutation([*self.spec.sizes]).tolist():
                self.improve(name)
            trace.append(self.objective(self.parts))
            if trace[-1] - trace[-2] <= TOLERANCE * abs(trace[-1]):
                break
        return Matching(self.element, trace[-1], tuple(trace), solved=(len(trace) - 1) * len(self.spec.sizes))

    def grow(self, shuffle: bool) -> None:
        """Visit each space once, the most constrained first, by weights whose other spaces are matched already."""
        todo = list(self.outermost)
        inner = [name for name in self.spec.sizes if name not in todo]

        def informative(name: str) -> list[Part]:
            unknown = {other for top in todo if top != name for other in (top, *self.inside[top])}
            return [part for part in self.related(name) if unknown.isdisjoint(part.labels)]

        while todo:
            sizes = {name: float(sum(part.a.size for part in informative(name))) for name in todo}
            if shuffle:
                sizes = {name: size * self.rng.exponential() for name, size in sizes.items()}
            name = max(todo, key=sizes.__getitem__)
            if parts := informative(name):
                self.element |= self.visit(name, parts)
            todo.remove(name)
        for name in inner:
            self.improve(name)

    def related(self, name: str) -> list[Part]:
        """Return the parts with a space or with spaces nested in it."""
        keys = {name, *self.inside[name]}
        return [part for part in self.parts if keys.intersection(part.labels)]

    def improve(self, name: str) -> None:
        """Visit a space, and keep the result if the objective does not fall."""
        parts = self.related(name)
        before, old = self.objective(parts), self.element
        self.element = old | self.visit(name, parts)
        if self.objective(parts) < before:
            self.element = old

    def objective(self, parts: Sequence[Part]) -> float:
        """Return the inner product of A's weights with B's moved weights."""
        return sum(float(np.vdot(part.a, self.moved(part, frozenset()))) for part in parts)

    def moved(self, part: Part, still: frozenset[str], axis: int | None = None) -> np.ndarray:
        """Return B's weights after the moves of all spaces, except those in `still` and that of `axis`."""
        spec, element = self.spec, self.element
        labels = part.labels

        def moves(i: int) -> bool:
            return i != axis and labels[i] not in still

        plain = tuple(
            label if moves(i) and label not in spec.groups else None if label in spec.sizes else label
            for i, label in enumerate(labels)
        )
        perms = {name: element[name] for name in plain if isinstance(name, str) and name in spec.sizes}
        b = spec.permutations.permute_array(perms, plain, part.b) if perms else part.b
        for i, label in enumerate(labels):
            if not moves(i):
                continue
            if label in spec.groups and self.turns(part, i):
                b = spec.multiply(labels, b, i, element[str(label)])
            for key, odd in zip(self.signs.get(str(label), ()), self.parity(part, i), strict=True):
                b = b * spec.along(labels, i, element[key]) if odd else b
        return b

    def turns(self, part: Part, axis: int) -> bool:
        """Return whether rotations of the space on an axis act on a part."""
        powers = self.spec.groups[str(part.labels[axis])].powers
        return part.leaf is None or Place(part.leaf, part.index, axis) in powers

    def parity(self, part: Part, axis: int) -> tuple[int, ...]:
        """Return, for each scaling with signs of the space on an axis, whether a part changes its sign."""
        keys = self.signs.get(str(part.labels[axis]), ())
        if part.leaf is None:
            return (1,) * len(keys)
        place = Place(part.leaf, part.index, axis)
        return tuple(int(self.spec.scalings[key].powers.get(place, 0)) % 2 for key in keys)

    def visit(self, name: str, parts: Sequence[Part]) -> Element:
        """Return the best moves of a space, and of spaces nested in it, for the current moves of all others."""
        if self.inside[name] and not self.spec.batched_over.get(name):
            return self.visit_outer(name, parts)
        moves, _ = self.best(name, self.scores(name, parts))
        return {key: values.reshape(self.element[key].shape) for key, values in moves.items()}

    def scores(self, name: str, parts: Sequence[Part], outer: str | None = None) -> dict[tuple[int, ...], np.ndarray]:
        """Return the inner products of A's units with B's, added up over parts with the same parity.

        With `outer`, compare the units inside each pair of outer units.
        """
        found: dict[tuple[int, ...], Any] = {}
        still = frozenset({outer, *self.dependents[outer]} if outer else self.dependents[name])
        for part in parts:
            for axis in [axis for axis, label in enumerate(part.labels) if label == name]:
                if name in self.spec.groups and not self.turns(part, axis):
                    continue
                parity = self.parity(part, axis)
                front = unit_axes(self.spec, part.labels, axis)
                a, b = (_units_first(x, front) for x in (part.a, self.moved(part, still, axis)))
                pairs = "hir,gjr->hgij" if outer else "bir,bjr->bij"
                found[parity] = found.get(parity, 0.0) + np.einsum(pairs, a, b, optimize=True)
        return found

    def best(self, name: str, scores: dict[tuple[int, ...], np.ndarray]) -> tuple[Element, np.ndarray]:
        """Return the best moves of a space for each matrix of scores, and their scores."""
        spec = self.spec
        if not scores:
            return {}, np.zeros(1)
        if name in spec.groups:
            (matrices,) = scores.values()
            rotations = _nearest(spec.groups[name].kind, matrices)
            return {name: rotations}, (rotations * matrices).sum((-2, -1))
        keys = self.signs.get(name, [])
        combinations = np.array([*itertools.product((1.0, -1.0), repeat=len(keys))])
        options = np.stack(
            [
                sum(np.prod(np.where(parity, signs, 1.0)) * matrix for parity, matrix in scores.items())
                for signs in combinations
            ]
        )
        total = options.max(0)
        order = solve_assignment(total)
        value = np.take_along_axis(total, order[..., None], -1)[..., 0].sum(-1)
        chosen = np.take_along_axis(options.argmax(0), order[..., None], -1)[..., 0]
        moves: Element = {name: order}
        moves |= {key: combinations[chosen, i] for i, key in enumerate(keys)}
        return moves, value

    def visit_outer(self, name: str, parts: Sequence[Part]) -> Element:
        """Return the best permutation of an outer space, such as heads, with the best moves inside each pair."""
        n = self.spec.sizes[name]
        total, moves = np.zeros((n, n)), Element()
        used: set[int] = set()
        for inner in self.inside[name]:
            own = [part for part in parts if inner in part.labels]
            used |= {id(part) for part in own}
            found, value = self.best(inner, self.scores(inner, own, name))
            moves |= found
            total = total + value
        rest = [part for part in parts if id(part) not in used]
        plain = self.scores(name, rest)
        for matrix in plain.values():
            total = total + matrix[0]
        order = solve_assignment(total)
        return {name: order} | {key: np.asarray(values)[np.arange(n), order] for key, values in moves.items()}


def _units_first(values: np.ndarray, front: Sequence[int]) -> Float[np.ndarray, "batch n rest"]:
    """Return an array with its batch axes merged, its units next, and all other axes last."""
    first = np.moveaxis(values, front, range(len(front)))
    return first.reshape(int(np.prod(first.shape[: len(front) - 1])), first.shape[len(front) - 1], -1)


def _nearest(kind: str, scores: Float[np.ndarray, "*batch n n"]) -> Float[np.ndarray, "*batch n n"]:
    """Return the rotation with the largest inner product with the scores."""
    if not np.isfinite(scores).all():
        raise UserError("Cannot match units with non-finite inner products: scale the weights down.")
    if kind == CENTRED:
        basis = centring(scores.shape[-1])
        return 1 / len(basis) + basis @ _polar(basis.T @ scores @ basis) @ basis.T
    return _polar(scores)


def _polar(matrix: Float[np.ndarray, "*batch n n"]) -> Float[np.ndarray, "*batch n n"]:
    """Return the orthogonal factor of the polar decomposition."""
    u, _, vt = np.linalg.svd(matrix)
    return u @ vt
