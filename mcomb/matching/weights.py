"""Weight matching: find the order of network B's units in which its weights are closest to network A's.

This is permutation coordinate descent (the paper's Algorithm 1). A sweep visits all permutations in a random order. A
visit changes one permutation and keeps the others. It solves an assignment problem: the score (i, j) is the inner
product of the weights of A's unit i with those of B's unit j.

Wide networks spend most of the time on computing scores, and trained networks on solving assignment problems. Four
measures reduce it:

- Cache scores. They are sums over the positions of the neighbouring permutations, so the next visit only updates the
  positions that have changed.
- Skip a visit if no neighbouring permutation has changed since the last one.
- Cache prices (`fair_prices`), which make the next assignment problem easier.
- Solve a permutation's assignment problem in one thread while computing the scores of permutations that share no
  weights with it.
"""

import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from jaxtyping import Float
from threadpoolctl import ThreadpoolController

from mcomb.errors import UserError, require_whole
from mcomb.keys import stream
from mcomb.matching.assignment import fair_prices, solve_assignment
from mcomb.matching.matching import Matching, WeightPart, check_networks, inner_product, weight_parts
from mcomb.runtime.progress import SILENCE, progress_bar
from mcomb.symmetry.spec import Perms, PermutationSpec
from mcomb.trees import Array, Params, at_least_float32

T = TypeVar("T")

BLOCK_SIZE = 1024  # positions that one matrix product sums over, and columns of scores that it computes
PRODUCTS_AT_ONCE = 4  # computed or waiting to be added, in the same order on all machines
SMALL = 64  # up to this size, threads cost more than they save
SOLVER_THREADS = 2  # assignment problems solved in parallel; each needs twice the memory of its scores
CACHED_SCORES = 2**29  # entries of all scores that are kept for the next visit
GAIN_ROUNDINGS = 8  # a gain counts if it exceeds this many rounding errors of its scores


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
    """Match `b` to `a` by permutation coordinate descent, from the permutations `start` or the identity.

    The descent ends at a local optimum, where no change of a single permutation brings a gain. The optimum depends on
    the starting point and on the order of visits.

    With several `restarts`, it runs repeatedly in different orders and keeps the best result. The starting points take
    turns: `start`, the result of `_grow`, `start` again, and random permutations.

    With `coarse`, each descent is preceded by one on the centres of the convolution kernels. This costs a fraction of
    the products and leaves few sweeps for the full weights. It ends at another optimum, which is usually as good.
    """
    check_networks(spec, a, b, start)
    require_whole(restarts=restarts)
    parts, names = list(weight_parts(spec, a, b, widen=False)), list(spec.sizes)
    matchings = []
    for restart in range(restarts):
        orders = partial(visit_orders, names, seed, restart)
        restart_from = start
        if restart % 4 == 1:
            restart_from = _grow(spec, parts, start, next(orders()))
        elif restart % 4 == 3:
            restart_from = spec.random(stream(seed, "start", restart))
        if coarse:
            centres = [_kernel_centre(spec, part) for part in parts]
            restart_from = coordinate_descent(spec, centres, restart_from, orders()).perms
        matchings.append(coordinate_descent(spec, parts, restart_from, orders()))
    best = max(matchings, key=lambda matching: matching.objective)
    return replace(best, tried=tuple(matching.objective for matching in matchings))


def _grow(spec: PermutationSpec, parts: Sequence[WeightPart], start: Perms | None, order: Sequence[str]) -> Perms:
    """Match each permutation in `order` once, by the weights that only it and already matched ones act on.

    Match the most constrained permutation first. Weights between two unmatched permutations are only used in sums.
    """
    perms, todo = spec.identity() if start is None else dict(start), list(order)

    def informative_parts(name: str) -> list[WeightPart]:
        unknown = {*todo} - {name, *spec.nested_in(name)}
        return [part for part in parts if name in part.labels and not unknown.intersection(part.labels)]

    def sum_over(part: WeightPart, names: set[str]) -> WeightPart:
        return _sum_over(part, tuple(axis for axis, label in enumerate(part.labels) if label in names))

    with ThreadPoolExecutor(1) as pool:
        while todo:
            name = max(todo, key=lambda name: sum(part.a.size for part in informative_parts(name)))
            unknown = {*todo} - {name, *spec.nested_in(name), *spec.batched_over.get(name, ())}
            visible = informative_parts(name) or [sum_over(part, unknown) for part in parts if name in part.labels]
            visible = [reduced for part in visible for reduced in _without_pairs(part, name)]
            perms |= _Descent(spec, visible, perms, pool).visit(name)().perms
            todo = [other for other in todo if other != name and other not in spec.nested_in(name)]
    return perms


