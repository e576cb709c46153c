"""Activation matching: maximise the correlation between the activations of matched units."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from mcomb.errors import UserError, list_some, require_whole
from mcomb.matching.assignment import solve_assignment
from mcomb.matching.matching import Matching, WeightPart, check_networks, objective, weight_parts
from mcomb.matching.procrustes import Part, canonical_parts, canonical_product, descend, wide
from mcomb.matching.weights import coordinate_descent, visit_orders
from mcomb.runtime.batching import BATCH, Sizes, compile_to_fit, in_batches
from mcomb.runtime.devices import AXIS, device_mesh, on_each_device, replicate
from mcomb.symmetry.dead_units import varies
from mcomb.symmetry.folding import balancing
from mcomb.symmetry.intermediates import Intermediate, Intermediates, list_intermediates, unit_activations
from mcomb.symmetry.matrix_groups import SymmetrySpec
from mcomb.symmetry.spec import Layout, Perms, PermutationSpec
from mcomb.trees import Apply, Array, Inputs, Params, count_examples, map_examples, output_shapes, require_finite_result

UnitScores = dict[str, Float[np.ndarray, "..."]]
"""The score of each unit of A with each unit of B, for each permutation.

The indices are those of A's unit, then those of B's unit that can be permuted. For the dimensions of heads, they are
[head of A, dimension of A, head of B, dimension of B].
"""

TIE = 1e-4  # scores that differ by less than this fraction of the largest count as equal

Active = dict[str, list[Intermediate]]
"""The arrays that contain the activations of each permutation's units."""


def match_activations(
    spec: PermutationSpec,
    a: Params,
    b: Params,
    apply: Apply,
    inputs: Inputs,
    *,
    inner_products: bool = False,
    batch_size: int = BATCH,
) -> Matching:
    """Match `b` to `a` by maximising the sum of correlations between matched units' activations.

    A unit's activations are the values that the next layers multiply with their weights, over all inputs and positions.
    If several arrays contain a permutation's units, as along a residual stream, their mean correlation counts.

    Weights break ties between units with correlations that agree to one part in ten thousand, such as units that are
    constant or multiples of one another. Two kinds of permutations are matched by weights alone, and a warning names
    them:

    - All units are constant, as with a single input.
    - No visible array contains the units. They occur only inside branches, while loops or a shard_map, between
      parameters, in entries of a stack that are read separately, or in rows that are sorted by group.

    Args:
        spec: The symmetries of both networks.
        a: Parameters of the network that stays unchanged.
        b: Parameters of the network whose units move.
        apply: The function that both networks belong to.
        inputs: Inputs with examples along the first axis. Each example is evaluated separately.
        inner_products: Use inner products of activations instead of correlations.
        batch_size: Number of inputs that a device processes at once.

    Returns:
        The matching.
    """
    check_networks(spec, a, b)
    count_examples(inputs)
    require_whole(batch_size=batch_size)
    kind = "product" if inner_products else "correlation"
    every = _scores(spec, a, b, apply, inputs, kind=kind, batch_size=batch_size)
    scores = {name: score for name, score in every.items() if score.any()}
    perms = _best_permutations(spec, scores)
    by_weights = tuple(name for name in spec.sizes if name not in perms)
    if silent := [name for name in by_weights if name in every]:
        warnings.warn(
            f"Units of {list_some(silent)} are constant within each of these separately evaluated inputs: "
            "matching them by weights.",
            stacklevel=2,
        )
    if unseen := [name for name in by_weights if name not in every]:
        warnings.warn(
            f"Units of {list_some(unseen)} are only inside branches, while loops or a shard_map, between parameters, "
            "in entries of a stack or in rows that are sorted by group, where activations cannot be compared: matching "
            "them by weights.",
            stacklevel=2,
        )
    parts = list(weight_parts(spec, a, b))
    parts += list(_as_weights(spec, scores, parts))
    perms = coordinate_descent(spec, parts, spec.identity() | perms, visit_orders(list(spec.sizes), seed=0)).perms
    trace = objective(spec, a, b), objective(spec, a, b, perms)
    return Matching(perms, trace[-1], trace, by_weights=by_weights)


