"""Activation matching: the order of one network's units in which they are active when another's are."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from mcomb.base import Apply, Array, Params, UserError
from mcomb.evaluate import BATCH, in_batches, local_mesh, replicate
from mcomb.permute import Layout, Perms, PermutationSpec
from mcomb.taps import activations, survey, tapped
from mcomb.weights import Matching, assigned, objective

CONSTANT = 1e-10  # of a unit's mean square: variance below is rounding
Scores = dict[str, Float[np.ndarray, "..."]]
"""The score of each unit of A, at its index in the permutation, with each of B, at all of this index that may move."""


def match_activations(
    spec: PermutationSpec,
    a: Params,
    b: Params,
    apply: Apply,
    inputs: Array,
    *,
    inner_products: bool = False,
    batch_size: int = BATCH,
) -> Matching:
    """The matching of `b` to `a` in which the correlations of matched units' activations are highest in sum.

    A unit's activations are what the next layers' weights see of it, over all inputs and positions. Of several places
    where a permutation's units are active, such as along a residual stream, the mean correlation counts. With
    `inner_products`, inner products of activations take the place of correlations. The inputs, whose first axis
    is theirs, are each taken alone.
    """
    spec.validate(a)
    spec.validate(b)
    perms = _best(spec, _scores(spec, a, b, apply, inputs, inner_products=inner_products, batch_size=batch_size))
    trace = objective(spec, a, b), objective(spec, a, b, perms)
    return Matching(perms, trace[-1], trace)


def correlations(
    spec: PermutationSpec, a: Params, b: Params, apply: Apply, inputs: Array, *, batch_size: int = BATCH
) -> dict[str, Float[np.ndarray, "..."]]:
    """Pearson's correlation of each unit of A with the same unit of B, over all inputs and positions.

    It is the mean over the places where the unit is active, and over the units inside it. A unit that never changes
    correlates with nothing.
    """
    scores = _scores(spec, a, b, apply, inputs, inner_products=False, batch_size=batch_size)
    found: dict[str, np.ndarray] = {}
    for name in _outwards(spec):
        inner = [found[other].mean(-1) for other in spec.inside(name)]
        own = [_at(spec, name, scores[name], spec.identity()).diagonal(axis1=-2, axis2=-1)] if name in scores else []
        found[name] = np.mean([*own, *inner], axis=0)
    return {name: found[name] for name in spec.sizes}


def _best(spec: PermutationSpec, scores: Scores) -> Perms:
    """The permutations of the highest scores.

    What is inside a unit, such as the dimensions of a head, is matched for each pair of units: a head's score with
    another is that of the best order of its dimensions.
    """
    scores = dict(scores)
    for name in _outwards(spec):
        for other in spec.inside(name):
            pairs = np.moveaxis(scores[other], len(spec.shape(name)), -2)
            best = np.take_along_axis(pairs, assigned(pairs)[..., None], -1).sum((-2, -1))
            scores[name] = scores.get(name, 0) + best
    perms: Perms = {}
    for name in reversed(_outwards(spec)):
        perms[name] = assigned(_at(spec, name, scores[name], perms))
    return {name: perms[name] for name in spec.sizes}


def _outwards(spec: PermutationSpec) -> list[str]:
    """The permutations, those of what is inside units before those of the units."""
    return sorted(spec.sizes, key=lambda name: -len(spec.shape(name)))


def _at(spec: PermutationSpec, name: str, scores: np.ndarray, perms: Perms) -> Float[np.ndarray, "... n n"]:
    """For each member of a family, the scores of its units with those of the member of B that is put there."""
    family = spec.families.get(name, ())
    along = dict(zip(family, np.indices(spec.shape(name)[:-1], sparse=True), strict=True))
    sources = [
        perms[parent][(*(along[other] for other in spec.families.get(parent, ())), along[parent])]
        for parent in _divided(spec, family)[1]
    ]
    return scores[(*along.values(), slice(None), *sources, slice(None))]


def _scores(
    spec: PermutationSpec, a: Params, b: Params, apply: Apply, inputs: Array, *, inner_products: bool, batch_size: int
) -> Scores:
    """The scores of all permutations but those of which the units are only seen with what is inside them."""
    mesh = local_mesh()
    size = min(batch_size, -(-len(inputs) // mesh.size))
    found = jax.device_get(_compare(apply, spec, size, inner_products, mesh, *replicate((a, b, inputs))))
    scores = {}
    for name, score in found.items():
        if not np.isfinite(score).all():
            raise UserError(f"activations of {name} are not finite: there is something wrong with the networks")
        family = spec.families.get(name, ())
        fixed, moving = _divided(spec, family)
        units = [spec.sizes[one] for one in (*moving, name)]
        unfolded = score.reshape(*(spec.fixed[one] for one in fixed), *units, *units)
        scores[name] = np.moveaxis(unfolded, range(len(family)), [family.index(one) for one in fixed + moving])
    return scores


def _divided(spec: PermutationSpec, family: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The axes of a family that never move, and those that do."""
    return [name for name in family if name in spec.fixed], [name for name in family if name in spec.sizes]


