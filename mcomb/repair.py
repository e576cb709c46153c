"""REPAIR (Jordan et al. 2022): combinations of networks whose hidden units vary as much as those of the networks.

The units of a combination vary less than those of the networks that it is made of, and the less the deeper they are.
REPAIR shifts and rescales every unit's pre-activation so that its mean and its standard deviation become those of the
networks, each counted by its share: as would a BatchNorm after each layer, with these as its parameters.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, PRNGKeyArray

from mcomb.activations import CONSTANT
from mcomb.base import Apply, Array, Params
from mcomb.combine import Draw
from mcomb.evaluate import BATCH, replicate
from mcomb.permute import PermutationSpec, names_in
from mcomb.taps import Place, Site, Tap, survey, tapped


class Layer(NamedTuple):
    """A linear map to hidden units: where its weights and the pre-activations are."""

    weights: Place
    output: Place
    samples: tuple[int, ...]  # the axes of pre-activations that are not the units'


class Moments(NamedTuple):
    """The mean and variance of each of a layer's units, with one entry along the axes of samples."""

    mean: Float[Array, "..."]
    variance: Float[Array, "..."]


class Correction(NamedTuple):
    """The scale and then the shift that a layer's units need."""

    scale: Float[Array, "..."]
    shift: Float[Array, "..."]

    def corrected(self, value: Array) -> Array:
        """The corrected pre-activations."""
        return (value * self.scale + self.shift).astype(value.dtype)


class Renormalised(NamedTuple):
    """A network with the correction of each layer."""

    params: Params
    corrections: list[Correction]


class Statistics(NamedTuple):
    """Batches of inputs, and for each layer the moments on each of them of each network to combine."""

    batches: Array
    moments: list[Moments]


class Repaired(NamedTuple):
    """The first three arguments of `evaluate`, for repaired combinations."""

    apply: Apply
    draw: Draw
    networks: tuple[Any, ...]


