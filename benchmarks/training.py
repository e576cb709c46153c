"""Compare the training speed of mcomb, plain XLA, and PyTorch if torch is installed.

    python -m benchmarks.training                                       # two minutes on two CPU cores
    python -m benchmarks.training --setups resnet20-cifar10 --widths 4

`before` is one network on one device, compiled by XLA with its default settings; on CPU, its threads use all cores.
`data-parallel` is one network on all devices. `side by side` is one network on each device, and its rate is the total.
All ways take the same steps: SGD with momentum and weight decay on batches of the setup's size, without augmentation.
PyTorch has the same weights and uses all cores for one network. The benchmark first checks that both compute the same
logits. The ways take turns, and the fastest of `--rounds` turns counts. The CPU seconds of a step depend less on other
load than the rate, if `--torch-threads 1` keeps PyTorch's threads from waiting for each other.
"""

import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Event
from typing import Annotated, Any
from unittest import mock

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.random_data import random_data
from mcomb.keys import stream
from mcomb.lab import cli
from mcomb.lab.cli import Flag
from mcomb.lab.setups import SETUPS, Setup
from mcomb.lab.tables import columns
from mcomb.lab.training.side_by_side import run_side_by_side
from mcomb.lab.training.train import call_for_gradient
from mcomb.runtime import training_loop as gradient_descent
from mcomb.runtime.devices import describe_devices, device_mesh, meshes_of
from mcomb.runtime.training_loop import Loss, fit, initial_state, steps_per_call
from mcomb.trees import Apply, Params

RATE, MOMENTUM, DECAY = 0.01, 0.9, 1e-4
OPTIMIZER = optax.chain(optax.add_decayed_weights(DECAY), optax.sgd(RATE, momentum=MOMENTUM))


@dataclass(frozen=True)
class TrainingSpeedConfig:
    """Flags of the benchmark."""

    setups: Annotated[tuple[str, ...], Flag("setups to train", choices=tuple(SETUPS))] = (
        "tiny10-cifar10",
        "resnet20-cifar10",
    )
    widths: Annotated[tuple[int, ...], Flag("width multipliers", at_least=1)] = (1, 2)
    steps: Annotated[int, Flag("batches in a turn", at_least=1)] = 5
    rounds: Annotated[int, Flag("turns of each implementation", at_least=1)] = 3
    torch_threads: Annotated[int | None, Flag("threads of PyTorch (default: all cores)", at_least=1)] = None


def plain_loss(apply: Apply) -> Loss:
    """Return the training loss, the mean cross-entropy, without augmentation."""

    def loss(params: Params, rows: Any, data: Any, key: Any) -> tuple[Any, None]:
        images, labels = data
        with nn.intercept_methods(call_for_gradient):
            logits = apply(params, images[rows])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels[rows])
        return jnp.mean(losses, where=(rows >= 0).reshape(-1, *[1] * (losses.ndim - 1))), None

    return loss


def ways_of_ours(setup: Setup, width: int, steps: int, data: Any) -> dict[str, tuple[int, Callable[[], None]]]:
    """Return, for each way, the number of networks that it trains at once, and a turn."""
    params, loss, size = setup.init(width, 0), plain_loss(setup.apply(width)), setup.recipe.batch_size
    per_call = min(steps, steps_per_call(params, steps))
    rows = np.random.default_rng(0).integers(0, len(data[1]), (per_call, size)).astype(np.int32)

    def training(mesh: Any) -> Iterator[Any]:
        def endless() -> Iterator[Any]:
            while True:
                yield rows, data

        return fit(loss, initial_state(params, OPTIMIZER), endless(), OPTIMIZER, stream(0), mesh)

    def turn(training: Iterator[Any]) -> None:
        for _ in range(0, steps, per_call):
            next(training)

    def turn_of_all(trainings: list[Iterator[Any]]) -> None:
        def work(training: Iterator[Any], stop: Event) -> None:
            turn(training)

        run_side_by_side(work, trainings)

    before, parallel, each = training(meshes_of(1)[0]), training(device_mesh()), list(map(training, meshes_of(1)))
    with mock.patch.object(gradient_descent, "_can_be_tuned", return_value=False):
        next(before)  # compiles while tuning is disabled
    return {
        "before": (1, lambda: turn(before)),
        "data-parallel": (1, lambda: turn(parallel)),
        "side by side": (len(each), lambda: turn_of_all(each)),
    }


def way_of_pytorch(setup: Setup, width: int, steps: int, data: Any, threads: int | None) -> Callable[[], None]:
    """Return a turn of training in PyTorch from the same weights."""
    import torch
    from torch.nn import functional

    from benchmarks.pytorch_networks import TorchNetwork

    network = TorchNetwork(setup, width, setup.init(width, 0))
    if threads:
        torch.set_num_threads(threads)
    images, labels = torch.from_numpy(data[0]), torch.from_numpy(data[1]).long()
    optimizer = torch.optim.SGD(network.parameters(), RATE, momentum=MOMENTUM, weight_decay=DECAY)
    rows = torch.from_numpy(np.random.default_rng(0).integers(0, len(labels), (steps, setup.recipe.batch_size)))

    def turn() -> None:
        for batch in rows:
            optimizer.zero_grad()
            logits = network(images[batch])
            functional.cross_entropy(logits.flatten(0, -2), labels[batch].flatten()).backward()
            optimizer.step()

    return turn


def main(config: TrainingSpeedConfig) -> None:
    """Print a table for each setup and width."""
    has_torch = importlib.util.find_spec("torch") is not None
    print(f"{describe_devices()}, examples/s" + ("" if has_torch else "; torch is not installed"), flush=True)
    rows = [("", "width", "way", "networks", "examples/s", "against before", "CPU s/step")]
    for name, width in ((name, width) for name in config.setups for width in config.widths):
        setup = SETUPS[name]
        data = random_data(setup, 10 * setup.recipe.batch_size)
        ways = ways_of_ours(setup, width, config.steps, data)
        if has_torch:
            ways["PyTorch"] = (1, way_of_pytorch(setup, width, config.steps, data, config.torch_threads))
        seconds: dict[str, float] = {}
        cpu: dict[str, float] = {}
        for turn in range(config.rounds + 1):
            for way, (_, run) in ways.items():
                start, cpu_start = time.perf_counter(), time.process_time()
                run()
                if turn:  # the first turn compiles
                    seconds[way] = min(seconds.get(way, float("inf")), time.perf_counter() - start)
                    cpu[way] = min(cpu.get(way, float("inf")), time.process_time() - cpu_start)
        for way, (networks, _) in ways.items():
            rate = networks * config.steps * setup.recipe.batch_size / seconds[way]
            base = config.steps * setup.recipe.batch_size / seconds["before"]
            each = cpu[way] / networks / config.steps
            rows.append((name, str(width), way, str(networks), f"{rate:.0f}", f"{rate / base:.2f}", f"{each:.3f}"))
        print(columns(rows), flush=True)
        rows = rows[:1]


if __name__ == "__main__":
    cli.run(lambda: main(cli.parse(TrainingSpeedConfig, __doc__ or "")))
