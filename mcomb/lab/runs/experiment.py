"""Define experiments: their networks, measurements, figures and verdicts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mcomb.combination import Distribution, Draw
from mcomb.errors import UserError
from mcomb.io.paths import AnyPath
from mcomb.lab import cli, figures
from mcomb.lab.cache.matchings import B_TO_A, MatchingKey
from mcomb.lab.flags import Config, LineConfig, SweepConfig, convert_config
from mcomb.lab.runs.measure import Run
from mcomb.lab.runs.results import SPLITS, VARIANTS, Paper, Results, SweepResults, table
from mcomb.lab.runs.verdicts import Verdict, judge_sweep, why_no_verdict
from mcomb.lab.setups import SETUPS

Parts = Mapping[str, tuple["Experiment", Config]]
"""Experiments, by name, that provide results for another experiment."""

MOST = 10**7  # combinations of one experiment: more would take years, and all memory at once
COUNT_FLAGS = ("points", "samples", "grid", "beyond", "scatter", "counts", "line_points")  # these give the number


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """An experiment: the networks it needs, and the functions that measure, draw and judge its results."""

    name: str
    title: str
    claim: str  # the paper's finding or open question
    alt: str  # alternative text of the figure
    measure: Callable[[Run], Results]
    draw: Callable[[Any, AnyPath], None]
    judge: Callable[[Any], Verdict]  # takes results of trained and matched networks
    results: type[Results]
    config: type[Config] = Config
    networks: str = "AB"
    is_open: bool = False  # whether the claim is an open question of the paper
    varies_width: bool = False  # whether its parts have several widths
    combinations: Callable[[Any], int] = lambda config: 0  # number of evaluations on each split
    matchings: Callable[[Any], Sequence[MatchingKey]] = lambda config: (B_TO_A,)
    parts: Callable[[Any], Parts] = lambda config: {}
    extra_data: Callable[[Any], str] = lambda config: ""  # the fingerprint of data that the setup does not have
    table: Callable[[Any], str] = table
    paper: Mapping[str, Paper] | None = None  # by setup
    in_paper: Mapping[str, tuple[int, ...]] = field(  # the widths of the paper's networks, by setup
        default_factory=lambda: {"resnet20-cifar10": (32,), "tiny10-cifar10": (32,)}
    )
    judge_together: Callable[[list[Any]], str] = lambda pairs: ""  # a sentence about several pairs


def sweep_experiment(
    *,
    parameter: str,
    label: str,
    values: tuple[float, float],
    combine: Distribution | Draw,
    draw: Callable[[Any, AnyPath], None] = figures.draw_sweep,
    judge: Callable[[Any], Verdict] = judge_sweep,
    config: type[LineConfig] = SweepConfig,
    **rest: Any,
) -> Experiment:
    """Create an experiment that combines A with B while a parameter goes from the first to the last of `values`."""

    def combinations(config: LineConfig) -> int:
        return len(VARIANTS) * config.points * config.samples

    def measure(run: Run) -> SweepResults:
        first, last = run.config.range or values
        points = np.linspace(first, last, run.config.points)
        between = (points >= values[0]) & (points <= values[1])  # beyond these there is no barrier to speak of
        return run.measure_pair(combine, parameter, label, points, between)

    how: Any = {"measure": measure, "combinations": combinations, "draw": draw, "judge": judge, "config": config}
    return Experiment(results=SweepResults, **how, **rest)


def count_combinations(experiment: Experiment, config: Config) -> int:
    """Return the number of combinations on each split; raise UserError if it is too large for any machine."""
    count = experiment.combinations(config)
    if count > MOST:
        named = (name.replace("_", "-") for name in COUNT_FLAGS if name in cli.flags(type(config)))
        raise UserError(f"{count:,} combinations exceed the limit of {MOST:,}: reduce --{', --'.join(named)}.")
    return count


def idle_flags(experiment: Experiment, config: Config) -> dict[str, str]:
    """Return the flags without effect, each with the reason."""
    found: dict[str, str] = {}
    if not any("C" in part.networks for part in (experiment, *(part for part, _ in experiment.parts(config).values()))):
        why = f"has no effect because {experiment.name} uses no network C: remove it"
        found |= {name: why for name in ("seed_c", "checkpoint_c") if getattr(config, name) is not None}
    if config.groups != "permutations" and not (experiment.networks or experiment.parts(config)):
        found["groups"] = f"has no effect because {experiment.name} aligns no networks: remove it"
    for split, count in zip(SPLITS, SETUPS[config.setup].dataset.count(), strict=True):
        if (config.evaluation_examples[split] or 0) > count:
            found[f"{split}_examples"] = f"exceeds the {count:,} {split} examples: use fewer"
    if config.temperatures and experiment.parts(config):
        found["temperatures"] = f"has no effect because {experiment.name} measures no curves: remove it"
    return found


def config_of(experiment: Experiment, config: Config, **changes: Any) -> Any:
    """Convert a config to this experiment, apply the changes, and drop flags without effect."""
    own = convert_config(config, experiment.config, **changes)
    idle: dict[str, Any] = {name: getattr(experiment.config, name) for name in idle_flags(experiment, own)}
    return replace(own, **idle)


def reach_verdict(experiment: Experiment, results: Results) -> Verdict:
    """Return the verdict on the paper's claim, or the reason why there is none."""
    reason = None if results.pairs else why_no_verdict(results)
    return Verdict(None, reason) if reason else experiment.judge(results)


def is_of_paper(experiment: Experiment, results: Results) -> bool:
    """Return whether results have the paper's setup and width; only then can they agree with the paper."""
    return {*results.measured_widths} <= {*experiment.in_paper.get(results.config["setup"], ())}


def papers_networks(experiment: Experiment) -> str:
    """Return a sentence that lists the paper's networks for an experiment, with any barriers it reports."""
    each = []
    for setup, widths in experiment.in_paper.items():
        paper = (experiment.paper or {}).get(setup)
        lost = f" (barriers of {paper.loss:.3f} in loss and {paper.accuracy:.1%} in accuracy)" if paper else ""
        at = f"width {widths[0]}" if len(widths) == 1 else f"widths {widths[0]} to {widths[-1]}"
        each.append(f"{SETUPS[setup].title} at {at}{lost}")
    return f"The paper measures {' and '.join(each)}."