def match_groups_by_activations(
    spec: SymmetrySpec,
    a: Params,
    b: Params,
    apply: Apply,
    inputs: Inputs,
    *,
    inner_products: bool = False,
    batch_size: int = BATCH,
) -> Matching:
    """Match `b` to `a` in canonical form by maximising inner products of activations.

    Units are compared by covariances, because correlations do not turn with rotations. Weights break ties, and match
    spaces without visible activations.
    """
    check_networks(spec, a, b)
    count_examples(inputs)
    require_whole(batch_size=batch_size)
    to_a, to_b = balancing(spec, a), balancing(spec, b)
    networks = spec.apply(to_a, a), spec.apply(to_b, b)
    kind = "product" if inner_products else "covariance"
    scores = _scores(spec.permutations, *networks, apply, inputs, kind=kind, batch_size=batch_size)
    parts = list(canonical_parts(spec, *map(wide, networks)))
    weights = [WeightPart(part.labels, part.a, part.b) for part in parts]
    parts += [Part(None, i, *part) for i, part in enumerate(_as_weights(spec.permutations, scores, weights))]
    best = descend(spec, parts)
    perms = spec.compose(spec.invert(to_a), spec.compose(best.perms, to_b))
    trace = (
        canonical_product(spec, *networks),
        canonical_product(spec, networks[0], spec.apply(best.perms, networks[1])),
    )
    return replace(best, perms=perms, objective=trace[-1], trace=trace, tried=())


def correlations(
    spec: PermutationSpec, a: Params, b: Params, apply: Apply, inputs: Inputs, *, batch_size: int = BATCH
) -> dict[str, Float[np.ndarray, "..."]]:
    """Return Pearson's correlation of each unit of A with the same unit of B, over all inputs and positions.

    It is averaged over the arrays that contain the unit, and over the units nested in it. The correlation is zero for
    units that are constant or in no array.
    """
    return _same_units(spec, _scores(spec, a, b, apply, inputs, kind="correlation", batch_size=batch_size))


def variances(
    spec: PermutationSpec, params: Params, apply: Apply, inputs: Inputs, *, batch_size: int = BATCH
) -> dict[str, Float[np.ndarray, "..."]]:
    """Return the variance of each unit's activations over all inputs and positions.

    It is averaged over the arrays that contain the unit, and over the units nested in it.
    """
    return _same_units(spec, _scores(spec, params, params, apply, inputs, kind="covariance", batch_size=batch_size))


def _same_units(spec: PermutationSpec, scores: UnitScores) -> dict[str, Float[np.ndarray, "..."]]:
    """Return the score of each unit of A with the same unit of B; zero for units in no array."""
    result: dict[str, np.ndarray] = {}
    for name in _innermost_first(spec):
        values = [result[other].mean(-1) for other in spec.nested_in(name)]
        if name in scores:
            matrices = _score_matrices(spec, name, scores[name], spec.identity())
            values = [matrices.diagonal(axis1=-2, axis2=-1), *values]
        result[name] = np.mean(values, axis=0) if values else np.zeros(spec.shape(name), np.float32)
    return {name: result[name] for name in spec.sizes}


def _best_permutations(spec: PermutationSpec, scores: UnitScores) -> Perms:
    """Return the permutations with the highest scores, without those that have no scores.

    Nested units, such as the dimensions of a head, are matched for each pair of outer units. The score of two heads is
    that of the best order of their dimensions.
    """
    scores = dict(scores)
    for name in _innermost_first(spec):
        for other in [other for other in spec.nested_in(name) if other in scores]:
            pairs = np.moveaxis(scores[other], len(spec.shape(name)), -2)
            best = np.take_along_axis(pairs, solve_assignment(pairs)[..., None], -1).sum((-2, -1))
            scores[name] = scores.get(name, 0) + best
    perms: Perms = {}
    for name in [name for name in reversed(_innermost_first(spec)) if name in scores]:
        perms[name] = solve_assignment(_score_matrices(spec, name, scores[name], perms))
    return {name: perms[name] for name in spec.sizes if name in perms}


