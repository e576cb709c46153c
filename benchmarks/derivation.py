"""Time the derivation of specs against depth: JAX's tracing, and the rest.

    python -m benchmarks.derivation    # half a minute

Widths do not matter, because only shapes are traced. `of tracing` is the time of the rest divided by the time of
tracing, both from the fastest of `--rounds` runs.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from mcomb.lab import cli
from mcomb.lab.cli import Flag
from mcomb.lab.tables import columns
from mcomb.symmetry.derive import spec_of_trace

Shape = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class DerivationConfig:
    """Flags of the benchmark."""

    rounds: Annotated[int, Flag("derivations of each function", at_least=1)] = 3


class Problem(NamedTuple):
    """A function and the shapes of its arguments."""

    fn: Callable[..., Any]
    params: Any
    inputs: Any


def linen(model: nn.Module, inputs: Shape) -> Problem:
    """Return a Flax model with the shapes of its variables and input."""
    return Problem(model.apply, jax.eval_shape(model.init, jax.random.key(0), inputs), inputs)


class PlainTransformer(nn.Module):
    """A decoder with causal attention and LayerNorm."""

    depth: int

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x, mask = nn.Embed(50, 32)(tokens), nn.make_causal_mask(tokens)
        for _ in range(self.depth):
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x), mask=mask)
            x = x + nn.Dense(32)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))))
        return nn.Dense(50)(nn.LayerNorm()(x))


def norm(x: Any) -> Any:
    """Return a BatchNorm that uses running averages."""
    return nn.BatchNorm(use_running_average=True)(x)


class ResNet(nn.Module):
    """Groups of bottleneck blocks with BatchNorm; `blocks` has the number of blocks in each group."""

    blocks: tuple[int, ...]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(norm(nn.Conv(8, (3, 3))(x)))
        for group, count in enumerate(self.blocks):
            for block in range(count):
                stride, width = (2 if group and not block else 1), 8 * 2**group
                y = nn.relu(norm(nn.Conv(width, (1, 1))(x)))
                y = nn.relu(norm(nn.Conv(width, (3, 3), stride)(y)))
                y = norm(nn.Conv(4 * width, (1, 1))(y))
                x = nn.relu(y + (x if block else norm(nn.Conv(4 * width, (1, 1), stride)(x))))
        return nn.Dense(10)(x.mean((1, 2)))


class DenseNet(nn.Module):
    """Densely connected blocks with BatchNorm; `layers` has the number of layers in each block."""

    layers: tuple[int, ...]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Conv(8, (3, 3))(x)
        for count in self.layers:
            for _ in range(count):
                y = nn.Conv(16, (1, 1))(nn.relu(norm(x)))
                x = jnp.concatenate([x, nn.Conv(4, (3, 3))(nn.relu(norm(y)))], -1)
            x = nn.avg_pool(nn.Conv(x.shape[-1] // 2, (1, 1))(nn.relu(norm(x))), (2, 2), (2, 2))
        return nn.Dense(10)(x.mean((1, 2)))


def recurrence(steps: int) -> Problem:
    """Return an unrolled recurrence."""

    def fn(params: Any, x: Any) -> Any:
        hidden = jnp.zeros((len(x), 8))
        for i in range(steps):
            hidden = jnp.tanh(jnp.concatenate([x[:, i], hidden], 1) @ params["in"])
        return hidden @ params["out"]

    shapes = {"in": Shape((12, 8), jnp.float32), "out": Shape((8, 2), jnp.float32)}
    return Problem(fn, shapes, Shape((2, steps, 4), jnp.float32))


def growing(steps: int) -> Problem:
    """Return a concatenation that grows in a Python loop."""

    def fn(params: Any, x: Any) -> Any:
        hidden = x @ params
        for _ in range(steps):
            hidden = jnp.concatenate([hidden, jnp.tanh(x @ params)], 1)
        return hidden.sum(1)

    return Problem(fn, Shape((4, 8), jnp.float32), Shape((2, 4), jnp.float32))


def problems() -> Iterator[tuple[str, Problem]]:
    """Yield the name and the problem of each row."""
    tokens, images = Shape((2, 16), jnp.int32), Shape((2, 32, 32, 3), jnp.float32)
    for depth in (6, 12, 24, 48):
        yield f"transformer of {depth} layers", linen(PlainTransformer(depth), tokens)
    for name, blocks in (("50", (3, 4, 6, 3)), ("101", (3, 4, 23, 3)), ("152", (3, 8, 36, 3))):
        yield f"ResNet-{name}", linen(ResNet(blocks), images)
    for name, layers in (("121", (6, 12, 24, 16)), ("201", (6, 12, 48, 32))):
        yield f"DenseNet-{name}", linen(DenseNet(layers), images)
    for steps in (100, 400):
        yield f"recurrence of {steps} steps", recurrence(steps)
    for steps in (200, 800):
        yield f"{steps} concatenations", growing(steps)


def main(config: DerivationConfig) -> None:
    """Print one row for each problem."""
    rows = [("", "equations", "permutations", "tracing, s", "the rest, s", "of tracing")]
    for name, (fn, params, inputs) in problems():
        times = []
        for _ in range(config.rounds):
            jax.clear_caches()
            start = time.perf_counter()
            traced = jax.make_jaxpr(fn)(params, inputs)
            middle = time.perf_counter()
            spec = spec_of_trace(traced, params, inputs)
            times.append((middle - start, time.perf_counter() - middle))
        (tracing, rest), count = min(times, key=sum), len(traced.jaxpr.eqns)
        cells = (f"{count:,}", str(len(spec.sizes)), f"{tracing:.2f}", f"{rest:.2f}", f"{rest / tracing:.2f}")
        rows.append((name, *cells))
    print(columns(rows))


if __name__ == "__main__":
    cli.run(lambda: main(cli.parse(DerivationConfig, __doc__ or "")))
