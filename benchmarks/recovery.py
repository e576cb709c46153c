"""Count the planted permutations that matching recovers: by weights with 1, 2 or 4 descents, and by activations.

    python -m benchmarks.recovery    # ten minutes on one CPU core

The benchmark permutes the units of a network at random, and adds noise with a thousandth of each leaf's standard
deviation. `tied` counts networks for which the matcher found another permutation with an equal score, because weights
or activations do not distinguish all units. In the remaining networks, its permutation has a lower score.
"""

import collections
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import derivation, fuzz
from benchmarks.derivation import Shape
from mcomb import PermutationSpec, derive_spec
from mcomb.lab import cli
from mcomb.lab.cli import Flag
from mcomb.lab.setups import SETUPS
from mcomb.lab.tables import columns
from mcomb.matching.activations import correlations, match_activations
from mcomb.matching.matching import Matching, objective
from mcomb.matching.weights import match_weights
from mcomb.runtime.progress import progress_bar
from mcomb.trees import map_named
from tests.helpers.programs import Program

MATCHED_EXAMPLES = 64
NOISE = 1e-3
EQUAL = 1e-4  # relative to the score of the planted permutation


@dataclass(frozen=True)
class RecoveryConfig:
    """Flags of the benchmark."""

    networks: Annotated[int, Flag("number of networks of each kind", at_least=1)] = 20
    programs: Annotated[int, Flag("number of random programs", at_least=0)] = 100


class PlantedNetwork(NamedTuple):
    """A function, its spec, parameters and inputs."""

    fn: Callable[..., Any]
    spec: PermutationSpec
    params: Any
    inputs: Any


def grouped_queries(params: Any, tokens: Any) -> Any:
    """Apply a transformer in which each group of four queries shares one key and one value."""
    x = params["embed"][tokens]
    for layer in params["layers"]:
        q = jnp.einsum("btc,cgrd->btgrd", x, layer["q"])
        k, v = (jnp.einsum("btc,cgd->btgd", x, layer[name]) for name in "kv")
        weights = jax.nn.softmax(jnp.einsum("btgrd,bsgd->bgrts", q, k))
        x = x + jnp.einsum("bgrts,bsgd,grdc->btc", weights, v, layer["out"])
        x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
    return x @ params["head"]


def grouped_query_shapes() -> Any:
    """Return the shapes of the parameters of `grouped_queries`, with two layers."""
    sizes = {"q": (8, 4, 4, 8), "k": (8, 4, 8), "v": (8, 4, 8), "out": (4, 4, 8, 8), "up": (8, 24), "down": (24, 8)}
    layer = {name: Shape(shape, jnp.float32) for name, shape in sizes.items()}
    return {"layers": [layer, layer], "embed": Shape((4, 8), jnp.float32), "head": Shape((8, 4), jnp.float32)}


def random_params(shapes: Any, rng: np.random.Generator) -> Any:
    """Return random parameters: weights are scaled by fan-in, and variances are positive."""

    def draw(name: str, leaf: Shape) -> np.ndarray:
        values = rng.standard_normal(leaf.shape, np.float32) / np.float32(math.prod(leaf.shape[:-1]) ** 0.5)
        return np.abs(values) + np.float32(0.5) if name.endswith("var") else values

    return map_named(draw, shapes)


def kinds() -> Iterator[tuple[str, derivation.Problem]]:
    """Yield the name and the problem of each kind of network."""
    tokens, images = Shape((2, 16), jnp.int32), Shape((2, 32, 32, 3), jnp.float32)
    yield "transformer", derivation.linen(derivation.PlainTransformer(2), tokens)
    yield "grouped queries", derivation.Problem(grouped_queries, grouped_query_shapes(), Shape((2, 5), jnp.int32))
    yield "ResNet", derivation.linen(derivation.ResNet((1, 1, 1, 1)), images)
    yield "DenseNet", derivation.linen(derivation.DenseNet((2, 2)), images)
    yield "recurrence", derivation.recurrence(6)
    for name, setup in {setup.model: (name, setup) for name, setup in SETUPS.items()}.values():
        shape = Shape((2, *setup.dataset.shape), jnp.float32)
        yield name.split("-")[0], derivation.Problem(setup.apply(1), setup.shapes(1), shape)