def _as_weights(spec: PermutationSpec, scores: UnitScores, parts: Sequence[WeightPart]) -> Iterator[WeightPart]:
    """Yield weights whose inner products are the scores, scaled to outweigh all real weights.

    Each part has one row for each unit of B. In this row, A's units have their scores with that unit; B's unit has 1
    and its other units have 0. Units and the units nested in them share one scale.
    """
    weights_a, weights_b = [(part.labels, part.a) for part in parts], [(part.labels, part.b) for part in parts]
    families: dict[str, list[str]] = {}
    for name in scores:
        outermost = (*_fixed_and_permuted(spec, spec.batched_over.get(name, ()))[1], name)[0]
        families.setdefault(outermost, []).append(name)
    for names in families.values():
        norms = [max(_largest_norm(spec, name, arrays) for name in names) for arrays in (weights_a, weights_b)]
        largest_score = max(np.abs(scores[name]).max() for name in names)
        factor = math.prod(norms) / (TIE * largest_score) if largest_score else 0.0
        for name in names:
            batch_axes = spec.batched_over.get(name, ())
            units = [*(spec.sizes.get(other, 1) for other in batch_axes), spec.sizes[name]]
            count = math.prod(units)
            a = factor * np.moveaxis(scores[name].reshape(*spec.shape(name), count), -1, 0).astype(np.float64)
            b = np.broadcast_to(np.eye(count).reshape(count, *units), a.shape)
            yield WeightPart((None, *batch_axes, name), a, b)


def _largest_norm(spec: PermutationSpec, name: str, arrays: Iterable[tuple[Sequence[Layout], np.ndarray]]) -> float:
    """Return the largest norm of the weights of a unit, given arrays and the labels of their axes."""
    squares = np.zeros(spec.shape(name))
    for labels, weights in arrays:
        for axis in [axis for axis, label in enumerate(labels) if label == name]:
            front = [*map(labels.index, spec.batched_over.get(name, ())), axis]
            units_first = np.moveaxis(weights, front, range(len(front)))
            squares += np.square(units_first).sum(tuple(range(len(front), weights.ndim)), dtype=np.float64)
    return math.sqrt(squares.max())


def _innermost_first(spec: PermutationSpec) -> list[str]:
    """Return the names of the permutations, with nested ones such as the dimensions of heads first."""
    return sorted(spec.sizes, key=lambda name: -len(spec.shape(name)))


def _score_matrices(spec: PermutationSpec, name: str, scores: np.ndarray, perms: Perms) -> Float[np.ndarray, "... n n"]:
    """Return the scores of each assignment problem, given the outer permutations.

    For the dimensions of heads, the problem of A's head h is the one with B's head perms["heads"][h].
    """
    batch_axes = spec.batched_over.get(name, ())
    coordinates = dict(zip(batch_axes, np.indices(spec.shape(name)[:-1], sparse=True), strict=True))
    sources = [
        perms[outer][(*(coordinates[other] for other in spec.batched_over.get(outer, ())), coordinates[outer])]
        for outer in _fixed_and_permuted(spec, batch_axes)[1]
    ]
    return scores[(*coordinates.values(), slice(None), *sources, slice(None))]