def _sum_over(part: WeightPart, axes: tuple[int, ...]) -> WeightPart:
    """Sum a part over some axes."""
    labels = tuple(label for axis, label in enumerate(part.labels) if axis not in axes)
    dtype = _score_dtype([part])
    return WeightPart(labels, part.a.sum(axes, dtype), part.b.sum(axes, dtype))


def _without_pairs(part: WeightPart, name: str) -> list[WeightPart]:
    """Return the part; if a permutation acts on two of its axes, return values for each unit instead.

    For a recurrent kernel, these are the diagonal, and the sums of incoming and outgoing weights of each unit.
    """
    axes = [axis for axis, label in enumerate(part.labels) if label == name]
    if len(axes) != 2:
        return [part]
    diagonals = (np.diagonal(weights, axis1=axes[0], axis2=axes[1]) for weights in (part.a, part.b))
    others = (label for label in part.labels if label != name)
    return [WeightPart((*others, name), *diagonals), *(_sum_over(part, (axis,)) for axis in axes)]


def visit_orders(names: Sequence[str], seed: int, restart: int = 0) -> Iterator[list[str]]:
    """Yield a random order of the permutations for each of endlessly many sweeps."""
    key = stream(seed, "visits", restart)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))  # no compilation
    while True:
        yield [names[i] for i in rng.permutation(len(names))]


def _kernel_centre(spec: PermutationSpec, part: WeightPart) -> WeightPart:
    """Reduce a part to the middle index of every unpermuted axis, if two or more permutations act on it.

    A convolution kernel of shape (3, 3, in, out) becomes one of shape (1, 1, in, out). Parts with one permutation, such
    as biases, are small and stay unchanged.
    """
    if sum(label in spec.sizes for label in part.labels) < 2:
        return part
    keep_all = [label in spec.sizes or label in spec.fixed for label in part.labels]
    centre = tuple(
        slice(None) if keep else slice(n // 2, n // 2 + 1) for keep, n in zip(keep_all, part.a.shape, strict=True)
    )
    return WeightPart(part.labels, part.a[centre], part.b[centre])


class _MatrixStack(NamedTuple):
    """A part that one or two permutations act on, as a stack of matrices.

    `labels` names the permutations of the rows and the columns. The rows have None if only one permutation acts.
    """

    labels: tuple[str | None, str]
    a: Float[np.ndarray, "k p q"]
    b: Float[np.ndarray, "k p q"]


def _matrix_stack(spec: PermutationSpec, part: WeightPart) -> _MatrixStack | None:
    """Return a stack of matrices, or None unless one or two standalone permutations act on one axis each."""
    permuted_axes = [axis for axis, label in enumerate(part.labels) if label in spec.sizes]
    names = [str(part.labels[axis]) for axis in permuted_axes]
    if len(names) not in (1, 2) or len(set(names)) < len(names) or not all(_is_standalone(spec, n) for n in names):
        return None
    last = range(-len(names), 0)
    a, b = (np.moveaxis(weights, permuted_axes, last) for weights in (part.a, part.b))
    if len(names) == 1:
        return _MatrixStack((None, names[0]), a.reshape(1, -1, a.shape[-1]), b.reshape(1, -1, b.shape[-1]))
    return _MatrixStack((names[0], names[1]), a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]))


def _is_standalone(spec: PermutationSpec, name: str) -> bool:
    """Return whether the permutation is not batched over any axis and no other permutation is batched over it."""
    return name not in spec.batched_over and not any(name in batch_axes for batch_axes in spec.batched_over.values())


class _Update(NamedTuple):
    """The permutations that a visit changes, and the gain in the objective."""

    perms: Perms
    gain: float


_NO_UPDATE = _Update({}, 0.0)


