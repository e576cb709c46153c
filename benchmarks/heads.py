"""Measure the part of weight matching that goes to families, such as the heads of transformers.

    python -m benchmarks.heads                                    # half a minute on two CPU cores

A family consists of units with a permutation inside each, such as heads and their dimensions. Weight matching
recomputes the scores of a family at each visit. It recomputes the scores of a plain permutation only after a change.
`scores, later visits` is therefore an upper bound for the time that caching the scores of families could save. All
times are CPU seconds. The networks are random (`as initialised`), or the second one is the first one with permuted
units and added noise (`permuted`).
"""

import collections
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.tables import TableRow, show
from mcomb.keys import stream
from mcomb.lab import cli
from mcomb.lab.cli import Flag
from mcomb.matching import weights
from mcomb.symmetry.derive import derive_spec

HEAD_NOISE = 0.3  # in standard deviations of a leaf


@dataclass(frozen=True)
class HeadsConfig:
    """Flags of the benchmark."""

    streams: Annotated[tuple[int, ...], Flag("units of the residual stream", at_least=1)] = (128, 256, 512)
    layers: Annotated[int, Flag("number of layers", at_least=1)] = 4
    dims: Annotated[int, Flag("dimensions of a head", at_least=1)] = 32
    json: Annotated[Path | None, Flag("JSON file for the table")] = None


def transformer(params: Any, tokens: Any) -> Any:
    """Apply residual layers of attention and MLPs."""
    x = params["embed"][tokens]
    for layer in params["layers"]:
        q, k, v = (jnp.einsum("btc,chd->bthd", x, layer[name]) for name in "qkv")
        attention = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
        x = x + jnp.einsum("bhts,bshd,hdc->btc", attention, v, layer["out"])
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    return x @ params["head"]


def make_params(stream_size: int, config: HeadsConfig, seed: int) -> Any:
    """Return random weights: heads that fill the stream, and MLPs four times as wide as it."""
    n, rng = stream_size, np.random.default_rng(seed)
    heads = max(1, n // config.dims)
    draw = lambda *shape: rng.standard_normal(shape, np.float32) / np.float32(n**0.5)  # noqa: E731
    layer = lambda: (  # noqa: E731
        {name: draw(n, heads, config.dims) for name in "qkv"}
        | {"out": draw(heads, config.dims, n), "up": draw(n, 4 * n), "down": draw(4 * n, n)}
    )
    return {"embed": draw(100, n), "layers": [layer() for _ in range(config.layers)], "head": draw(n, 10)}


def measure(stream_size: int, kind: str, config: HeadsConfig) -> TableRow:
    """Return the CPU seconds of one matching, in total and for families."""
    a, b = (make_params(stream_size, config, seed) for seed in (0, 1))
    spec = derive_spec(transformer, a, jnp.zeros((1, 4), jnp.int32))
    if kind == "permuted":
        noisy = jax.tree.map(lambda x, y: x + HEAD_NOISE * y, a, b)
        b = jax.device_get(spec.apply(spec.random(stream(0)), noisy))
    seconds: dict[str, float] = collections.defaultdict(float)
    inside: list[str] = []

    def timed(name: Callable[..., str], function: Any) -> Any:
        def run(*args: Any, **named: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **named)
            finally:
                seconds[name(*args)] += time.thread_time() - start

        return run

    visited: set[str] = set()
    real_solve, real_scores = weights._Descent._solve_nested, weights._unit_scores
    permuted = weights._Descent._permuted_parts

    def solve_nested(descent: Any, name: str, perms: Any) -> Any:
        inside[:] = ["later" if name in visited else "first"]
        visited.add(name)
        return timed(lambda *_: "families", real_solve)(descent, name, perms)

    of_visit = lambda *_: inside[0] if inside else "first"  # noqa: E731
    with (
        mock.patch.object(weights, "SOLVER_THREADS", 1),  # solve families in turn, to know the visit of each call
        mock.patch.object(weights._Descent, "_solve_nested", solve_nested),
        mock.patch.object(weights, "_unit_scores", timed(of_visit, real_scores)),
        mock.patch.object(weights._Descent, "_permuted_parts", timed(of_visit, permuted)),
    ):
        start = time.process_time()
        found = weights.match_weights(spec, a, b)
        total = time.process_time() - start
    return {
        "": kind,
        "stream": stream_size,
        "families": sum(bool(spec.nested_in(name)) for name in spec.sizes),
        "sweeps": len(found.trace) - 1,
        "all": total,
        "families, s": seconds["families"],
        "scores, later visits": seconds["later"],
        "of all": seconds["later"] / total,
    }


def main(config: HeadsConfig) -> None:
    """Print the table, and write it to `--json` if given."""
    kinds = ("as initialised", "permuted")
    show([measure(size, kind, config) for kind in kinds for size in config.streams], config.json)


if __name__ == "__main__":
    cli.run(lambda: main(cli.parse(HeadsConfig, __doc__ or "")))
