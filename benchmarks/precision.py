"""Compare losses, accuracies and barriers of the same combinations in float32 and bfloat16.

    python -m benchmarks.precision                      # networks are trained: a minute on two CPU cores
    python -m benchmarks.precision --setups mlp-cifar10 --pretrained --images 2000 --samples 2

The networks compute in float32 or in bfloat16; parameters, losses and statistics are float32. The benchmark measures
the paper's barriers on the first `--images` train images, for the line and for shares that are uniform on [0, 1].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np

from benchmarks.tables import TableRow, show
from mcomb.combination import Draw, linear, uniform
from mcomb.evaluation.barriers import barrier
from mcomb.evaluation.evaluate import Metrics, evaluate, score
from mcomb.keys import stream
from mcomb.lab import cli
from mcomb.lab.cache.store import Store
from mcomb.lab.cli import Flag
from mcomb.lab.flags import DTYPES, Config
from mcomb.lab.runs.results import METRICS
from mcomb.lab.setups import SETUPS


@dataclass(frozen=True)
class PrecisionConfig:
    """Flags of the benchmark."""

    setups: Annotated[tuple[str, ...], Flag("which networks", choices=tuple(SETUPS))] = ("mlp-digits",)
    width: Annotated[int, Flag("width multiplier", at_least=1)] = 32
    epochs: Annotated[int | None, Flag("training epochs [setup]", at_least=0)] = None
    pretrained: Annotated[bool, Flag("use the networks of the repository")] = False
    points: Annotated[int, Flag("points of the line", at_least=3)] = 9
    samples: Annotated[int, Flag("combinations with uniform shares", at_least=1)] = 9
    images: Annotated[int | None, Flag("train examples to evaluate on (default: all)", at_least=1)] = None
    data_dir: Annotated[
        Path | None, Flag("CIFAR-10's archive or folder (default: $MCOMB_DATA_DIR, else downloaded)")
    ] = None
    out: Annotated[Path, Flag("root folder of trained networks")] = Path("runs")
    json: Annotated[Path | None, Flag("JSON file for the table")] = None


def compare(name: str, config: PrecisionConfig) -> list[TableRow]:
    """Evaluate the networks of one setup in both dtypes, and return the rows."""
    chosen: dict[str, Any] = {key: getattr(config, key) for key in ("width", "epochs", "pretrained", "data_dir", "out")}
    store = Store(Config(setup=name, **chosen))
    networks = store.networks.get("AB")
    aligned = store.permute(networks["B"], store.matchings.get(networks).matching)
    a, data = networks["A"].params, store.data.train.first(config.images)
    sweeps: dict[str, tuple[Draw, np.ndarray]] = {
        "linear": (linear, np.linspace(0, 1, config.points, dtype=np.float32)),
        "uniform": (uniform, np.full(config.samples, 0.5, np.float32)),
    }
    rows: list[TableRow] = []
    for sweep, (draw, values) in sweeps.items():
        keys = jax.random.split(stream(0, sweep), len(values))
        for variant, b in {"naive": networks["B"].params, "aligned": aligned}.items():
            found = {}
            for dtype in DTYPES:
                apply = store.setup.apply(config.width, dtype)
                ends = [score(apply, params, *data) for params in (a, b)]
                found[dtype] = evaluate(apply, (a, b), *data, draw, values, keys), ends
            rows += [{"": f"{name}, {sweep}", "variant": variant, **changes(metric, found)} for metric in METRICS]
    return rows


def changes(metric: str, found: Mapping[str, tuple[Metrics, list[Metrics]]]) -> TableRow:
    """Return the barriers of a metric, and the changes of barrier, combinations and networks."""
    combinations = [getattr(measured, metric) for measured, _ in found.values()]
    networks = [np.array([getattr(one, metric) for one in ends]) for _, ends in found.values()]
    barriers = [barrier(metric, values, *ends) for values, ends in zip(combinations, networks, strict=True)]
    return {
        "metric": metric,
        **{f"barrier, {dtype}": value for dtype, value in zip(found, barriers, strict=True)},
        "change": barriers[1] - barriers[0],
        "of any combination": float(np.abs(combinations[1] - combinations[0]).max()),
        "of A and B": float(np.abs(networks[1] - networks[0]).max()),
    }


def main(config: PrecisionConfig) -> None:
    """Print the table, and write it to `--json` if given."""
    show([row for name in config.setups for row in compare(name, config)], config.json)


if __name__ == "__main__":
    cli.run(lambda: main(cli.parse(PrecisionConfig, __doc__ or "")))
