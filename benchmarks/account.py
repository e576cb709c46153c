"""Report the memory that compiled programs need, at sizes that are too large to run here.

    python -m benchmarks.account                         # ResNet-20 at width 32: two minutes of compiling
    python -m benchmarks.account --setup tiny10-cifar10 --width 8

The benchmark compiles programs and runs none, because XLA knows the sizes of all buffers after compilation.
`arguments` are networks, state and examples. The devices of one CPU share a single copy of them, unless they are
donated. `temporary` are all intermediate arrays, on each device. Convolutions may need more memory while they run:
`benchmarks.memory` measures the memory of a running process.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.derivation import Shape
from benchmarks.tables import TableRow, show
from mcomb.combination import mix, uniform
from mcomb.evaluation import evaluate
from mcomb.evaluation.objectives import accuracy, cross_entropy
from mcomb.lab import cli
from mcomb.lab.cache.matchings import MATCHING_EXAMPLES
from mcomb.lab.cli import Flag
from mcomb.lab.setups import SETUPS
from mcomb.matching import activations, straight_through
from mcomb.runtime.batching import BATCH
from mcomb.runtime.devices import COMBINATIONS, describe_devices, device_mesh, two_axis_mesh
from mcomb.runtime.training_loop import initial_state, lower_call

HERE = PartitionSpec()
TASKS = ("evaluation", "activations", "ste")


@dataclass(frozen=True)
class AccountConfig:
    """Flags of the benchmark."""

    tasks: Annotated[tuple[str, ...], Flag("which programs", choices=TASKS)] = TASKS
    setup: Annotated[str, Flag("which networks", choices=tuple(SETUPS))] = "resnet20-cifar10"
    width: Annotated[int, Flag("width multiplier", at_least=1)] = 32
    images: Annotated[tuple[int, ...], Flag("examples on a device at once, in evaluation", at_least=1)] = (
        64,
        BATCH,
    )
    json: Annotated[Path | None, Flag("JSON file for the table")] = None


def on(mesh: Mesh, tree: Any, spec: PartitionSpec = HERE) -> Any:
    """Place the shapes of a tree on the devices of a mesh."""
    return jax.tree.map(lambda leaf: Shape(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)), tree)


def account(task: str, config: AccountConfig) -> list[TableRow]:
    """Return the memory that the programs of a task need; matchers have their default settings."""
    setup, devices, mesh = SETUPS[config.setup], len(jax.devices()), device_mesh()
    shapes, apply = setup.shapes(config.width), setup.apply(config.width)
    size = sum(leaf.size * 4 for leaf in jax.tree.leaves(shapes))

    def data(count: int) -> tuple[Any, Any]:
        return Shape((count, *setup.dataset.shape), jnp.uint8), Shape((count,), jnp.int32)

    def lower_evaluation(images: int) -> Any:
        grid, (pixels, labels) = two_axis_mesh(devices), data(2 * images)
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), devices))
        shared = on(grid, ((shapes, shapes), pixels, labels))
        own = on(grid, (Shape((devices,), jnp.float32), keys), PartitionSpec(COMBINATIONS))
        return evaluate._evaluate.lower(
            apply, mix(uniform), images, grid, (("loss", cross_entropy), ("accuracy", accuracy)), *shared, *own
        )

    def lower_activations(images: int) -> Any:
        spec, pixels = setup.spec(config.width), data(MATCHING_EXAMPLES)[0]
        return activations._compare.lower(apply, spec, images, False, mesh, *on(mesh, (shapes, shapes, pixels)))

    def lower_step(images: int) -> Any:
        optimizer, loss = straight_through._optimizer(0.01), straight_through._midpoint_loss(apply)
        state = jax.eval_shape(lambda params: initial_state(params, optimizer), shapes)
        given = (shapes, shapes, *data(MATCHING_EXAMPLES))
        return lower_call(loss, state, 1, images * devices, given, optimizer, mesh)

    lower: Callable[[int], Any]
    sizes: tuple[int, ...]
    lower, sizes = {
        "evaluation": (lower_evaluation, config.images),
        "activations": (lower_activations, (BATCH,)),
        "ste": (lower_step, (-(-straight_through.BATCH_SIZE // devices),)),
    }[task]
    rows: list[TableRow] = []
    for images in sizes:
        needs = lower(images).compile().memory_analysis()
        rows.append(
            {
                "": task,
                "images at once": images,
                "parameters, GB": size / 1e9,
                "arguments, GB": needs.argument_size_in_bytes / 1e9,
                "temporary, GB": needs.temp_size_in_bytes / 1e9,
                "temporary, × parameters": needs.temp_size_in_bytes / size,
            }
        )
    return rows


def main(config: AccountConfig) -> None:
    """Print the table, and write it to `--json` if given."""
    print(describe_devices(), flush=True)
    show([row for task in config.tasks for row in account(task, config)], config.json)


if __name__ == "__main__":
    cli.run(lambda: main(cli.parse(AccountConfig, __doc__ or "")))