def repaired(
    spec: PermutationSpec,
    apply: Apply,
    draw: Draw,
    networks: tuple[Params, ...],
    inputs: Array,
    *,
    ends: Callable[..., Sequence[Params]] | None = None,
    batch_size: int = BATCH,
) -> Repaired:
    """The function, the draw and the networks with which `evaluate` measures repaired combinations.

    Statistics are those of the inputs, of which a few are left out where batches would not be equal. In each batch a
    layer is corrected before the next one sees it; then the statistics of batches are averaged. Units that never
    change are only shifted. A network's share in a layer is found from the weights, by least squares. Layers inside
    scans stay as they are.

    Where a draw changes networks before it combines them, `ends(parameter, *networks)` are those that it combines;
    their statistics are then taken for each combination.
    """
    count = -(-len(inputs) // batch_size)
    size = len(inputs) // count
    batches = jnp.asarray(inputs)[: count * size].reshape(count, size, *inputs.shape[1:])
    networks, batches = replicate((networks, batches))
    moments = _moments_of(spec, apply, networks, batches)
    none = [Correction(jnp.ones_like(of.mean[0, 0]), jnp.zeros_like(of.mean[0, 0])) for of in moments]
    statistics = Statistics(batches, moments)
    by_themselves = (Renormalised(params, none) for params in networks)
    return Repaired(_repaired_apply(spec, apply), _repaired_draw(spec, apply, draw, ends), (*by_themselves, statistics))


def layers(spec: PermutationSpec, apply: Apply, params: Params, inputs: Array) -> list[Layer]:
    """The linear maps, outside of scans, whose results have hidden units, in the order of use.

    They are products of something that depends on the inputs with weights, which depend on parameters only. If all
    that happens to a product is that a bias is added, which depends on parameters only, too, then the sum is the
    pre-activation.
    """
    sites = survey(spec, apply, params, inputs).sites
    readers: dict[Place, list[Site]] = {}
    for site in sites:
        for tap in filter(None, site.operands):
            readers.setdefault(tap.place, []).append(site)
    found = []
    for site in sites:
        weights = _from_params(site)
        if site.eqn.primitive.name not in ("dot_general", "conv_general_dilated") or not weights:
            continue
        (output,), names = site.results, weights[0].perms
        in_scan = len(output.layouts) > len(site.eqn.outvars[0].aval.shape)  # type: ignore[attr-defined]
        if in_scan or not output.inputs or not output.perms & names & spec.sizes.keys():
            continue
        samples = tuple(i for i, layout in enumerate(output.layouts) if not names.intersection(names_in(layout)))
        match readers.get(output.place):
            case [reader] if reader.eqn.primitive.name == "add" and _from_params(reader):
                (output,) = reader.results
        found.append(Layer(weights[0].place, output.place, samples))
    return found


def _from_params(site: Site) -> list[Tap]:
    """What an equation reads that depends on parameters only."""
    return [tap for tap in site.operands if tap is not None and tap.params and not tap.inputs]


def shares(
    apply: Apply, found: Sequence[Layer], combined: Params, networks: Sequence[Params], inputs: Array
) -> Float[Array, "layers networks"]:
    """The share of each network in each layer: of the affine combinations of their weights, the nearest one's.

    A network with the same weights as the first one has no share of its own.
    """
    run = tapped(apply, {layer.weights for layer in found})

    def weights(params: Params) -> list[Array]:
        handed = run(params, inputs)[1]
        return [handed[layer.weights].astype(jnp.float32) for layer in found]

    def inner(x: Array, y: Array) -> Array:
        return jnp.vdot(x, y, precision="highest")

    grams, products = [], []
    for mine, first, *others in zip(*map(weights, (combined, *networks)), strict=True):
        steps = [other - first for other in others]
        grams.append([[inner(x, y) for y in steps] for x in steps])
        products.append([inner(x, mine - first) for x in steps])
    shape = (len(found), len(networks) - 1)
    gram, product = jnp.array(grams).reshape(*shape, shape[1]), jnp.array(products).reshape(shape)
    inverse = jnp.linalg.pinv(gram, hermitian=True)  # of zero it is zero, for the same weights
    rest = jnp.einsum("lij,lj->li", inverse, product, precision="highest")
    return jnp.concatenate([1 - rest.sum(1, keepdims=True), rest], axis=1)


@cache
def _repaired_apply(spec: PermutationSpec, apply: Apply) -> Apply:
    def run(network: Renormalised, inputs: Array) -> Array:
        found = layers(spec, apply, network.params, inputs)
        edits = {layer.output: one.corrected for layer, one in zip(found, network.corrections, strict=True)}
        return tapped(apply, (), edits)(network.params, inputs)[0]

    return run


@cache
def _repaired_draw(spec: PermutationSpec, apply: Apply, draw: Draw, ends: Callable[..., Any] | None) -> Draw:
    def run(key: PRNGKeyArray, parameter: Any, *given: Any) -> Renormalised:
        *repaired, (batches, moments) = given
        networks = [network.params for network in repaired]
        params = draw(key, parameter, *networks)
        if ends is not None:
            networks = ends(parameter, *networks)
            moments = _moments_of(spec, apply, networks, batches)
        found = layers(spec, apply, params, batches[0])
        share = shares(apply, found, params, networks, batches[0])

        def on_batch(given: tuple[Array, list[Moments]]) -> list[Moments]:
            # What a unit should be on these very inputs: so each network by itself stays as it is.
            batch, moments = given
            return _moments(apply, found, params, batch, list(zip(moments, share, strict=True)))

        mine = jax.lax.map(on_batch, (batches, moments))
        mine, moments = jax.tree.map(lambda of_batches: of_batches.mean(0), (mine, moments))
        return Renormalised(params, list(map(_correction, mine, moments, share)))

    return run


@partial(jax.jit, static_argnums=(0, 1))
def _moments_of(spec: PermutationSpec, apply: Apply, networks: Sequence[Params], batches: Array) -> list[Moments]:
    """For each layer the moments on each batch of each network."""
    found = layers(spec, apply, networks[0], batches[0])

    def on_batch(batch: Array) -> list[Moments]:
        each = [_moments(apply, found, params, batch) for params in networks]
        return jax.tree.map(lambda *of_networks: jnp.stack(of_networks), *each)

    return jax.lax.map(on_batch, batches)


def _moments(
    apply: Apply,
    found: Sequence[Layer],
    params: Params,
    inputs: Array,
    goals: Sequence[tuple[Any, ...]] | None = None,
) -> list[Moments]:
    """The moments of each layer's units; given networks' moments and shares, layers before it are corrected."""
    seen: dict[Place, Moments] = {}

    def edit(layer: Layer, *goal: Any) -> Callable[[Array], Array]:
        def see(value: Array) -> Array:
            exact = value.astype(jnp.float32)
            mean = exact.mean(layer.samples, keepdims=True)
            seen[layer.output] = mine = Moments(mean, jnp.square(exact - mean).mean(layer.samples, keepdims=True))
            return _correction(mine, *goal).corrected(value) if goal else value

        return see

    edits = {layer.output: edit(layer, *goal) for layer, goal in zip(found, goals or [()] * len(found), strict=True)}
    tapped(apply, (), edits)(params, inputs)
    return [seen[layer.output] for layer in found]


def _correction(mine: Moments, networks: Moments, share: Float[Array, "networks"]) -> Correction:
    """What gives units the mean and the standard deviation that networks have, each with its share.

    With shares below zero the deviations may sum to less than none, which counts as none.
    """
    total = partial(jnp.tensordot, share, axes=1, precision="highest")
    mean, deviation = total(networks.mean), jnp.maximum(0, total(jnp.sqrt(networks.variance)))
    alive = mine.variance > CONSTANT * (mine.variance + mine.mean**2)
    scale = jnp.where(alive, deviation / jnp.sqrt(jnp.where(alive, mine.variance, 1)), 1)
    return Correction(scale, mean - scale * mine.mean)
