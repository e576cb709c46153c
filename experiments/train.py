"""Train networks with several seeds side by side, and cache them for the experiments.

    python -m experiments.train --setup mlp-cifar10 --seeds 0 1 2

Each network trains on its own devices. If there are fewer networks than devices, each network trains data-parallel on
an equal share of the devices. A CPU has one device for each core.
"""

from dataclasses import dataclass
from typing import Annotated

from mcomb import score
from mcomb.io.paths import absolute
from mcomb.keys import LARGEST_SEED
from mcomb.lab import cli
from mcomb.lab.cache.store import Store
from mcomb.lab.cli import Flag
from mcomb.lab.flags import TrainingConfig
from mcomb.lab.runs.command import parse_and_join, print_plan
from mcomb.lab.runs.plan import Job
from mcomb.lab.training.train import Training
from mcomb.runtime.progress import say, show, show_json


@dataclass(frozen=True)
class TrainConfig(TrainingConfig):
    """Flags of `train`."""

    seeds: Annotated[tuple[int, ...], Flag("seeds of the networks", 0, LARGEST_SEED)] = (0, 1)


def main(argv: list[str] | None = None) -> None:
    """Train the networks and print their test accuracy and loss."""
    config = parse_and_join(TrainConfig, __doc__, argv)
    store, trainings = Store(config), [Training(seed) for seed in config.seeds]
    if config.plan:
        return print_plan([Job("train", store, trainings)])
    folder = store.folders.networks
    say(f"networks go to {folder}")
    trained = {}
    for network in store.networks.train(trainings).values():
        test = score(store.apply, network.params, *store.data.test)
        examples = len(store.data.test.labels)
        show(f"{network.name}: test accuracy {test.accuracy:.2%}, test loss {test.loss:.4f} on {examples:,} examples")
        path = str(absolute(folder / network.name))
        trained[network.name] = {"path": path, "accuracy": test.accuracy, "loss": test.loss, "examples": examples}
    show_json({"networks": trained})


if __name__ == "__main__":
    cli.run(main)
