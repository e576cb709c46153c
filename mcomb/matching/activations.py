"""Activation matching: the order of one network's units in which they are active when another's are."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from mcomb.errors import UserError, list_some, require_whole
from mcomb.matching.matching import Matching, WeightPart, check_networks, objective, solve_assignment, weight_parts
from mcomb.matching.weights import coordinate_descent, visit_orders
from mcomb.runtime.batching import BATCH, Sizes, compile_to_fit, in_batches
from mcomb.runtime.devices import AXIS, device_mesh, on_each_device, replicate
from mcomb.symmetry.dead_units import varies
from mcomb.symmetry.intermediates import Intermediate, Intermediates, list_intermediates, unit_activations
from mcomb.symmetry.spec import Layout, Perms, PermutationSpec
from mcomb.trees import Apply, Array, Inputs, Params, count_examples, map_examples, output_shapes, require_finite_result

Scores = dict[str, Float[np.ndarray, "..."]]
"""For each permutation the score of each unit of A with each of B.

The indices are those of A's unit, then those of B's that can be permuted. For the dimensions of heads they are
[head of A, dimension of A, head of B, dimension of B].
"""

TIE = 1e-4  # scores that differ by less, in parts of the largest, do not tell units apart

Active = dict[str, list[Intermediate]]
"""For each permutation, the arrays in which its units are active."""


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
    """The matching of `b` to `a` in which the correlations of matched units' activations are highest in sum.

    A unit's activations are what the next layers' weights see of it, over all inputs and positions. Where a
    permutation's units are active in several arrays, as along a residual stream, the mean correlation counts. With
    `inner_products`, inner products of activations take the place of correlations. The first axis of `inputs` is that
    of examples, and each example is evaluated by itself.

    Weights decide between units that activations do not tell apart, such as those that never vary, or are multiples of
    one another: where correlations are as high to a ten-thousandth. Units of which none varies, as with a single input,
    and units that are active in no array that can be looked at, because they are only inside branches, while loops or a
    shard_map, between parameters, in entries of a stack that are read one by one, or in rows that are sorted by group,
    are matched by weights alone. A warning names them.
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
            f"units of {list_some(silent)} never vary over these inputs, of which each is evaluated by itself: they "
            "are matched by weights",
            stacklevel=2,
        )
    if unseen := [name for name in by_weights if name not in every]:
        warnings.warn(
            f"units of {list_some(unseen)} are only inside branches, while loops or a shard_map, between parameters, "
            "in entries of a stack or in rows that are sorted by group, where activations cannot be compared: they are "
            "matched by weights",
            stacklevel=2,
        )
    parts = list(weight_parts(spec, a, b))
    parts += list(_as_weights(spec, scores, parts))
    perms = coordinate_descent(spec, parts, spec.identity() | perms, visit_orders(list(spec.sizes), seed=0)).perms
    trace = objective(spec, a, b), objective(spec, a, b, perms)
    return Matching(perms, trace[-1], trace, by_weights=by_weights)


def correlations(
    spec: PermutationSpec, a: Params, b: Params, apply: Apply, inputs: Inputs, *, batch_size: int = BATCH
) -> dict[str, Float[np.ndarray, "..."]]:
    """Pearson's correlation of each unit of A with the same unit of B, over all inputs and positions.

    It is the mean over the arrays in which the unit is active, and over the units inside it. A unit that never
    changes, or that is active nowhere, correlates with nothing.
    """
    return _same_units(spec, _scores(spec, a, b, apply, inputs, kind="correlation", batch_size=batch_size))


def variances(
    spec: PermutationSpec, params: Params, apply: Apply, inputs: Inputs, *, batch_size: int = BATCH
) -> dict[str, Float[np.ndarray, "..."]]:
    """The variance of each unit's activations over all inputs and positions.

    It is the mean over the arrays in which the unit is active, and over the units inside it.
    """
    return _same_units(spec, _scores(spec, params, params, apply, inputs, kind="covariance", batch_size=batch_size))