def _scores(
    spec: PermutationSpec, a: Params, b: Params, apply: Apply, inputs: Inputs, *, kind: str, batch_size: int
) -> UnitScores:
    """Return the scores of all permutations, except those whose units occur only together with nested units.

    `kind` is that of `CrossMoments.score`.
    """
    mesh = device_mesh()
    sizes, args = Sizes(1, min(batch_size, -(-count_examples(inputs) // mesh.size))), replicate((a, b, inputs))
    _, program = compile_to_fit(lambda sizes: _compare.lower(apply, spec, sizes.examples, kind, mesh, *args), sizes)
    flat_scores = jax.device_get(program(*args))
    scores = {}
    for name, score in flat_scores.items():
        require_finite_result(f"Activations of {name}", score, inputs, a, b)
        batch_axes = spec.batched_over.get(name, ())
        fixed, permuted = _fixed_and_permuted(spec, batch_axes)
        units = [spec.sizes[other] for other in (*permuted, name)]
        reshaped = score.reshape(*(spec.fixed[other] for other in fixed), *units, *units)
        order = [batch_axes.index(other) for other in fixed + permuted]
        scores[name] = np.moveaxis(reshaped, range(len(batch_axes)), order)
    return scores


def _fixed_and_permuted(spec: PermutationSpec, names: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Return the fixed axes and the permuted axes among these names."""
    return [name for name in names if name in spec.fixed], [name for name in names if name in spec.sizes]


class CrossMoments(NamedTuple):
    """The means of units of A and B, and the sums of squares and products of their deviations.

    Each position along the fixed axes, which form the batch, has separate units.
    """

    mean_a: Float[Array, "batch units"]
    mean_b: Float[Array, "batch units"]
    squares_a: Float[Array, "batch units"]
    squares_b: Float[Array, "batch units"]
    products: Float[Array, "batch units units"]

    def about(self, mean_a: Array, mean_b: Array, count: Array) -> "CrossMoments":
        """Return the moments of `count` samples about other means."""
        da, db = self.mean_a - mean_a, self.mean_b - mean_b
        squares = self.squares_a + count * da**2, self.squares_b + count * db**2
        return CrossMoments(mean_a, mean_b, *squares, self.products + count * _outer(da, db))

    def score(self, count: Array, kind: str) -> Float[Array, "batch units units"]:
        """Return the correlation, covariance or mean product of each unit of A with each unit of B."""
        if kind == "product":
            return self.products / count + _outer(self.mean_a, self.mean_b)
        if kind == "covariance":
            return self.products / count

        def inverse_norm(mean: Array, squares: Array) -> Array:
            alive = varies(mean, squares / count)
            return jnp.where(alive, jax.lax.rsqrt(jnp.where(alive, squares, 1.0)), 0.0)

        norms = inverse_norm(self.mean_a, self.squares_a), inverse_norm(self.mean_b, self.squares_b)
        return self.products * _outer(*norms)


def _outer(x: Array, y: Array) -> Array:
    return x[..., :, None] * y[..., None, :]


@partial(jax.jit, static_argnums=range(5))
def _compare(
    apply: Apply,
    spec: PermutationSpec,
    batch_size: int,
    kind: str,
    mesh: Mesh,
    a: Params,
    b: Params,
    inputs: Inputs,
) -> dict[str, Float[Array, "batch units units"]]:
    """Return the scores of each permutation, averaged over the arrays with its units, in one pass over all inputs."""
    # Each example runs separately, so that every array has examples along its first axis and padding can be dropped.
    # The arrays of each network come from the trace that is evaluated.
    example = jax.tree.map(lambda x: x[:1], inputs)
    try:
        output_shapes(apply, a, example)
        networks = [list_intermediates(spec, apply, params, example) for params in (a, b)]
    except (UserError, ValueError) as error:
        if "shard_map" not in str(error):
            raise
        raise UserError(
            "The function has a shard_map that cannot split a single example between devices, but activation matching "
            "evaluates each example separately: match by weights, or pass a function without the shard_map."
        ) from error
    active_a, active_b = (unit_activations(spec, network) for network in networks)
    for name in active_a.keys() | active_b.keys():
        in_a, in_b = ([array.signature for array in active.get(name, ())] for active in (active_a, active_b))
        if in_a != in_b:
            raise UserError(
                f"The units of {name} are in {len(in_a)} arrays of A and in {len(in_b)} or different arrays of B, "
                "probably because their dtypes differ: use one dtype for both networks."
            )

    def activations(network: Intermediates, active: Active, params: Params, examples: Inputs) -> dict[str, list[Array]]:
        run = network.tap({array.id for arrays in active.values() for array in arrays})
        values = map_examples(lambda example: run(params, jax.tree.map(lambda x: x[None], example))[1], examples)
        return {
            name: parts
            for name, arrays in active.items()
            if (parts := [x for array in arrays for x in _units(spec, name, array.layouts, values[array.id])])
        }

    of_a, of_b = partial(activations, networks[0], active_a), partial(activations, networks[1], active_b)

    def on_device(batches: list[Any], a: Params, b: Params) -> dict[str, Array]:
        def add(state: Any, batch: list[Any]) -> tuple[Any, None]:
            (count, moments), (examples, weight) = state, batch
            update = partial(_add_batch, count, weight)
            moments = _map_moments(update, moments, of_a(a, examples), of_b(b, examples))
            return (count + weight.sum(), moments), None

        def over_devices(local: CrossMoments) -> CrossMoments:
            mean_a, mean_b = (jax.lax.psum(mean * count, AXIS) / total for mean in local[:2])
            return CrossMoments(mean_a, mean_b, *jax.lax.psum(local.about(mean_a, mean_b, count)[2:], AXIS))

        zeros = jax.tree.map(_zero_moments, jax.eval_shape(of_a, a, jax.tree.map(lambda x: x[0], batches[0])))
        (count, moments), _ = jax.lax.scan(add, (jnp.zeros(()), zeros), batches)
        total = jax.lax.psum(count, AXIS)
        scores = _map_moments(lambda local: over_devices(local).score(total, kind), moments)
        return {name: sum(parts) / len(parts) for name, parts in scores.items()}

    batches = in_batches(batch_size * mesh.size, [inputs, jnp.ones(count_examples(inputs))])
    specs = (P(None, AXIS), P(), P())
    return on_each_device(on_device, mesh, specs, P(), networks[0].traced)(batches, a, b)


def _map_moments(function: Callable[..., Any], *trees: Any) -> Any:
    """Apply `jax.tree.map` with the moments in the first tree as leaves."""
    return jax.tree.map(function, *trees, is_leaf=lambda node: isinstance(node, CrossMoments))


def _zero_moments(units: jax.ShapeDtypeStruct) -> CrossMoments:
    """Return the moments before the first example."""
    batch, _, _, count = units.shape
    zeros = jnp.zeros((batch, count))
    return CrossMoments(zeros, zeros, zeros, zeros, _outer(zeros, zeros))


def _add_batch(
    count: Float[Array, ""],
    weight: Float[Array, "examples"],
    moments: CrossMoments,
    a: Float[Array, "batch examples samples units"],
    b: Float[Array, "batch examples samples units"],
) -> CrossMoments:
    """Add a batch to the moments of `count` examples; the padding in the batch has weight 0.

    Each example counts as the mean of its samples.
    """

    def centred(values: Array, mean: Array) -> Array:
        return jnp.where(weight[:, None, None] > 0, values - mean[:, None, None], 0.0)

    def new_mean(values: Array, mean: Array) -> Array:
        return mean + centred(values, mean).mean(2).sum(1) / jnp.maximum(count + weight.sum(), 1)

    means = new_mean(a, moments.mean_a), new_mean(b, moments.mean_b)
    a, b = centred(a, means[0]), centred(b, means[1])
    old = moments.about(*means, count)
    squares = old.squares_a + (a**2).mean(2).sum(1), old.squares_b + (b**2).mean(2).sum(1)
    return CrossMoments(*means, *squares, old.products + jnp.einsum("besi,besj->bij", a, b) / a.shape[2])


def _units(
    spec: PermutationSpec, name: str, layouts: tuple[Layout, ...], values: Array
) -> Iterator[Float[Array, "batch examples samples units"]]:
    """Yield the activations of a permutation's units, from each part of an array without nested units.

    A unit is a position along the permutation and along the permuted axes that it is batched over. The fixed axes are
    the batch. Activations are averaged over other permutations, whose order is not known yet.
    """
    batch_axes, nested = spec.batched_over.get(name, ()), spec.nested_in(name)
    if jnp.iscomplexobj(values):
        values, layouts = jnp.stack([values.real, values.imag], -1), (*layouts, None)
    for labels, part in spec.simple_parts((None, *layouts), values.astype(jnp.float32)):
        for axis in [axis for axis, label in enumerate(labels) if label == name and not set(labels) & set(nested)]:
            batch, outer = (list(map(labels.index, names)) for names in _fixed_and_permuted(spec, batch_axes))
            units = [*outer, axis]
            others = [i for i, label in enumerate(labels) if label in spec.sizes and i not in units]
            samples = [i for i in range(len(labels)) if i not in batch + units]
            ordered = part.mean(tuple(others), keepdims=True).transpose(*batch, *samples, *units)
            count = math.prod(part.shape[i] for i in units)
            yield ordered.reshape(math.prod(part.shape[i] for i in batch), len(values), -1, count)
