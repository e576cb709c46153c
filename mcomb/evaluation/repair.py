"""REPAIR (Jordan et al. 2022): restore the variance of activations in combinations of networks.

The activations of a combination vary less than those of the networks, and deeper layers are affected more. REPAIR
shifts and rescales the pre-activation of every unit. Its mean and standard deviation become those of the networks,
weighted by their shares, as if a BatchNorm with these parameters followed each layer.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from mcomb.combination import Distribution, Draw, as_draw
from mcomb.errors import UserError
from mcomb.runtime.batching import BATCH, equal_batches
from mcomb.runtime.devices import replicate
from mcomb.symmetry.dead_units import varies
from mcomb.symmetry.intermediates import ArrayId, Intermediates, list_intermediates, list_linear_maps
from mcomb.symmetry.spec import PermutationSpec, axis_names, require_spec
from mcomb.trees import (
    Apply,
    Array,
    Inputs,
    Params,
    keep_non_floats,
    output_shapes,
    require_alike,
    require_finite_result,
)


class RepairedLayer(NamedTuple):
    """A linear map to hidden units: its weights and its output, the pre-activations."""

    weights: ArrayId
    output: ArrayId
    sample_axes: tuple[int, ...]  # axes of the output other than units, such as batch and positions
    kind: tuple[Any, ...]  # equal for the same layer in traces with other dtypes and batches


class TracedLayers(NamedTuple):
    """A trace of a function, and the layers in it."""

    intermediates: Intermediates
    layers: list[RepairedLayer]


LayerFinder = Callable[[Params, Inputs], TracedLayers]


class Moments(NamedTuple):
    """The mean and variance of each unit of a layer; sample axes have size 1."""

    mean: Float[Array, "..."]
    variance: Float[Array, "..."]


class Correction(NamedTuple):
    """The scale and shift for the pre-activations of each unit of a layer."""

    scale: Float[Array, "..."]
    shift: Float[Array, "..."]

    def apply(self, values: Array) -> Array:
        """Return the corrected pre-activations."""
        return (values * self.scale + self.shift).astype(values.dtype)


class RepairedNetwork(NamedTuple):
    """A network with a correction for each layer."""

    params: Params
    corrections: list[Correction]


class Statistics(NamedTuple):
    """Batches of inputs and, for each layer, the moments of each network on each batch."""

    batches: Inputs
    moments: list[Moments]


class Repaired(NamedTuple):
    """The function, the draw and the networks of repaired combinations, for `evaluate`."""

    apply: Apply
    draw: Draw
    networks: tuple[Any, ...]


def repaired(
    apply: Apply,
    networks: tuple[Params, ...],
    inputs: Inputs,
    draw: Distribution | Draw,
    *,
    spec: PermutationSpec,
    ends: Callable[..., Sequence[Params]] | None = None,
    batch_size: int = BATCH,
) -> Repaired:
    """Return the function, the draw and the networks that `evaluate` needs to measure repaired combinations.

    Statistics come from the inputs; a few inputs are dropped to make all batches equal. In each batch, a layer is
    corrected before the next layer receives its output. The statistics are then averaged over batches. Constant units
    are only shifted. Least squares on the weights determine a network's share in a layer. Layers inside scans are not
    corrected.

    If a draw changes networks before it combines them, `ends(parameter, *networks)` must return the changed networks.
    Their statistics are then computed for each combination.
    """
    require_spec(spec)
    if not isinstance(networks, tuple | list) or not networks:
        raise UserError(f"The networks are a {type(networks).__name__}: pass a tuple of parameter trees.")
    draw = as_draw(draw, len(networks))
    batches = equal_batches(inputs, batch_size)
    for i, network in enumerate(networks):
        require_alike("The networks to repair", networks[0], network, ("network 0", f"network {i}"))
        spec.validate(network)
        output_shapes(apply, network, inputs)
    originals, (networks, batches) = networks, replicate((networks, batches))
    moments = _network_moments(spec, apply, networks, batches)
    require_finite_result("Activations", moments, inputs, *networks)
    units = [jax.ShapeDtypeStruct(layer.mean.shape[2:], layer.mean.dtype) for layer in moments]
    unchanged = [Correction(np.ones(of.shape, of.dtype), np.zeros(of.shape, of.dtype)) for of in units]
    repaired_networks = [RepairedNetwork(own, unchanged) for own in map(keep_non_floats, networks, originals)]
    return Repaired(
        _repaired_apply(spec, apply),
        _repaired_draw(spec, apply, draw, ends),
        (*repaired_networks, Statistics(batches, moments)),
    )


def list_layers(spec: PermutationSpec, intermediates: Intermediates) -> list[RepairedLayer]:
    """Return the linear maps outside scans whose results have hidden units, in order of use."""
    layers = []
    for found in list_linear_maps(intermediates):
        (product,), names = found.equation.results, found.weights.names
        if product.names & names & spec.sizes.keys():
            layouts = enumerate(product.layouts)
            sample_axes = tuple(i for i, layout in layouts if not names.intersection(axis_names(layout)))
            kind = found.equation.eqn.primitive.name, found.weights.signature, product.layouts
            layers.append(RepairedLayer(found.weights.id, found.output.id, sample_axes, kind))
    return layers


@cache
def layer_finder(spec: PermutationSpec, apply: Apply) -> LayerFinder:
    """Return a function that finds a network's layers, and traces each combination of shapes and dtypes once."""
    found: dict[Any, TracedLayers] = {}

    def find(params: Params, inputs: Inputs) -> TracedLayers:
        leaves, structure = jax.tree.flatten((params, inputs))
        key = structure, *((jnp.shape(leaf), jax.typeof(leaf).dtype) for leaf in leaves)
        if key not in found:
            intermediates = list_intermediates(spec, apply, params, inputs)
            new = TracedLayers(intermediates, list_layers(spec, intermediates))
            for other in found.values():
                if [layer.kind for layer in new.layers] != [layer.kind for layer in other.layers]:
                    raise UserError(
                        "The layers of the function depend on the dtype of the network or the size of the batch: use "
                        "one dtype for all networks, and one batch size."
                    )
            found[key] = new
        return found[key]

    return find


