"""An experiment from its flags to its results, its figure and its verdict."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import jax
import jaxlib
import numpy as np

from mcomb.combination import Distribution, Draw
from mcomb.errors import UserError
from mcomb.io.fingerprints import code_fingerprint, file_fingerprint, fingerprint
from mcomb.io.locks import lock
from mcomb.io.paths import AnyPath, absolute, make_writable, read_json, write_json
from mcomb.lab import cli, figures, versions
from mcomb.lab.cache.matchings import B_TO_A, KeptMatching, MatchingKey
from mcomb.lab.cache.networks import Network, NotKeptError
from mcomb.lab.cache.store import Store
from mcomb.lab.environment import environment
from mcomb.lab.flags import (
    CHECKPOINT_FLAGS,
    Config,
    LineConfig,
    SweepConfig,
    TrainingConfig,
    command,
    convert_config,
    flag_words,
)
from mcomb.lab.runs import plan
from mcomb.lab.runs.identity import read_finished, result_identity
from mcomb.lab.runs.measure import Run
from mcomb.lab.runs.pairs import judge_all, pool
from mcomb.lab.runs.plan import Job
from mcomb.lab.runs.results import SPLITS, VARIANTS, Results, table
from mcomb.lab.runs.rows import Rows
from mcomb.lab.runs.verdicts import Verdict, judge_sweep, verdict_colour, verdict_words, why_no_verdict
from mcomb.lab.setups import SETUPS
from mcomb.runtime.processes import from_first, join, require_agreement
from mcomb.runtime.progress import coloured, say, show, show_json

T = TypeVar("T", bound=TrainingConfig)

Parts = Mapping[str, tuple["Experiment", Config]]
"""Other experiments, by name, whose results one is built on."""

EXPERIMENTS = Path(__file__).parents[3] / "experiments"  # in a clone; elsewhere they are a part of this package

FIGURES = ".figures.json"  # in a result's folder: what its figure's files should be, and the version that drew them

MOST = 10**7  # combinations of one experiment: more would take years, and all memory at once
COUNT_FLAGS = ("points", "samples", "grid", "beyond", "scatter", "counts", "line_points")  # these give the number

VERDICT = ("claim", "alt", "agrees", "finding", "is_open", "is_papers")  # of results, added when they are read


@dataclass(frozen=True)
class Paper:
    """The barriers that the paper gives for a setup, at the width it gives them for."""

    loss: float
    accuracy: float
    width: int = 32


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What an experiment needs, measures, draws and concludes; everything else is the same for all of them."""

    name: str
    title: str
    claim: str  # what the paper found, or asks
    alt: str  # what the figure shows, for those who cannot see it
    measure: Callable[[Run], Results]
    draw: Callable[[Results, AnyPath], None]
    judge: Callable[[Results], Verdict]  # of results of trained and matched networks
    config: type[Config] = Config
    networks: str = "AB"
    is_open: bool = False  # whether the claim is a question that the paper leaves open
    varies_width: bool = False  # over parts of several widths
    combinations: Callable[[Any], int] = lambda config: 0  # how many are evaluated, on each split
    matchings: Callable[[Any], Sequence[MatchingKey]] = lambda config: (B_TO_A,)
    parts: Callable[[Any], Parts] = lambda config: {}
    table: Callable[[Results], str] = table
    paper: Mapping[str, Paper] | None = None  # by setup
    in_paper: Mapping[str, tuple[int, ...]] = field(  # the widths of the paper's networks, by setup
        default_factory=lambda: {"resnet20-cifar10": (32,), "tiny10-cifar10": (32,)}
    )
    judge_together: Callable[[list[Results]], str] = lambda pairs: ""  # a sentence more on several pairs' results


def over_pairs(experiment: Experiment) -> Experiment:
    """The same experiment of several pairs: it runs each by itself and draws and judges them together."""

    def each_pair(config: Config) -> Parts:
        for name in (*CHECKPOINT_FLAGS, "pretrained", "seed_a", "seed_b", "seed_c"):
            value = getattr(config, name)
            if value is not None and value is not False:
                given = " ".join(flag_words(config, name))
                raise UserError(f"--pairs {config.pairs} trains its own networks: remove --pairs or {given}.")
        seeds = range(config.seed, config.seed + config.pairs)
        return {f"seed {seed}": (experiment, replace(config, seed=seed, pairs=1)) for seed in seeds}

    def judge_pairs(results: Results) -> Verdict:
        verdicts = [reach_verdict(experiment, pair) for pair in results["pairs"]]
        fit = not any(map(why_no_verdict, results["pairs"]))
        more = experiment.judge_together(results["pairs"]) if fit else ""
        return judge_all(verdicts, results, more, experiment.is_open, is_of_paper(experiment, results))

    return replace(
        experiment,
        networks="",
        matchings=lambda config: (),
        combinations=lambda config: 0,
        parts=each_pair,
        measure=lambda run: pool([_measured(results) for results in run.parts.values()]),
        judge=judge_pairs,
    )


