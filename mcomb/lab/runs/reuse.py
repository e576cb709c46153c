"""Decide whether a result is reused: only if all its inputs are unchanged.

`find_results` looks up the results that a run would reuse. `read_state` reads the progress of a run from its folder
alone, and `find_other_runs` lists finished runs with other flags.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from operator import itemgetter
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from mcomb.errors import UserError
from mcomb.io.paths import AnyPath, modified, read_text, unseal
from mcomb.lab import algorithm_versions
from mcomb.lab.cache.matchings import KeptMatching, MatchingKey
from mcomb.lab.cache.networks import Network, NotKeptError
from mcomb.lab.cache.store import Store
from mcomb.lab.flags import (
    CHECKPOINT_FLAGS,
    RECIPE_FLAGS,
    YOUNGER_FLAGS,
    Config,
    differing_flags,
    identity_flags,
    recipe_dict,
)
from mcomb.lab.run_folders import RESULTS
from mcomb.lab.runs.experiment import Experiment, is_of_paper, reach_verdict
from mcomb.lab.runs.pairs import over_pairs
from mcomb.lab.runs.results import SPLITS, Identity, LayoutError, Results, read_results
from mcomb.lab.runs.rows import row_files
from mcomb.lab.runs.temperatures import HALVES
from mcomb.lab.runs.verdicts import verdict_words
from mcomb.lab.setups import SETUPS
from mcomb.runtime.devices import describe_devices
from mcomb.runtime.processes import from_first
from mcomb.runtime.progress import warn

R = TypeVar("R", bound=Results)


class RunState(NamedTuple):
    """The progress of a run in a few words, and its finding."""

    kind: str  # `done`, `begun`, `outdated`, `not run`, or `impossible` with these flags
    said: str
    agrees: bool | None = None
    finding: str | None = None
    when: str | None = None  # its results were written
    is_papers: bool = False  # whether the paper has these networks


class OtherRun(NamedTuple):
    """A finished run of an experiment with other flags: its config, and its flags where they differ."""

    config: Config
    flags: str


@dataclass(frozen=True)
class Finished(Generic[R]):
    """The results in a folder. A run reuses them if they are `current`; otherwise `why_not` is the reason."""

    kind: Literal["current", "outdated", "missing"]
    results: R | None = None
    why_not: str = ""


def flags_identity(experiment: str, config: Config) -> Identity:
    """Return the part of the identity that the flags and the version determine, without reading networks."""
    chosen = {name: getattr(config, name) for name in identity_flags(config)}
    for name in (*RECIPE_FLAGS, *CHECKPOINT_FLAGS, *(name for name in YOUNGER_FLAGS if name in chosen)):
        if chosen[name] == YOUNGER_FLAGS.get(name, chosen[name]):
            del chosen[name]
    identity = {
        "experiment": experiment,
        "config": chosen | {"recipe": recipe_dict(config)},
        "version": algorithm_versions.MEASUREMENT,
    }
    return json.loads(json.dumps(identity, default=str))


def result_identity(
    experiment: Experiment,
    store: Store,
    networks: Mapping[str, Network],
    matchings: Mapping[MatchingKey, KeptMatching],
    parts: Mapping[str, Results],
) -> Identity:
    """Return the identity of a result, which contains all its inputs."""
    identity = flags_identity(experiment.name, store.config) | {
        "networks": {letter: network.fingerprint for letter, network in networks.items()},
        "matchings": {str(key): kept.fingerprint for key, kept in matchings.items()},
        "parts": {name: identity_hash(results) for name, results in parts.items()},
    }
    if networks:
        # Code compiled for another kind or number of devices may round differently.
        data = store.data_fingerprint + experiment.extra_data(store.config)
        identity |= {"data": data, "devices": describe_devices()}
    return json.loads(json.dumps(identity, default=str))


def identity_hash(results: Results) -> str:
    """Return a short hash of the identity of results."""
    names = ("experiment", "config", "version", "networks", "matchings", "parts", "data", "devices")
    text = json.dumps({name: getattr(results, name) for name in names}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def make_inputs(
    experiment: Experiment, store: Store, make: bool = True
) -> tuple[dict[str, Network], dict[MatchingKey, KeptMatching]]:
    """Return an experiment's networks and matchings; make missing ones, or raise NotKeptError."""
    networks = store.networks.get(experiment.networks, make)
    if not networks:
        return {}, {}
    return networks, {key: store.matchings.get(networks, key, make) for key in experiment.matchings(store.config)}


def examine(folder: AnyPath, identity: Identity, kind: type[R]) -> Finished[R]:
    """Compare the results in a folder with an identity."""
    path = folder / RESULTS
    if not path.is_file():
        return Finished("missing")
    try:
        results = read_results(path, kind)
    except LayoutError as error:
        return Finished("outdated", None, f"has an older layout ({error})")
    if results is None:
        return Finished("outdated", None, "is damaged or has no digest")
    if changed := [name for name, value in identity.items() if getattr(results, name) != value]:
        return Finished("outdated", results, f"was made from other {', '.join(changed)}")
    return Finished("current", results)