def _same_units(spec: PermutationSpec, scores: Scores) -> dict[str, Float[np.ndarray, "..."]]:
    """The score of each unit of A with the same unit of B; zero of units that are active nowhere."""
    result: dict[str, np.ndarray] = {}
    for name in _innermost_first(spec):
        values = [result[other].mean(-1) for other in spec.nested_in(name)]
        if name in scores:
            matrices = _score_matrices(spec, name, scores[name], spec.identity())
            values = [matrices.diagonal(axis1=-2, axis2=-1), *values]
        result[name] = np.mean(values, axis=0) if values else np.zeros(spec.shape(name), np.float32)
    return {name: result[name] for name in spec.sizes}


def _best_permutations(spec: PermutationSpec, scores: Scores) -> Perms:
    """The permutations of the highest scores; none of units without scores.

    What is inside a unit, such as the dimensions of a head, is matched for each pair of units: a head's score with
    another is that of the best order of its dimensions.
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


def _as_weights(spec: PermutationSpec, scores: Scores, parts: Sequence[WeightPart]) -> Iterator[WeightPart]:
    """The scores as weights, larger than any others: inner products of units are their scores, times a large factor.

    Such a part has a row for each unit of B. In it A's units have their scores with that one; of B's own, that one has
    1 and the others 0. Units and what is inside them have one factor.
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
    """The largest norm of the weights of a unit, from arrays with the names of their axes."""
    squares = np.zeros(spec.shape(name))
    for labels, weights in arrays:
        for axis in [axis for axis, label in enumerate(labels) if label == name]:
            front = [*map(labels.index, spec.batched_over.get(name, ())), axis]
            units_first = np.moveaxis(weights, front, range(len(front)))
            squares += np.square(units_first).sum(tuple(range(len(front), weights.ndim)), dtype=np.float64)
    return math.sqrt(squares.max())


def _innermost_first(spec: PermutationSpec) -> list[str]:
    """The names of the permutations, those of the dimensions of heads before those of the heads."""
    return sorted(spec.sizes, key=lambda name: -len(spec.shape(name)))


def _score_matrices(spec: PermutationSpec, name: str, scores: np.ndarray, perms: Perms) -> Float[np.ndarray, "... n n"]:
    """The scores of each assignment problem, given the outer permutations.

    For the dimensions of heads it is that of A's head h with B's head perms["heads"][h], for each h.
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
) -> Scores:
    """The scores of all permutations but those whose units are only active with what is inside them.

    Which `kind` there is, `Moments.score` says.
    """
    mesh = device_mesh()
    sizes, args = Sizes(1, min(batch_size, -(-count_examples(inputs) // mesh.size))), replicate((a, b, inputs))
    _, program = compile_to_fit(lambda sizes: _compare.lower(apply, spec, sizes.images, kind, mesh, *args), sizes)
    flat_scores = jax.device_get(program(*args))
    scores = {}
    for name, score in flat_scores.items():
        require_finite_result(f"activations of {name}", score, inputs, a, b)
        batch_axes = spec.batched_over.get(name, ())
        fixed, permuted = _fixed_and_permuted(spec, batch_axes)
        units = [spec.sizes[other] for other in (*permuted, name)]
        reshaped = score.reshape(*(spec.fixed[other] for other in fixed), *units, *units)
        order = [batch_axes.index(other) for other in fixed + permuted]
        scores[name] = np.moveaxis(reshaped, range(len(batch_axes)), order)
    return scores


def _fixed_and_permuted(spec: PermutationSpec, names: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The axes that are fixed, and those that are permuted."""
    return [name for name in names if name in spec.fixed], [name for name in names if name in spec.sizes]