def run(experiment: Experiment, config: Config) -> Results:
    """The results of an experiment, measured where they are not yet, left in the run's folder and drawn."""
    start = time.monotonic()
    store = Store(config)
    letters = experiment.networks
    if config.pairs > 1:
        experiment = over_pairs(experiment)
    planned = experiment.parts(config)
    count_combinations(experiment, config)
    store.networks.trainings(experiment.networks)
    for letter in experiment.networks:
        store.networks.given(letter)  # what is wrong with it, or with the flags, is said before a folder is made
    folder = from_first(make_writable, store.folder(experiment.name))
    say(f"results go to {folder}")
    if config.pairs > 1:  # the networks of all pairs side by side
        store.networks.train([part.training_of(letter) for _, part in planned.values() for letter in letters])
    parts = {name: run(*part) for name, part in planned.items()}
    networks, matchings = _networks_and_matchings(experiment, store)
    identity = result_identity(experiment.name, store, networks, matchings, parts)
    with lock(folder / ".lock", f"running {experiment.name} in {folder}"):
        results = from_first(read_finished, folder, identity)
        if results is None:
            this = Run(experiment.name, store, networks, matchings, parts, Rows(folder, identity))
            measured = (this.basics if networks else {}) | experiment.measure(this)
            paper = (experiment.paper or {}).get(config.setup)
            results = {
                "title": _title(experiment, config, letters, bool(planned)),
                **measured,
                **identity,
                "environment": environment(),
                "paper": paper and vars(paper),
                "command": command(experiment.name, config),
                "durations": store.durations.seconds,
                "seconds": time.monotonic() - start,
            }
            from_first(_leave, experiment, results, folder)
        results = from_first(add_verdict, experiment, results, folder)
    numbers = [experiment.table(results)] if "models" in results else []
    last = (said_verdict(results), f"figure: {figure_path(experiment.name, store)}")
    show("\n".join([results["title"], *numbers, *last]))
    return results


def figure_path(experiment: str, store: Store) -> AnyPath:
    """Where an experiment's figure is, from the root of all folders on."""
    return absolute(store.folder(experiment)) / f"{experiment}.png"


def said_verdict(results: Results) -> str:
    """The verdict and the finding of results, for a person."""
    agrees, finding = results["agrees"], results["finding"]
    if agrees is None:
        return finding  # it says so itself
    words = verdict_words(agrees, results["is_open"], results["is_papers"])
    words = f"{results['claim']} {words.capitalize()}" if results["is_open"] else words
    return f"{coloured(words, verdict_colour(agrees, results['is_papers']), sys.stdout)}: {finding}"


def _leave(experiment: Experiment, results: Results, folder: AnyPath) -> None:
    _draw(experiment, results, folder)
    write_json(folder / "results.json", results)  # last: results that are there have their figure


def _draw(experiment: Experiment, results: Results, folder: AnyPath) -> None:
    experiment.draw(results, folder)
    write_json(folder / FIGURES, _figures(experiment, folder))


def _figures(experiment: Experiment, folder: AnyPath) -> dict[str, Any]:
    """The version that draws figures, and the fingerprint of each file of one, None where it is missing."""
    names = (f"{experiment.name}.{kind}" for kind in ("png", "pdf"))
    return {"version": versions.FIGURES} | {name: file_fingerprint(folder / name) for name in names}


def read_results(experiment: Experiment, config: Config) -> Results | None:
    """The results of an experiment, if it has been run with this config and nothing that made them has changed."""
    if config.pairs > 1:
        experiment = over_pairs(experiment)
    try:
        store = Store(config)
        parts: dict[str, Results] = {}
        for name, part in experiment.parts(config).items():
            results = read_results(*part)
            if results is None:
                return None
            parts[name] = results
        folder = store.folder(experiment.name)
        if not from_first((folder / "results.json").is_file):  # a look at the networks would be for nothing
            return None
        identity = result_identity(
            experiment.name, store, *_networks_and_matchings(experiment, store, make=False), parts
        )
    except NotKeptError:
        return None
    results = from_first(read_finished, folder, identity, tell=False)
    return results and from_first(add_verdict, experiment, results, folder)


