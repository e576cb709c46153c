"""Compare the speed of `evaluate`, a Python loop of jitted calls, and PyTorch if torch is installed.

    python -m benchmarks.evaluation                                   # a few minutes on two CPU cores
    python -m benchmarks.evaluation --networks tiny10-cifar10:4 --json evaluation.json

Each implementation draws the same number of random mixtures of two networks, and measures their loss and accuracy on
the same images. The loop follows Git Re-Basin: one jitted call for a mixture, and one for each batch of images. Its
batches have the size that `evaluate` uses, or 1,000 images as in Git Re-Basin; the faster loop is the baseline. PyTorch
uses all cores and calls the network with `torch.func.functional_call`. The benchmark first checks that PyTorch's logits
equal JAX's. The implementations take turns with products of large matrices, which define the machine's peak rate. The
fastest of `--rounds` turns counts.
"""

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.random_data import random_data
from benchmarks.tables import TableRow, show
from mcomb.combination import mix, uniform
from mcomb.errors import UserError
from mcomb.evaluation.evaluate import evaluate
from mcomb.keys import stream
from mcomb.lab import cli
from mcomb.lab.cli import Flag
from mcomb.lab.setups import SETUPS, Setup
from mcomb.runtime.batching import BATCH
from mcomb.runtime.devices import describe_devices

LOOP_BATCHES = (BATCH, 1000)
SIDE = 2048  # size of square matrices, to measure the machine's peak rate
NETWORKS = ("tiny10-cifar10:1", "tiny10-cifar10:4", "resnet20-cifar10:1", "mlp-cifar10:32")


@dataclass(frozen=True)
class EvaluationConfig:
    """Flags of the benchmark."""

    networks: Annotated[tuple[str, ...], Flag("networks, each as SETUP:WIDTH")] = NETWORKS
    combinations: Annotated[int, Flag("mixtures in a turn", at_least=1)] = 4
    gigaflop: Annotated[int, Flag("approximate GFLOP for each mixture; sets the number of images", at_least=1)] = 50
    rounds: Annotated[int, Flag("turns of each implementation", at_least=1)] = 5
    json: Annotated[Path | None, Flag("JSON file for the table")] = None


EvaluationProblem = tuple[Setup, int, tuple[Any, Any], np.ndarray, np.ndarray, np.ndarray, jax.Array]
"""A setup, a width, two networks, images and labels, and the shares and keys of the mixtures."""


def make_problem(name: str, config: EvaluationConfig) -> tuple[EvaluationProblem, float]:
    """Return the networks, images and mixtures to evaluate, and the number of operations."""
    named, _, width = name.partition(":")
    if named not in SETUPS or not width.isdecimal() or not int(width):
        raise UserError(f"--networks {name} is not a setup with a width: pass one such as {NETWORKS[0]}.")
    setup = SETUPS[named]
    networks = setup.init(int(width), 0), setup.init(int(width), 1)
    one = jax.ShapeDtypeStruct((1, *setup.dataset.shape), np.uint8)
    analysis: Any = jax.jit(setup.apply(int(width))).lower(networks[0], one).cost_analysis()
    count = BATCH * max(1, round(config.gigaflop * 1e9 / analysis["flops"] / BATCH))  # whole batches, to avoid padding
    images, labels = random_data(setup, count)
    shares, keys = (
        np.linspace(0, 0.5, config.combinations, dtype=np.float32),
        jax.random.split(stream(0), config.combinations),
    )
    return (setup, int(width), networks, images, labels, shares, keys), analysis["flops"] * count * len(shares)


def way_of_ours(problem: EvaluationProblem) -> Callable[[], None]:
    """Return a turn of `evaluate` with its default settings."""
    setup, width, networks, images, labels, shares, keys = problem

    def turn() -> None:
        evaluate(setup.apply(width), networks, images, labels, uniform, shares, keys)

    return turn


