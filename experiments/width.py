"""The barriers of five sweeps against the width of the network.

    python -m experiments.width --setup mlp-digits
    python -m experiments.width --setup mlp-digits --widths 1 2 4

The paper: with alignment all barriers fall as the network widens, and width is necessary. It trains what networks are
missing, and reuses the sweeps that have been run.
"""

import dataclasses
from dataclasses import dataclass
from typing import Annotated

from experiments import bernoulli, hyperplane, linear, subcube, uniform
from mcomb import figures
from mcomb.base import UserError
from mcomb.cli import Flag
from mcomb.experiment import Experiment, Finding, Results, main, narrowed, run
from mcomb.results import Rows
from mcomb.workspace import Network, SweepConfig, Workspace

SWEEPS = (linear, uniform, subcube, hyperplane, bernoulli)


@dataclass(frozen=True)
class WidthConfig(SweepConfig):
    """The flags of the sweeps, and the widths to run them at."""

    widths: Annotated[tuple[int, ...], Flag("widths to compare", at_least=1)] = (1, 2, 4, 8, 16, 32)


def measure(workspace: Workspace, networks: dict[str, Network], rows: Rows) -> Results:
    """The barriers of each sweep, a list with one for each width."""
    config: WidthConfig = workspace.config  # type: ignore[assignment]
    if given := config.checkpoint_a or config.checkpoint_b:
        raise UserError(f"checkpoint {given} has one width, and this compares several: leave it out")
    found = {}
    for module in SWEEPS:
        experiment = module.EXPERIMENT
        found[experiment.name] = [
            run(experiment, narrowed(dataclasses.replace(config, width=width), experiment.config))["barriers"]
            for width in config.widths
        ]
    return {"widths": config.widths, "by_width": found}


def conclude(results: Results) -> Finding:
    """Whether every aligned barrier is lower at the largest width than at the smallest."""
    lost = {name: [at["aligned"]["test"]["accuracy"] for at in rows] for name, rows in results["by_width"].items()}
    worst = [max(values[i] for values in lost.values()) for i in (0, -1)]
    widths = results["widths"]
    return all(values[-1] < values[0] for values in lost.values()), (
        f"The largest aligned accuracy barrier of the five sweeps is {worst[0]:.1%} at width {widths[0]} and "
        f"{worst[1]:.1%} at width {widths[-1]}."
    )


EXPERIMENT = Experiment(
    name="width",
    title="barriers against width",
    claim="Barriers of aligned combinations fall as the network widens; width is a necessary condition.",
    alt="Loss and accuracy barriers of five sweeps against the width multiplier, naive and aligned.",
    networks="",
    config=WidthConfig,
    measure=measure,
    draw=figures.widths,
    conclude=conclude,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
