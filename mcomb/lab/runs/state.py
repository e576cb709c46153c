"""How far an experiment has come, from its folders alone: neither networks nor data are read."""

import json
from dataclasses import replace
from datetime import datetime
from operator import itemgetter
from typing import NamedTuple

from mcomb.errors import UserError
from mcomb.io.paths import modified, read_json, read_text, unseal
from mcomb.lab.cache.store import Store
from mcomb.lab.flags import CHECKPOINT_FLAGS, RECIPE_FLAGS, YOUNGER_FLAGS, Config, differing_flags, identity_flags
from mcomb.lab.runs.experiment import Experiment, is_of_paper, over_pairs, reach_verdict
from mcomb.lab.runs.identity import flags_identity
from mcomb.lab.runs.measure import HALVES
from mcomb.lab.runs.results import SPLITS, Results
from mcomb.lab.runs.rows import row_files
from mcomb.lab.runs.verdicts import verdict_words
from mcomb.lab.setups import SETUPS


class State(NamedTuple):
    """Whether an experiment is `done`, `begun`, `outdated` or `not run`, in a few words, and what it has found."""

    kind: str
    said: str
    agrees: bool | None = None
    finding: str | None = None
    when: str | None = None  # its results were written
    is_papers: bool = False  # whether the paper has these networks


class OtherRun(NamedTuple):
    """A finished run of an experiment with other flags: its config, and its flags where they differ."""

    config: Config
    flags: str


def find_other_runs(experiment: Experiment, config: Config) -> list[OtherRun]:
    """Return the finished runs of an experiment, of this setup and width, with other flags.

    The run with the fewest differing flags is first, of several the newest. Runs of networks from files are left out,
    because results do not record the paths of these.
    """
    store, found = Store(config), []
    for pattern in (experiment.name, f"{experiment.name},*"):
        for path in store.folders.home.glob(f"{pattern}/results.json"):
            results = read_json(path) if path.parent != store.folder(experiment.name) else None
            own = results and _config_of(results, config)
            if own and Store(own).folder(experiment.name) == path.parent:
                flags = differing_flags(own, config)
                found.append((len(flags), -modified(path), OtherRun(own, " ".join(flags))))
    return [other for *_, other in sorted(found, key=itemgetter(0, 1))]


def _config_of(results: Results, config: Config) -> Config | None:
    """The config that results were made with, the rest as in `config`; None if they are of another version."""
    reset = dict.fromkeys((*RECIPE_FLAGS, *CHECKPOINT_FLAGS))
    reset |= {name: False for name in YOUNGER_FLAGS if name in identity_flags(config)}
    try:
        recipe, own = results["config"]["recipe"], SETUPS[config.setup].recipe
        changed = {name: recipe[name] for name in RECIPE_FLAGS if recipe[name] != getattr(own, name)}
        flags = {name: value for name, value in results["config"].items() if name != "recipe"}
        lists = {name: tuple(value) for name, value in flags.items() if isinstance(value, list)}
        return replace(config, **reset | flags | lists | changed)
    except (KeyError, TypeError, UserError):
        return None


def read_state(experiment: Experiment, config: Config) -> State:
    """How far an experiment has come with these flags.

    What else results are made from (networks, data, devices) is not looked at: if that has changed, running the
    experiment says so and measures anew.
    """
    store = Store(config)
    folder, identity = store.folder(experiment.name), flags_identity(experiment.name, store)
    if (path := folder / "results.json").is_file():
        results = read_json(path)
        if results is None or any(results.get(name) != value for name, value in identity.items()):
            return State("outdated", "results of another version" if results else "damaged results")
        agrees, finding = reach_verdict(over_pairs(experiment) if config.pairs > 1 else experiment, results)
        is_papers = is_of_paper(experiment, results)
        when = datetime.fromtimestamp(modified(path)).astimezone()
        words = verdict_words(agrees, experiment.is_open, is_papers)
        words = words.removesuffix(" with the paper").removesuffix(" the paper's effect")
        said = f"{words}, {when:%Y-%m-%d %H:%M}"
        return State("done", said, agrees, finding, when.isoformat("T", "minutes"), is_papers)
    count = 0
    for rows in row_files(folder):
        header, *lines = read_text(rows).splitlines() or [""]
        of_these = header.startswith(json.dumps(identity)[:-1])  # networks and all that come after
        count += sum(unseal(line) is not None for line in lines) if of_these else 0
    if count:
        sets = (*SPLITS, *(HALVES if config.temperatures else ()))
        in_all = len(sets) * experiment.combinations(config)
        return State("begun", f"begun: {count:,} of {in_all:,} rows" if in_all else f"begun: {count:,} rows")
    return State("not run", "not run")