def read_finished(folder: AnyPath, identity: Identity, kind: type[R], tell: bool = True) -> R | None:
    """Return the results in a folder if their identity is unchanged; otherwise print what has changed."""
    found = examine(folder, identity, kind)
    if found.kind == "outdated" and tell:
        warn(f"{folder / RESULTS} {found.why_not}: measuring again")
    return found.results if found.kind == "current" else None


def find_results(experiment: Experiment, config: Config, store: Store | None = None) -> Results | None:
    """Return the results that a run with these flags would reuse, without a verdict; otherwise None."""
    store, experiment = store or Store(config), over_pairs(experiment, config)
    parts: dict[str, Results] = {}
    for name, part in experiment.parts(config).items():
        results = find_results(*part)
        if results is None:
            return None
        parts[name] = results
    folder = store.folder(experiment.name)
    if not from_first((folder / RESULTS).is_file):  # no need to read networks
        return None
    try:
        networks, matchings = make_inputs(experiment, store, make=False)
    except NotKeptError:
        return None
    identity = result_identity(experiment, store, networks, matchings, parts)
    return from_first(read_finished, folder, identity, experiment.results, tell=False)


def read_state(experiment: Experiment, config: Config) -> RunState:
    """Return the progress of an experiment with these flags, from its folder alone.

    Networks, data and devices are not compared: if they changed, the experiment says so and measures again.
    """
    folder, identity = Store(config).folder(experiment.name), flags_identity(experiment.name, config)
    found = examine(folder, identity, experiment.results)
    if found.kind == "outdated":
        return RunState("outdated", "results of another version" if found.results else "old or damaged results")
    if results := found.results:
        agrees, finding = reach_verdict(over_pairs(experiment, config), results)
        is_papers = is_of_paper(experiment, results)
        when = datetime.fromtimestamp(modified(folder / RESULTS)).astimezone()
        words = verdict_words(agrees, experiment.is_open, is_papers)
        words = words.removesuffix(" with the paper").removesuffix(" the paper's effect")
        said = f"{words}, {when:%Y-%m-%d %H:%M}"
        return RunState("done", said, agrees, finding, when.isoformat("T", "minutes"), is_papers)
    if count := _count_rows(folder, identity):
        sets = (*SPLITS, *(HALVES if config.temperatures else ()))
        in_all = len(sets) * experiment.combinations(config)
        return RunState("begun", f"begun: {count:,} of {in_all:,} rows" if in_all else f"begun: {count:,} rows")
    return RunState("not run", "not run")


def _count_rows(folder: AnyPath, identity: Identity) -> int:
    """Count the rows in a folder that were measured with these flags."""
    count = 0
    for rows in row_files(folder):
        header, *lines = read_text(rows).splitlines() or [""]
        of_these = header.startswith(json.dumps(identity)[:-1])  # networks and the rest of the identity come after
        count += sum(unseal(line) is not None for line in lines) if of_these else 0
    return count


def find_other_runs(experiment: Experiment, config: Config) -> list[OtherRun]:
    """Return the finished runs of an experiment, of this setup and width, with other flags.

    Runs with fewer differing flags come first, then newer ones. Runs of networks from files are omitted, because
    results do not record the paths of the files.
    """
    store, found = Store(config), []
    folder = store.folder(experiment.name)
    for pattern in (experiment.name, f"{experiment.name},*"):
        for path in store.folders.home.glob(f"{pattern}/{RESULTS}"):
            own = _config_of(path, experiment.results, config) if path.parent != folder else None
            if own and Store(own).folder(experiment.name) == path.parent:
                flags = differing_flags(own, config)
                found.append((len(flags), -modified(path), OtherRun(own, " ".join(flags))))
    return [other for *_, other in sorted(found, key=itemgetter(0, 1))]


def _config_of(path: AnyPath, kind: type[Results], config: Config) -> Config | None:
    """Return the config of results, completed from `config`; None if the results are damaged or old."""
    reset: dict[str, Any] = dict.fromkeys((*RECIPE_FLAGS, *CHECKPOINT_FLAGS))
    reset |= {name: value for name, value in YOUNGER_FLAGS.items() if name in identity_flags(config)}
    try:
        results = read_results(path, kind)
        if results is None:
            return None
        recipe, own = results.config["recipe"], SETUPS[config.setup].recipe
        changed = {name: recipe[name] for name in RECIPE_FLAGS if recipe[name] != getattr(own, name)}
        flags = {name: value for name, value in results.config.items() if name != "recipe"}
        lists = {name: tuple(value) for name, value in flags.items() if isinstance(value, list)}
        return replace(config, **reset | flags | lists | changed)
    except (LayoutError, KeyError, TypeError, UserError):
        return None
