"""Run an experiment: reuse or measure its results, write and draw them, and print the verdict."""

import sys
import time
from dataclasses import replace
from typing import Any

from mcomb.io.fingerprints import file_fingerprint
from mcomb.io.locks import lock
from mcomb.io.paths import AnyPath, absolute, make_writable, read_json, write_json
from mcomb.lab import algorithm_versions
from mcomb.lab.cache.store import Store
from mcomb.lab.environment import environment
from mcomb.lab.flags import Config, command
from mcomb.lab.run_folders import FIGURE_RECORD, LOCK, figure_files
from mcomb.lab.runs.experiment import (
    Experiment,
    count_combinations,
    is_of_paper,
    papers_networks,
    reach_verdict,
)
from mcomb.lab.runs.measure import Run
from mcomb.lab.runs.pairs import over_pairs
from mcomb.lab.runs.results import Results, write_results
from mcomb.lab.runs.reuse import find_results, make_inputs, read_finished, result_identity
from mcomb.lab.runs.rows import Rows
from mcomb.lab.runs.verdicts import verdict_colour, verdict_words
from mcomb.lab.setups import SETUPS
from mcomb.runtime.processes import from_first
from mcomb.runtime.progress import coloured, say, show


def run(experiment: Experiment, config: Config, store: Store | None = None) -> Results:
    """Return the results of an experiment; measure, write and draw them if necessary.

    Args:
        experiment: The experiment.
        config: The flags.
        store: The store of this config; a new one by default.
    """
    start = time.monotonic()
    store, letters = store or Store(config), experiment.networks
    experiment = over_pairs(experiment, config)
    planned = experiment.parts(config)
    count_combinations(experiment, config)
    store.networks.trainings(experiment.networks)
    for letter in experiment.networks:
        store.networks.given(letter)  # errors in it, or in the flags, come before a folder is made
    folder = from_first(make_writable, store.folder(experiment.name))
    say(f"results go to {folder}")
    if config.pairs != 1 and not config.pretrained:  # the networks of all pairs side by side
        store.networks.train([part.training_of(letter) for _, part in planned.values() for letter in letters])
    parts = {name: run(*part) for name, part in planned.items()}
    networks, matchings = make_inputs(experiment, store)
    identity = result_identity(experiment, store, networks, matchings, parts)
    with lock(folder / LOCK, f"running {experiment.name} in {folder}"):
        results = from_first(read_finished, folder, identity, experiment.results)
        if results is None:
            this = Run(experiment.name, store, networks, matchings, parts, Rows(folder, identity))
            results = replace(
                experiment.measure(this),
                title=_title(experiment, config, letters, bool(planned)),
                environment=environment(),
                paper=(experiment.paper or {}).get(config.setup),
                command=command(experiment.name, config),
                durations=store.durations.seconds,
                seconds=time.monotonic() - start,
                **identity,
            )
            from_first(_draw_and_write, experiment, results, folder)
        results = from_first(add_verdict, experiment, results, folder)
    numbers = [experiment.table(results)] if results.models else []
    last = (said_verdict(results), f"figure: {figure_path(experiment.name, store)}")
    show("\n".join([results.title, *numbers, *last]))
    return results


def read_results(experiment: Experiment, config: Config, store: Store | None = None) -> Results | None:
    """Return the results of an experiment with their verdict if a run would reuse them; otherwise None."""
    store = store or Store(config)
    results = find_results(experiment, config, store)
    folder = store.folder(experiment.name)
    return results and from_first(add_verdict, over_pairs(experiment, config), results, folder)


def figure_path(experiment: str, store: Store) -> AnyPath:
    """Return the absolute path of an experiment's figure."""
    return figure_files(absolute(store.folder(experiment)), experiment)[0]


def _draw_and_write(experiment: Experiment, results: Results, folder: AnyPath) -> None:
    _draw(experiment, results, folder)
    write_results(folder, results)  # last: results that are there have their figure


def _draw(experiment: Experiment, results: Results, folder: AnyPath) -> None:
    experiment.draw(results, folder)
    write_json(folder / FIGURE_RECORD, _figure_record(experiment, folder))


def _figure_record(experiment: Experiment, folder: AnyPath) -> dict[str, Any]:
    """Return the version of the drawing code, and the fingerprint of each file; None for missing files."""
    files = figure_files(folder, experiment.name)
    return {"version": algorithm_versions.FIGURES} | {file.name: file_fingerprint(file) for file in files}


def add_verdict(experiment: Experiment, results: Results, folder: AnyPath) -> Results:
    """Return results with the paper's claim and the verdict on it; redraw their figure if a file is damaged."""
    figures = _figure_record(experiment, folder)
    if None in figures.values() or read_json(folder / FIGURE_RECORD) != figures:
        _draw(experiment, results, folder)
    agrees, finding = reach_verdict(experiment, results)
    is_papers = is_of_paper(experiment, results)
    if agrees is not None and not is_papers and not experiment.is_open and experiment.in_paper:
        finding = f"{finding} {papers_networks(experiment)}"
    return replace(
        results,
        claim=experiment.claim,
        alt=experiment.alt,
        agrees=agrees,
        finding=finding,
        is_open=experiment.is_open,
        is_papers=is_papers,
    )


def said_verdict(results: Results) -> str:
    """Format the verdict and the finding of results."""
    if results.agrees is None:
        return results.finding  # it says so itself
    words = verdict_words(results.agrees, results.is_open, results.is_papers)
    words = f"{words[0].upper()}{words[1:]}"
    words = f"{results.claim} {words}" if results.is_open else words
    return f"{coloured(words, verdict_colour(results.agrees, results.is_papers), sys.stdout)}: {results.finding}"


def _title(experiment: Experiment, config: Config, letters: str, with_parts: bool) -> str:
    with_networks = bool(letters) or with_parts
    width = f", width {config.width}" if with_networks and not experiment.varies_width else ""
    by = f", matched by {config.matcher}" if with_networks and config.matcher not in ("", "weights") else ""
    how = by + (", all groups" if config.groups == "all" else "")
    how += ", repaired" if config.repair else ""
    how += f", split {config.split}" if config.split else ""
    how += f", {' and '.join(config.frozen)} in place" if config.frozen else ""
    how += f", in {config.dtype}" if with_networks and config.dtype != "float32" else ""
    if config.pairs is None:
        how += ", pairs of A, B and C"
    elif config.pairs > 1:
        how += f", {config.pairs} {'triples' if 'C' in letters else 'pairs'}"
    return f"{SETUPS[config.setup].title}{width}{how}: {experiment.title}"