class Moments(NamedTuple):
    """The means of units of A and of B, and the sums of squares and products about them."""

    x: Float[Array, "members units"]
    y: Float[Array, "members units"]
    xx: Float[Array, "members units"]
    yy: Float[Array, "members units"]
    xy: Float[Array, "members units units"]

    def about(self, x: Array, y: Array, count: Array) -> "Moments":
        """The same about other means, for so many summands."""
        dx, dy = self.x - x, self.y - y
        return Moments(x, y, self.xx + count * dx**2, self.yy + count * dy**2, self.xy + count * _outer(dx, dy))

    def score(self, count: Array, inner_products: bool) -> Float[Array, "members units units"]:
        """The correlation, or the mean product, of each unit of A with each of B."""
        if inner_products:
            return self.xy / count + _outer(self.x, self.y)

        def inverse_norm(mean: Array, squares: Array) -> Array:
            alive = squares > CONSTANT * (squares + count * mean**2)
            return jnp.where(alive, jax.lax.rsqrt(jnp.where(alive, squares, 1.0)), 0.0)

        return self.xy * _outer(inverse_norm(self.x, self.xx), inverse_norm(self.y, self.yy))


def _outer(x: Array, y: Array) -> Array:
    return x[..., :, None] * y[..., None, :]


@partial(jax.jit, static_argnums=range(5))
def _compare(
    apply: Apply,
    spec: PermutationSpec,
    batch_size: int,
    inner_products: bool,
    mesh: Mesh,
    a: Params,
    b: Params,
    inputs: Array,
) -> dict[str, Float[Array, "members units units"]]:
    """For each permutation the mean of its scores over its places, in one pass over all inputs."""
    taps = activations(spec, survey(spec, apply, a, inputs[:1]))
    run = tapped(apply, {tap.place for places in taps.values() for tap in places})

    def units(params: Params, rows: Array) -> dict[str, list[Array]]:
        # Each input runs alone: so we know its place in every array, and can leave out what fills the last batch.
        found = jax.vmap(lambda row: run(params, row[None])[1])(rows)
        return {
            name: parts
            for name, places in taps.items()
            if (parts := [part for tap in places for part in _units(spec, name, tap.layouts, found[tap.place])])
        }

    def on_device(batches: list[Array], a: Params, b: Params) -> dict[str, Array]:
        def add(state: Any, batch: list[Array]) -> tuple[Any, None]:
            (count, totals), (rows, real) = state, batch
            one = partial(_added, count, real)
            return (count + real.sum(), _over_moments(one, totals, units(a, rows), units(b, rows))), None

        def over_devices(local: Moments) -> Moments:
            x, y = (jax.lax.psum(mean * count, "device") / everything for mean in local[:2])
            return Moments(x, y, *jax.lax.psum(local.about(x, y, count)[2:], "device"))

        none = jax.tree.map(_nothing, jax.eval_shape(units, a, batches[0][0]))
        (count, totals), _ = jax.lax.scan(add, (jnp.zeros(()), none), batches)
        everything = jax.lax.psum(count, "device")
        scores = _over_moments(lambda local: over_devices(local).score(everything, inner_products), totals)
        return {name: sum(parts) / len(parts) for name, parts in scores.items()}

    batches = in_batches(batch_size * mesh.size, inputs, jnp.ones(len(inputs)))
    specs = (P(None, "device"), P(), P())
    return jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)(batches, a, b)


def _over_moments(function: Callable[..., Any], *trees: Any) -> Any:
    """The tree of what a function makes of the moments in the first tree and what is there in others."""
    return jax.tree.map(function, *trees, is_leaf=lambda node: isinstance(node, Moments))


def _nothing(units: jax.ShapeDtypeStruct) -> Moments:
    """The moments before the first input."""
    members, _, _, count = units.shape
    zeros = jnp.zeros((members, count))
    return Moments(zeros, zeros, zeros, zeros, _outer(zeros, zeros))


def _added(
    count: Float[Array, ""],
    real: Float[Array, "rows"],
    totals: Moments,
    x: Float[Array, "members rows samples units"],
    y: Float[Array, "members rows samples units"],
) -> Moments:
    """The moments of `count` rows and of those among these that are real; a row counts as the mean of its samples."""

    def centred(values: Array, mean: Array) -> Array:
        return jnp.where(real[:, None, None] > 0, values - mean[:, None, None], 0.0)

    def new_mean(values: Array, mean: Array) -> Array:
        return mean + centred(values, mean).mean(2).sum(1) / jnp.maximum(count + real.sum(), 1)

    means = new_mean(x, totals.x), new_mean(y, totals.y)
    x, y = centred(x, means[0]), centred(y, means[1])
    old = totals.about(*means, count)
    products = jnp.einsum("mrsi,mrsj->mij", x, y) / x.shape[2]
    return Moments(*means, old.xx + (x**2).mean(2).sum(1), old.yy + (y**2).mean(2).sum(1), old.xy + products)


def _units(
    spec: PermutationSpec, name: str, layouts: tuple[Layout, ...], rows: Array
) -> Iterator[Float[Array, "members rows samples units"]]:
    """The activations of a permutation's units, from each part of an array that has them but not what is inside.

    A unit is a position along the permutation and those that it differs along, but for the fixed ones: these give the
    members. Along other permutations, of which we do not know the order yet, activations are averaged.
    """
    family, inside = spec.families.get(name, ()), spec.inside(name)
    for labels, part in spec.pieces((None, *layouts), rows.astype(jnp.float32)):
        for axis in [axis for axis, label in enumerate(labels) if label == name and not set(labels) & set(inside)]:
            members, around = (list(map(labels.index, names)) for names in _divided(spec, family))
            units = [*around, axis]
            others = [i for i, label in enumerate(labels) if label in spec.sizes and i not in units]
            samples = [i for i in range(len(labels)) if i not in members + units]
            ordered = part.mean(tuple(others), keepdims=True).transpose(*members, *samples, *units)
            count = math.prod(part.shape[i] for i in units)
            yield ordered.reshape(math.prod(part.shape[i] for i in members), len(rows), -1, count)
