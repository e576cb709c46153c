"""How far an experiment has come, from its folder alone: neither networks nor data are read."""

import json
from datetime import datetime
from typing import NamedTuple

from mcomb.files import modified, read_json, read_text, unseal
from mcomb.lab.config import Config
from mcomb.lab.experiment import Experiment, is_of_paper, over_pairs, reach_verdict
from mcomb.lab.identity import flags_identity
from mcomb.lab.measure import HALVES
from mcomb.lab.results import SPLITS, row_files
from mcomb.lab.store import Store
from mcomb.lab.verdicts import verdict_words


class State(NamedTuple):
    """Whether an experiment is `done`, `begun`, `outdated` or `not run`, in a few words, and what it has found."""

    kind: str
    said: str
    agrees: bool | None = None
    finding: str | None = None
    when: str | None = None  # its results were written
    is_papers: bool = False  # whether the paper has these networks


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
            return State("outdated", "results of another version" if results else "results that are damaged")
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
        sets = (*SPLITS, *(HALVES if getattr(config, "temperatures", False) else ()))
        in_all = len(sets) * experiment.combinations(config)
        return State("begun", f"begun: {count:,} of {in_all:,} rows" if in_all else f"begun: {count:,} rows")
    return State("not run", "not run")