def shares(
    find_layers: LayerFinder, combined: Params, networks: Sequence[Params], inputs: Inputs
) -> Float[Array, "layers networks"]:
    """Return each network's share in each layer: the coefficients of the closest affine combination of weights.

    A network with the same weights as the first one has no share.
    """

    def weights(params: Params) -> list[Array]:
        intermediates, layers = find_layers(params, inputs)
        arrays = intermediates.tap({layer.weights for layer in layers})(params, inputs)[1]
        return [arrays[layer.weights].astype(jnp.float32) for layer in layers]

    def inner(x: Array, y: Array) -> Array:
        return jnp.vdot(x, y, precision="highest")

    grams, products = [], []
    for target, first, *others in zip(*map(weights, (combined, *networks)), strict=True):
        directions = [other - first for other in others]
        grams.append([[inner(x, y) for y in directions] for x in directions])
        products.append([inner(x, target - first) for x in directions])
    shape = (len(grams), len(networks) - 1)
    gram, product = jnp.array(grams).reshape(*shape, shape[1]), jnp.array(products).reshape(shape)
    inverse = jnp.linalg.pinv(gram, hermitian=True)  # the inverse of zero is zero, for equal weights
    rest = jnp.einsum("lij,lj->li", inverse, product, precision="highest")
    return jnp.concatenate([1 - rest.sum(1, keepdims=True), rest], axis=1)


@cache
def _repaired_apply(spec: PermutationSpec, apply: Apply) -> Apply:
    """Return the function of a `RepairedNetwork` and inputs."""

    def run(network: RepairedNetwork, inputs: Inputs) -> Any:
        intermediates, layers = layer_finder(spec, apply)(network.params, inputs)
        edits = {layer.output: one.apply for layer, one in zip(layers, network.corrections, strict=True)}
        return intermediates.tap((), edits)(network.params, inputs)[0]

    return run