def _networks_and_matchings(
    experiment: Experiment, store: Store, make: bool = True
) -> tuple[dict[str, Network], dict[MatchingKey, KeptMatching]]:
    """Return the networks by letter and the matchings by key, made where they are missing if `make` says so."""
    networks = store.networks.get(experiment.networks, make)
    if not networks:
        return {}, {}
    matchings = {}
    for key in experiment.matchings(store.config):
        matchings[key] = store.matchings.get(networks, key, make)
    return networks, matchings


def list_jobs(experiment: Experiment, config: Config) -> Iterator[Job]:
    """What an experiment and its parts need, and whether their results are there."""
    kept = read_results(experiment, config) is not None
    if config.pairs > 1:
        experiment = over_pairs(experiment)
    for part in experiment.parts(config).values():
        yield from list_jobs(*part)
    store, letters = Store(config), experiment.networks
    given = {letter: network.name for letter in letters if (network := store.networks.given(letter))}
    yield Job(
        experiment.name,
        store,
        trainings=list(store.networks.trainings(letters).values()),
        given=list(given.values()),
        matchings=experiment.matchings(config) if letters else (),
        combinations=count_combinations(experiment, config),
        kept=kept,
    )


def count_combinations(experiment: Experiment, config: Config) -> int:
    """How many combinations are evaluated on each split; an error if no machine could."""
    count = experiment.combinations(config)
    if count > MOST:
        named = (name.replace("_", "-") for name in COUNT_FLAGS if name in cli.flags(type(config)))
        raise UserError(f"{count:,} combinations exceed the limit of {MOST:,}: reduce --{', --'.join(named)}.")
    return count


def _title(experiment: Experiment, config: Config, letters: str, with_parts: bool) -> str:
    with_networks = bool(letters) or with_parts
    width = f", width {config.width}" if with_networks and not experiment.varies_width else ""
    by = f", matched by {config.matcher}" if with_networks and config.matcher not in ("", "weights") else ""
    how = by + (", repaired" if config.repair else "")
    how += f", split {config.split}" if config.split else ""
    how += f", in {config.dtype}" if with_networks and config.dtype != "float32" else ""
    how += f", {config.pairs} {'triples' if 'C' in letters else 'pairs'}" if config.pairs > 1 else ""
    return f"{SETUPS[config.setup].title}{width}{how}: {experiment.title}"


def add_verdict(experiment: Experiment, results: Results, folder: AnyPath) -> Results:
    """Results with what the paper found and what they say of it; their figure is drawn if it is not whole."""
    figures = _figures(experiment, folder)
    if None in figures.values() or read_json(folder / FIGURES) != figures:
        _draw(experiment, results, folder)
    agrees, finding = reach_verdict(experiment, results)
    is_papers = is_of_paper(experiment, results)
    if agrees is not None and not is_papers and not experiment.is_open and experiment.in_paper:
        finding = f"{finding} {papers_networks(experiment)}"
    verdict = (experiment.claim, experiment.alt, agrees, finding, experiment.is_open, is_papers)
    return results | dict(zip(VERDICT, verdict, strict=True))


def reach_verdict(experiment: Experiment, results: Results) -> Verdict:
    """Whether results show what the paper found, and why."""
    reason = None if "pairs" in results else why_no_verdict(results)
    return Verdict(None, reason) if reason else experiment.judge(results)


def is_of_paper(experiment: Experiment, results: Results) -> bool:
    """Return whether results are of the paper's setup and width: only these can agree with the paper."""
    config = results.get("config", {})
    widths = results.get("widths") or [config.get("width")]
    return {*widths} <= {*experiment.in_paper.get(config.get("setup"), ())}


def papers_networks(experiment: Experiment) -> str:
    """Return a sentence on the networks that the paper has in an experiment, with its barriers if it gives some."""
    each = []
    for setup, widths in experiment.in_paper.items():
        paper = (experiment.paper or {}).get(setup)
        lost = f" (barriers of {paper.loss:.3f} in loss and {paper.accuracy:.1%} in accuracy)" if paper else ""
        at = f"width {widths[0]}" if len(widths) == 1 else f"widths {widths[0]} to {widths[-1]}"
        each.append(f"{SETUPS[setup].title} at {at}{lost}")
    return f"The paper measures {' and '.join(each)}."


def _measured(results: Results) -> Results:
    """Results without what each run has of its own: when, by which command and for how long it was run."""
    others = ("title", "version", "networks", "matchings", "parts", "environment", "command", "durations", "seconds")
    older = ("recalibrated",)  # at temperatures that were fitted on train images: nobody reads it any more
    return {name: value for name, value in results.items() if name not in (*others, *older, *VERDICT)}