def networks_of(problem: derivation.Problem, count: int) -> Iterator[PlantedNetwork]:
    """Yield random networks of one kind."""
    spec = derive_spec(*problem)
    for seed in range(count):
        rng = np.random.default_rng(seed)
        shape, dtype = (MATCHED_EXAMPLES, *problem.inputs.shape[1:]), problem.inputs.dtype
        inputs = rng.integers(0, 4, shape) if dtype == jnp.int32 else rng.standard_normal(shape)
        yield PlantedNetwork(problem.fn, spec, random_params(problem.params, rng), inputs.astype(dtype))


def programs(count: int) -> Iterator[PlantedNetwork]:
    """Yield random programs that have permutations and that JAX can map over examples."""
    seed = -1
    while count:
        seed += 1
        program = Program(seed, fuzz.steps_of(seed))
        spec = derive_spec(program, program.params(), program.input)
        if not spec.sizes or not fuzz.can_be_batched(program):
            continue

        def apply(params: Any, x: Any, program: Program = program) -> Any:
            return jax.vmap(lambda pair: program(params, pair).reshape(-1))(x)

        rng = np.random.default_rng(seed)
        params = random_params({name: Shape(shape, jnp.float32) for name, shape in program.shapes.items()}, rng)
        yield PlantedNetwork(
            apply, spec, params, rng.standard_normal((MATCHED_EXAMPLES, *program.input.shape), np.float32)
        )
        count -= 1


def add_noise(params: Any, rng: np.random.Generator) -> Any:
    """Add noise with a thousandth of each leaf's standard deviation."""
    return jax.tree.map(
        lambda leaf: leaf + np.float32(NOISE * leaf.std()) * rng.standard_normal(leaf.shape, np.float32), params
    )


def try_all(network: PlantedNetwork, seed: int) -> dict[str, str]:
    """Return whether each matcher finds, ties or misses a planted permutation."""
    fn, spec, a, x = network
    planted = spec.random(jax.random.key(seed))
    b, expected = add_noise(spec.apply(planted, a), np.random.default_rng(seed)), spec.invert(planted)

    def by_weights(perms: Any) -> float:
        return objective(spec, a, b, perms)

    def by_activations(perms: Any) -> float:
        return float(sum(values.sum() for values in correlations(spec, a, spec.apply(perms, b), fn, x).values()))

    def outcome(matching: Matching, score: Callable[[Any], float]) -> str:
        if all(np.array_equal(matching.perms[name], expected[name]) for name in spec.sizes):
            return "found"
        return "tied" if score(matching.perms) >= (1 - EQUAL) * score(expected) else "missed"

    outcomes = {str(n): outcome(match_weights(spec, a, b, restarts=n), by_weights) for n in (1, 2, 4)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about units that are matched by weights
        return outcomes | {"activations": outcome(match_activations(spec, a, b, fn, x), by_activations)}


def main(config: RecoveryConfig) -> None:
    """Print one row for each kind of network."""
    rows: list[tuple[str, ...]] = [("", "networks", "one descent", "two", "four", "activations")]
    families = [(name, networks_of(problem, config.networks)) for name, problem in kinds()]
    with progress_bar(len(families) * config.networks + config.programs, "network", "planting") as bar:
        for name, networks in [*families, ("random programs", programs(config.programs))]:
            counts: dict[str, collections.Counter[str]] = {}
            for seed, network in enumerate(networks):
                for way, outcome in try_all(network, seed).items():
                    counts.setdefault(way, collections.Counter())[outcome] += 1
                bar.update()
            cells = [f"{c['found']}" + (f" + {c['tied']} tied" if c["tied"] else "") for c in counts.values()]
            if counts:
                rows.append((name, str(counts["1"].total()), *cells))
    print(columns(rows))


if __name__ == "__main__":
    cli.run(lambda: main(cli.parse(RecoveryConfig, __doc__ or "")))