@cache
def _repaired_draw(spec: PermutationSpec, apply: Apply, draw: Draw, ends: Callable[..., Any] | None) -> Draw:
    """Return the draw of a `RepairedNetwork` from a key, a parameter, the networks and their statistics."""

    def run(key: PRNGKeyArray, parameter: Any, *args: Any) -> RepairedNetwork:
        *repaired_networks, (batches, goals) = args
        networks = [network.params for network in repaired_networks]
        find_layers = layer_finder(spec, apply)
        params = draw(key, parameter, *networks)
        if ends is not None:
            networks = ends(parameter, *networks)
            goals = _network_moments(spec, apply, networks, batches)
        layer_shares = shares(find_layers, params, networks, jax.tree.map(lambda x: x[0], batches))

        def batch_moments(args: tuple[Inputs, list[Moments]]) -> list[Moments]:
            # The targets are the networks' moments on this batch, so that each network itself is not changed.
            batch, goals = args
            return _moments(find_layers, params, batch, list(zip(goals, layer_shares, strict=True)))

        moments = jax.lax.map(batch_moments, (batches, goals))
        moments, goals = jax.tree.map(lambda per_batch: per_batch.mean(0), (moments, goals))
        return RepairedNetwork(params, list(map(_correction, moments, goals, layer_shares)))

    return run


@partial(jax.jit, static_argnums=(0, 1))
def _network_moments(spec: PermutationSpec, apply: Apply, networks: Sequence[Params], batches: Inputs) -> list[Moments]:
    """Return the moments of each network on each batch, for each layer."""
    find_layers = layer_finder(spec, apply)

    def batch_moments(batch: Inputs) -> list[Moments]:
        each = zip(*(_moments(find_layers, params, batch) for params in networks), strict=True)
        return [jax.tree.map(lambda *per_network: jnp.stack(per_network), *layer) for layer in each]

    return jax.lax.map(batch_moments, batches)


def _moments(
    find_layers: LayerFinder, params: Params, inputs: Inputs, goals: Sequence[tuple[Any, ...]] | None = None
) -> list[Moments]:
    """Return the moments of each layer's units.

    `goals` has the networks' moments and shares for each layer. If given, all previous layers are corrected.
    """
    moments: dict[ArrayId, Moments] = {}

    def edit(layer: RepairedLayer, *goal: Any) -> Callable[[Array], Array]:
        def observe(values: Array) -> Array:
            exact = values.astype(jnp.float32)
            mean = exact.mean(layer.sample_axes, keepdims=True)
            variance = jnp.square(exact - mean).mean(layer.sample_axes, keepdims=True)
            moments[layer.output] = Moments(mean, variance)
            return _correction(moments[layer.output], *goal).apply(values) if goal else values

        return observe

    intermediates, layers = find_layers(params, inputs)
    goals = goals or [()] * len(layers)
    edits = {layer.output: edit(layer, *goal) for layer, goal in zip(layers, goals, strict=True)}
    intermediates.tap((), edits)(params, inputs)
    return [moments[layer.output] for layer in layers]


def _correction(moments: Moments, networks: Moments, share: Float[Array, "networks"]) -> Correction:
    """Return the correction to the networks' mean and standard deviation, weighted by their shares.

    Negative shares can make the weighted deviation negative, which counts as zero.
    """
    total = partial(jnp.tensordot, share, axes=1, precision="highest")
    mean, deviation = total(networks.mean), jnp.maximum(0, total(jnp.sqrt(networks.variance)))
    alive = varies(moments.mean, moments.variance)
    scale = jnp.where(alive, deviation / jnp.sqrt(jnp.where(alive, moments.variance, 1)), 1)
    return Correction(scale, mean - scale * moments.mean)