class Moments(NamedTuple):
    """The means of units of A and of B, and the sums of squares and products of deviations from them.

    There are separate units at each position along the fixed axes, which are the batch.
    """

    mean_a: Float[Array, "batch units"]
    mean_b: Float[Array, "batch units"]
    squares_a: Float[Array, "batch units"]
    squares_b: Float[Array, "batch units"]
    products: Float[Array, "batch units units"]

    def about(self, mean_a: Array, mean_b: Array, count: Array) -> "Moments":
        """The moments of `count` samples about other means."""
        da, db = self.mean_a - mean_a, self.mean_b - mean_b
        squares = self.squares_a + count * da**2, self.squares_b + count * db**2
        return Moments(mean_a, mean_b, *squares, self.products + count * _outer(da, db))

    def score(self, count: Array, kind: str) -> Float[Array, "batch units units"]:
        """The correlation, the covariance or the mean product of each unit of A with each of B."""
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
    """For each permutation the mean of its scores over the arrays with its units, in one pass over all inputs."""
    # Each example runs alone: so the first axis of every array is theirs, and those that pad the last batch can be
    # left out. Of each network the arrays are found in the trace that is evaluated.
    example = jax.tree.map(lambda x: x[:1], inputs)
    try:
        output_shapes(apply, a, example)
        networks = [list_intermediates(spec, apply, params, example) for params in (a, b)]
    except (UserError, ValueError) as error:
        if "shard_map" not in str(error):
            raise
        raise UserError(
            "the function has a shard_map that cannot share one example out among devices, but activation matching "
            "looks at each example by itself: match by weights, or give it a function without the shard_map"
        ) from error
    active_a, active_b = (unit_activations(spec, network) for network in networks)
    for name in active_a.keys() | active_b.keys():
        in_a, in_b = ([array.signature for array in active.get(name, ())] for active in (active_a, active_b))
        if in_a != in_b:
            raise UserError(
                f"the units of {name} are active in {len(in_a)} arrays of one network and in {len(in_b)} of the other, "
                "or in others, which their dtypes must be the reason of: give both networks in one dtype"
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

        def over_devices(local: Moments) -> Moments:
            mean_a, mean_b = (jax.lax.psum(mean * count, AXIS) / total for mean in local[:2])
            return Moments(mean_a, mean_b, *jax.lax.psum(local.about(mean_a, mean_b, count)[2:], AXIS))

        zeros = jax.tree.map(_zero_moments, jax.eval_shape(of_a, a, jax.tree.map(lambda x: x[0], batches[0])))
        (count, moments), _ = jax.lax.scan(add, (jnp.zeros(()), zeros), batches)
        total = jax.lax.psum(count, AXIS)
        scores = _map_moments(lambda local: over_devices(local).score(total, kind), moments)
        return {name: sum(parts) / len(parts) for name, parts in scores.items()}

    batches = in_batches(batch_size * mesh.size, [inputs, jnp.ones(count_examples(inputs))])
    specs = (P(None, AXIS), P(), P())
    return on_each_device(on_device, mesh, specs, P(), networks[0].traced)(batches, a, b)


def _map_moments(function: Callable[..., Any], *trees: Any) -> Any:
    """`jax.tree.map`, with the moments in the first tree as its leaves."""
    return jax.tree.map(function, *trees, is_leaf=lambda node: isinstance(node, Moments))


def _zero_moments(units: jax.ShapeDtypeStruct) -> Moments:
    """The moments before the first example."""
    batch, _, _, count = units.shape
    zeros = jnp.zeros((batch, count))
    return Moments(zeros, zeros, zeros, zeros, _outer(zeros, zeros))


def _add_batch(
    count: Float[Array, ""],
    weight: Float[Array, "examples"],
    moments: Moments,
    a: Float[Array, "batch examples samples units"],
    b: Float[Array, "batch examples samples units"],
) -> Moments:
    """The moments of `count` examples and of new ones: those of weight 1, not the padding of weight 0.

    An example counts as the mean of its samples.
    """

    def centred(values: Array, mean: Array) -> Array:
        return jnp.where(weight[:, None, None] > 0, values - mean[:, None, None], 0.0)

    def new_mean(values: Array, mean: Array) -> Array:
        return mean + centred(values, mean).mean(2).sum(1) / jnp.maximum(count + weight.sum(), 1)

    means = new_mean(a, moments.mean_a), new_mean(b, moments.mean_b)
    a, b = centred(a, means[0]), centred(b, means[1])
    old = moments.about(*means, count)
    squares = old.squares_a + (a**2).mean(2).sum(1), old.squares_b + (b**2).mean(2).sum(1)
    return Moments(*means, *squares, old.products + jnp.einsum("besi,besj->bij", a, b) / a.shape[2])


def _units(
    spec: PermutationSpec, name: str, layouts: tuple[Layout, ...], values: Array
) -> Iterator[Float[Array, "batch examples samples units"]]:
    """The activations of a permutation's units, from each part of an array that has them but not what is inside.

    A unit is a position along the permutation and along the permuted axes that it is batched over; the fixed ones
    are the batch. Along other permutations, of which we do not know the order yet, activations are averaged.
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