def way_of_a_loop(problem: EvaluationProblem, batch_size: int) -> Callable[[], None]:
    """Return a turn of a Python loop over mixtures and batches, with one jitted call for each."""
    setup, width, networks, images, labels, shares, keys = problem
    draw, apply = jax.jit(mix(uniform)), setup.apply(width)

    @jax.jit
    def measure(params: Any, images: Any, labels: Any) -> tuple[Any, Any]:
        logits = apply(params, images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.sum(), (logits.argmax(-1) == labels).sum()

    def turn() -> None:
        for share, key in zip(shares, keys, strict=True):
            params = draw(key, share, *networks)
            starts = range(0, len(labels), batch_size)
            sums = [measure(params, images[i : i + batch_size], labels[i : i + batch_size]) for i in starts]
            jax.device_get(sums)

    return turn


def way_of_pytorch(problem: EvaluationProblem, batch_size: int = BATCH) -> Callable[[], None]:
    """Return a turn of a Python loop over mixtures and batches in PyTorch."""
    import torch
    from torch.func import functional_call
    from torch.nn import functional

    from benchmarks.pytorch_networks import TorchNetwork, to_torch

    setup, width, networks, *data, shares, _ = problem
    network = TorchNetwork(setup, width, networks[0])
    a, b = map(to_torch, networks)
    images, labels = torch.from_numpy(data[0]), torch.from_numpy(data[1]).long()

    @torch.inference_mode()
    def turn() -> None:
        for share in shares:
            half = float(share)
            mixed = {name: torch.lerp(a[name], b[name], torch.empty_like(a[name]).uniform_(0.5 - half, 0.5 + half))
                     for name in a}  # fmt: skip
            for i in range(0, len(labels), batch_size):
                logits, y = functional_call(network, mixed, (images[i : i + batch_size],)), labels[i : i + batch_size]
                functional.cross_entropy(logits, y, reduction="sum").item()
                (logits.argmax(1) == y).sum().item()

    return turn


def ways_to_multiply() -> dict[str, Callable[[], Any]]:
    """Return turns of one product of large matrices, by XLA and by NumPy."""
    matrix = np.random.default_rng(0).standard_normal((SIDE, SIDE), np.float32)
    on_device, multiply = jnp.asarray(matrix), jax.jit(jnp.matmul)
    return {"XLA": lambda: multiply(on_device, on_device).block_until_ready(), "NumPy": lambda: matrix @ matrix}


def compare(name: str, config: EvaluationConfig) -> list[TableRow]:
    """Time all ways for one network, and return their rows."""
    problem, flop = make_problem(name, config)
    ways: dict[str, Callable[[], Any]] = {"evaluate": way_of_ours(problem)}
    ways |= {f"loop, batches of {size:,}": way_of_a_loop(problem, size) for size in LOOP_BATCHES}
    if importlib.util.find_spec("torch"):
        ways["PyTorch"] = way_of_pytorch(problem)
    products = ways_to_multiply()
    seconds = dict.fromkeys((*ways, *products), float("inf"))
    for turn in range(config.rounds + 1):
        for way, run in (ways | products).items():
            start = time.perf_counter()
            run()
            if turn:  # the first turn compiles
                seconds[way] = min(seconds[way], time.perf_counter() - start)
    peak = 2 * SIDE**3 / min(seconds[way] for way in products)
    loop = min(taken for way, taken in seconds.items() if way.startswith("loop"))
    return [
        {
            "": name,
            "way": way,
            "networks × images/s": len(problem[-1]) * len(problem[4]) / seconds[way],
            "GFLOP/s": flop / seconds[way] / 1e9,
            "of the peak": flop / seconds[way] / peak,
            "against the loop": loop / seconds[way],
        }
        for way in ways
    ]


def main(config: EvaluationConfig) -> None:
    """Print the table, and write it to `--json` if given."""
    print(
        f"{describe_devices()}" + ("" if importlib.util.find_spec("torch") else "; torch is not installed"), flush=True
    )
    show([row for name in config.networks for row in compare(name, config)], config.json)


if __name__ == "__main__":
    cli.run(lambda: main(cli.parse(EvaluationConfig, __doc__ or "")))