def sweep(
    *,
    parameter: str,
    label: str,
    values: tuple[float, float],
    combine: Distribution | Draw,
    draw: Callable[[Results, AnyPath], None] = figures.sweep,
    judge: Callable[[Results], Verdict] = judge_sweep,
    config: type[LineConfig] = SweepConfig,
    **rest: Any,
) -> Experiment:
    """An experiment that varies a parameter from the first to the last of `values` and combines A with B at each."""

    def combinations(config: LineConfig) -> int:
        return len(VARIANTS) * config.points * config.samples

    def measure(run: Run) -> Results:
        first, last = run.config.range or values
        points = np.linspace(first, last, run.config.points)
        between = (points >= values[0]) & (points <= values[1])  # beyond these there is no barrier to speak of
        return run.measure_pair(combine, parameter, label, points, between)

    how: Any = {"measure": measure, "combinations": combinations, "draw": draw, "judge": judge, "config": config}
    return Experiment(**how, **rest)


def idle_flags(experiment: Experiment, config: Config) -> dict[str, str]:
    """The flags that would change nothing, each with the reason."""
    found: dict[str, str] = {}
    if not any("C" in part.networks for part in (experiment, *(part for part, _ in experiment.parts(config).values()))):
        why = f"has no effect because {experiment.name} uses no network C: remove it"
        found |= {name: why for name in ("seed_c", "checkpoint_c") if getattr(config, name) is not None}
    for split, count in zip(SPLITS, SETUPS[config.setup].dataset.images, strict=True):
        if (config.images[split] or 0) > count:
            found[f"{split}_images"] = f"exceeds the {count:,} {split} images: use fewer"
    if config.temperatures and experiment.parts(config):
        found["temperatures"] = f"has no effect because {experiment.name} measures no curves: remove it"
    return found


def config_of(experiment: Experiment, config: Config, **changes: Any) -> Any:
    """A config of this experiment with what another has, and then the changes, but for flags that change nothing."""
    own = convert_config(config, experiment.config, **changes)
    idle: dict[str, Any] = {name: getattr(experiment.config, name) for name in idle_flags(experiment, own)}
    return replace(own, **idle)


def setups_help() -> str:
    """The recipes of the setups, for the end of a program's help."""
    lines = []
    for name, setup in SETUPS.items():
        recipe = setup.recipe
        lines.append(
            f"  {name:18}{recipe.epochs} epochs, batch {recipe.batch_size}, "
            f"learning rate {recipe.learning_rate:g}, weight decay {recipe.weight_decay:g}"
        )
        lines += [f"{'':20}{setup.expect}"] if setup.expect else []
    return "\n".join(["setups:", *lines])


def parse_and_join(config: type[T], description: str | None, argv: list[str] | None) -> T:
    """The config that the command line asks for, after this process has joined those that it is to run with."""
    parsed = cli.parse(config, description or "", argv, setups_help())
    if parsed.distributed or parsed.coordinator or parsed.processes or parsed.process is not None:
        join(parsed.coordinator, parsed.processes, parsed.process)
        # Images may be in different places: they are compared once they are read.
        require_agreement("flags", command("…", replace(parsed, data_dir=None)))
        files = {path.name: np.frombuffer(path.read_bytes(), np.uint8) for path in EXPERIMENTS.glob("*.py")}
        require_agreement("code", f"{code_fingerprint()}-{fingerprint(files)}")
        require_agreement("versions", f"jax {jax.__version__}, jaxlib {jaxlib.__version__}")
    return parsed


def main(experiment: Experiment, description: str | None, argv: list[str] | None = None) -> None:
    """The command line of an experiment."""

    def plan_or_run() -> None:
        config = parse_and_join(experiment.config, description, argv)
        for name, why in idle_flags(experiment, config).items():
            raise UserError(f"{' '.join(flag_words(config, name))} {why}.")
        if config.plan:
            print_plan(list_jobs(experiment, config))
        else:
            show_json(located(experiment.name, config, run(experiment, config)))

    cli.run(plan_or_run)


def print_plan(jobs: Iterable[Job]) -> None:
    """Print what would be done and what it takes."""
    steps = plan.plan_steps(jobs)
    show(plan.table(steps))
    show_json({"steps": [step._asdict() for step in steps], "all": plan.total(steps)._asdict()})


def located(experiment: str, config: Config, results: Results) -> Results:
    """Results with the paths of their folder and of their figure."""
    store = Store(config)
    figure = figure_path(experiment, store)
    return results | {"folder": str(figure.parent), "figures": [str(figure), str(figure.with_suffix(".pdf"))]}