def coordinate_descent(
    spec: PermutationSpec, parts: Sequence[WeightPart], start: Perms | None, orders: Iterable[list[str]]
) -> Matching:
    """Run coordinate descent from `start`; sweep i visits the permutations in the order `orders[i]`."""
    initial = inner_product(spec, parts, start)
    if not np.isfinite(initial):
        raise UserError("The inner product of A's and B's weights is not finite: scale the weights down.")
    cores = os.cpu_count() or 1
    products, solvers = ThreadPoolExecutor(min(cores, PRODUCTS_AT_ONCE)), ThreadPoolExecutor(min(cores, SOLVER_THREADS))
    descent = _Descent(spec, parts, spec.identity() if start is None else start, products)
    pending: dict[str, tuple[int, Future[_Update]]] = {}  # the sweep of a visit, and its assignment problem

    def wait_for(names: Iterable[str]) -> None:
        """Wait for the pending assignment problems of these permutations, and apply their updates."""
        for name in [name for name in names if name in pending]:
            sweep, future = pending.pop(name)
            update = future.result()
            descent.perms |= update.perms
            gains[sweep] += update.gain

    def show(where: str) -> None:
        bar.set_postfix_str(f"sweep {len(gains)}, {where}, objective {initial + sum(gains):.6g}", refresh=False)

    gains: list[float] = []  # of each sweep
    solved = skipped = 0
    # Our threads get the cores, because BLAS threads wait for one another whenever another process needs a core.
    blas_threads = _thread_pools().limit(limits=max(1, cores // PRODUCTS_AT_ONCE), user_api="blas")
    with products, solvers, blas_threads, progress_bar(None, " visits", "matching weights", delay=SILENCE) as bar:
        for sweep, order in enumerate(orders):
            solved_before = solved
            gains.append(0.0)
            for name in order:
                wait_for({name, *descent.neighbours[name]})
                if not descent.is_unchanged(name):
                    show(name)
                    bar.update()
                    pending[name] = sweep, solvers.submit(descent.visit(name))
                    solved += 1
            if solved == solved_before:
                gains.pop()
                break
            skipped += len(order) - (solved - solved_before)
        wait_for(list(pending))
        show("done")
    trace = tuple(itertools.accumulate(gains, initial=initial))
    return Matching(descent.perms, trace[-1], trace, solved=solved, skipped=skipped)


@cache  # finding the loaded libraries takes longer than a small matching
def _thread_pools() -> ThreadpoolController:
    return ThreadpoolController()


class _Descent:
    """The state of a coordinate descent.

    Attributes:
        perms: The current permutations.
        parts: The parts of the weights that each permutation acts on. Stacks of matrices are also in `stacks`, the
            other parts in `other_parts`.
        neighbours: The permutations that the scores of each permutation depend on.
        scores: The scores of each standalone permutation at its last visit.
        prices: The prices of B's units at the last visit, for each standalone permutation that has begun to converge.
        last_visit: The values of all permutations at the last visit of each permutation.
    """

    def __init__(self, spec: PermutationSpec, parts: Sequence[WeightPart], start: Perms, pool: ThreadPoolExecutor):
        self.spec, self.pool = spec, pool
        self.perms: Perms = {name: np.array(start[name]) for name in spec.sizes}
        self.parts: dict[str, list[WeightPart]] = {name: [] for name in spec.sizes}
        self.stacks: dict[str, list[_MatrixStack]] = {name: [] for name in spec.sizes}
        self.other_parts: dict[str, list[WeightPart]] = {name: [] for name in spec.sizes}
        # A permutation is its own neighbour if it acts on two axes of a part, or if others are nested in it.
        self.neighbours: dict[str, set[str]] = {name: {name} if spec.nested_in(name) else set() for name in spec.sizes}
        for part in parts:
            stack = _matrix_stack(spec, part)
            labels = [str(label) for label in part.labels if label in spec.sizes]
            for name in set(labels):
                self.parts[name].append(part)
                if stack:
                    self.stacks[name].append(stack)
                else:
                    self.other_parts[name].append(part)
                self.neighbours[name] |= {*labels} if labels.count(name) > 1 else {*labels} - {name}
        self.scores: dict[str, np.ndarray] = {}
        self.prices: dict[str, np.ndarray] = {}
        self.last_visit: dict[str, Perms] = {}

    def is_unchanged(self, name: str) -> bool:
        """Return whether the permutation was visited before and none of its neighbours has changed since."""
        previous = self.last_visit.get(name)
        return previous is not None and all(self.perms[other] is previous[other] for other in self.neighbours[name])

    def visit(self, name: str) -> Callable[[], _Update]:
        """Update the permutation's scores, and return a function that solves its assignment problem.

        The function reads nothing that other visits change, so it may run in another thread.
        """
        previous, perms = self.last_visit.get(name), dict(self.perms)
        self.last_visit[name] = perms
        if not _is_standalone(self.spec, name):
            return partial(self._solve_nested, name, perms)
        n = self.spec.sizes[name]
        if name in self.scores:
            scores = self.scores[name]
        else:
            scores, previous = np.zeros((n, n), _score_dtype(self.parts[name])), None
            if n * n + sum(cached.size for cached in self.scores.values()) <= CACHED_SCORES:
                self.scores[name] = scores
        products = [product for stack in self.stacks[name] for product in _score_products(stack, name, perms, previous)]
        for columns, product in self._in_turn(products) if n > SMALL else (compute() for compute in products):
            scores[:, columns] += product
        if self.other_parts[name]:  # their scores are recomputed at each visit
            scores = scores.copy()
            scores[:, perms[name]] += _unit_scores(self.spec, self._permuted_parts(name, perms), (), (name,))[0]
        return partial(self._solve, name, perms, scores)

    def _in_turn(self, functions: Iterable[Callable[[], T]]) -> Iterator[T]:
        """Yield the results of functions in order, while the pool computes a few of them ahead."""
        ahead: deque[Future[T]] = deque()
        for function in functions:
            if len(ahead) == PRODUCTS_AT_ONCE:
                yield ahead.popleft().result()
            ahead.append(self.pool.submit(function))
        while ahead:
            yield ahead.popleft().result()

    def _solve(self, name: str, perms: Perms, scores: Float[np.ndarray, "n n"]) -> _Update:
        """Return the update of a standalone permutation to the one with the highest score."""
        prices, current = self.prices.get(name, 0.0), perms[name]
        best = solve_assignment(scores, prices)
        changed = np.flatnonzero(best != current)
        if len(changed) < len(best) / 2:  # otherwise the next scores differ too much for prices to help
            self.prices[name] = fair_prices(scores, best, prices)
        if name in self.neighbours[name]:  # the scores depend on the permutation itself and only estimate the gain
            return self._update_if_better(name, perms, {name: best})
        new, old = (scores[changed, perm[changed]].astype(np.float64) for perm in (best, current))
        gain = float(new.sum() - old.sum())
        least = GAIN_ROUNDINGS * np.finfo(scores.dtype).eps * np.abs([new, old]).sum()
        return _Update({name: best}, gain) if gain > least else _NO_UPDATE

    def _solve_nested(self, name: str, perms: Perms) -> _Update:
        """Return the update of a permutation that is batched over others, or that has others nested in it.

        Nested permutations are solved first, for every pair of units. For attention heads, for example, the score of
        A's head i with B's head j is that of the best order of head j's dimensions.
        """
        spec, n = self.spec, self.spec.sizes[name]
        batch_axes, nested = spec.batched_over.get(name, ()), spec.nested_in(name)
        parts = self._permuted_parts(name, perms)
        scores = _unit_scores(spec, parts, batch_axes, (name,), exclude=nested)
        nested_perms = {}
        for other in nested:
            m = spec.sizes[other]
            pairs = _unit_scores(spec, parts, batch_axes, (name, other)).reshape(-1, n, m, n, m).swapaxes(2, 3)
            nested_perms[other] = solve_assignment(pairs)
            scores = scores + np.take_along_axis(pairs, nested_perms[other][..., None], -1).sum((-2, -1))
        best = solve_assignment(scores)
        change: Perms = {name: best.reshape(spec.shape(name))}  # relative to `perms`, which B's parts already have
        for other, perm in nested_perms.items():
            change[other] = np.take_along_axis(perm, best[..., None, None], 2).reshape(spec.shape(other))
        composed = spec.compose(spec.identity() | change, perms)
        return self._update_if_better(name, perms, {changed: composed[changed] for changed in change})

    def _update_if_better(self, name: str, perms: Perms, new: Perms) -> _Update:
        """Return the update to the permutations `new` if they improve the objective, else no update."""
        parts = self.parts[name]
        gain = inner_product(self.spec, parts, perms | new) - inner_product(self.spec, parts, perms)
        return _Update(new, gain) if gain > 0 else _NO_UPDATE

    def _permuted_parts(self, name: str, perms: Perms) -> list[WeightPart]:
        """Return the permutation's parts that are not stacks of matrices, with B's weights permuted."""
        return [part._replace(b=self.spec.permute_array(perms, part.labels, part.b)) for part in self.other_parts[name]]


def _score_dtype(parts: Sequence[WeightPart]) -> np.dtype:
    return np.result_type(np.float32, *(part.a for part in parts), *(part.b for part in parts))


def _score_products(
    stack: _MatrixStack, name: str, perms: Perms, previous: Perms | None
) -> Iterator[Callable[[], tuple[slice, np.ndarray]]]:
    """Yield functions that compute the contributions of a stack of matrices to columns of a permutation's scores.

    `perms` are the current permutations and `previous` those at the last visit. The first visit (`previous` is None)
    adds all products. Later visits add the differences at positions that have changed. Row i of the scores is unit i of
    A, and column j is unit j of B before any permutation.
    """
    axis = stack.labels.index(name)
    other = stack.labels[1 - axis]
    tiles = _blocks(len(perms[name]))
    if other is None:
        # Half precision is widened for each product.
        rows = _blocks(stack.a.shape[1]) if stack.a.dtype.itemsize < 4 else [slice(None)]

        def product_of_rows(rows: slice, tile: slice) -> tuple[slice, np.ndarray]:
            return tile, at_least_float32(stack.a[0, rows]).T @ at_least_float32(stack.b[0, rows, tile])

        if previous is None:
            yield from (partial(product_of_rows, *each) for each in itertools.product(rows, tiles))
        return

    changed = np.arange(len(perms[other])) if previous is None else np.flatnonzero(perms[other] != previous[other])

    def take(b: np.ndarray, positions: Array, tile: slice) -> np.ndarray:
        return b[positions, tile] if axis else b[tile].take(positions, 1)

    def product(a: np.ndarray, b: np.ndarray, block: slice, tile: slice) -> tuple[slice, np.ndarray]:
        positions = changed[block]
        rows_b = at_least_float32(take(b, perms[other][positions], tile))
        if previous is None:
            rows_a = at_least_float32(a[block] if axis else a[:, block])
        else:
            rows_a = at_least_float32(a.take(positions, 1 - axis))
            rows_b -= at_least_float32(take(b, previous[other][positions], tile))
        return tile, rows_a.T @ rows_b if axis else rows_a @ rows_b.T

    for block, tile, (a, b) in itertools.product(_blocks(len(changed)), tiles, zip(stack.a, stack.b, strict=True)):
        yield partial(product, a, b, block, tile)


def _blocks(size: int) -> list[slice]:
    return [slice(start, start + BLOCK_SIZE) for start in range(0, size, BLOCK_SIZE)]


def _unit_scores(
    spec: PermutationSpec,
    parts: Sequence[WeightPart],
    batch_axes: tuple[str, ...],
    names: tuple[str, ...],
    exclude: Sequence[str] = (),
) -> Float[np.ndarray, "batch n n"]:
    """Return the inner product of each unit of A with each unit of B, for each index along the batch axes.

    A unit is an index along all axes `names`: with ("heads", "dims"), each dimension of each head is a unit. Parts with
    an axis in `exclude` do not count.
    """
    batch_size = math.prod(spec.shape(names[0])[:-1])
    count = math.prod(spec.sizes[name] for name in names)
    total = np.zeros((batch_size, count, count), _score_dtype(parts))
    for labels, a, b in parts:
        if set(labels) & set(exclude):
            continue
        for axis in [axis for axis, label in enumerate(labels) if label == names[-1]]:
            front = [*map(labels.index, batch_axes + names[:-1]), axis]
            moved = [np.moveaxis(weights, front, range(len(front))) for weights in (a, b)]
            rows_a, rows_b = (at_least_float32(weights.reshape(batch_size, count, -1)) for weights in moved)
            total += rows_a @ rows_b.swapaxes(-1, -2)
    return total
