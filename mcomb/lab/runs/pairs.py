"""Run an experiment on several pairs of networks (`--pairs`): means, and the range over the pairs."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from mcomb.errors import UserError
from mcomb.lab.flags import SEED_FLAGS, Config, flag_words
from mcomb.lab.runs.experiment import Experiment, Parts, is_of_paper, reach_verdict
from mcomb.lab.runs.results import METRICS, Results, barriers_of, fold, spread, without_origin
from mcomb.lab.runs.verdicts import Verdict, why_no_verdict

R = TypeVar("R", bound=Results)

ORDERS = ("ABC", "ACB", "BCA")  # of `--pairs abc`: the networks that take the places of A, B and C


def over_pairs(experiment: Experiment, config: Config) -> Experiment:
    """Return the experiment itself, or with `--pairs` the one that runs it on each pair and pools the results."""
    if config.pairs == 1:
        return experiment

    def each_pair(config: Config) -> Parts:
        seeded = [shlex.join(flag_words(config, name)) for name in SEED_FLAGS if getattr(config, name) is not None]
        given = [*config.given_networks, *seeded]
        if config.pairs is None:
            given = [words for words in config.given_networks if words != "--pretrained"]
        if given:
            pairs = shlex.join(flag_words(config, "pairs"))
            raise UserError(f"{pairs} chooses its own networks: remove --pairs or {given[0]}.")
        if config.pairs is None:
            return {"".join(order[:2]): (experiment, _reorder(experiment, config, order)) for order in ORDERS}
        seeds = range(config.seed, config.seed + config.pairs)
        return {f"seed {seed}": (experiment, replace(config, seed=seed, pairs=1)) for seed in seeds}

    def judge_pairs(results: Results) -> Verdict:
        verdicts = [reach_verdict(experiment, pair) for pair in results.pairs]
        fit = not any(map(why_no_verdict, results.pairs))
        more = experiment.judge_together(results.pairs) if fit else ""
        return judge_all(verdicts, results, more, experiment.is_open, is_of_paper(experiment, results))

    return replace(
        experiment,
        networks="",
        matchings=lambda config: (),
        combinations=lambda config: 0,
        parts=each_pair,
        measure=lambda run: pool(list(run.parts.values())),
        judge=judge_pairs,
    )


def _reorder(experiment: Experiment, config: Config, order: Sequence[str]) -> Config:
    """Return the config of one pair, in which these networks take the places of A, B and C."""
    places = zip(experiment.networks or "AB", order, strict=False)
    moved: dict[str, Any] = {f"seed_{place.lower()}": config.seed_of(x) for place, x in places if place != x}
    return replace(config, pairs=1, **moved)


def pool(pairs: Sequence[R]) -> R:
    """Return the means of all numbers, their range as `least` and `largest`, and the results of each pair."""
    own = [without_origin(results) for results in pairs]
    return replace(fold(own, np.mean), least=fold(own, np.min), largest=fold(own, np.max), pairs=own)


def judge_all(
    verdicts: Sequence[Verdict], results: Results, more: str, is_open: bool = False, is_papers: bool = True
) -> Verdict:
    """Return agreement if every pair agrees, and the range of barriers; no verdict if one pair has none.

    Args:
        verdicts: The verdict of each pair.
        results: The pooled results.
        more: An additional sentence for the finding.
        is_open: Whether the claim is an open question of the paper.
        is_papers: Whether the paper has these networks.
    """
    outcomes = [verdict.agrees for verdict in verdicts]
    agrees = None if None in outcomes else all(outcomes)
    words = "answer yes" if is_open else "agree with the paper" if is_papers else "show the paper's effect"
    sentences = [f"{outcomes.count(True)} of {len(outcomes)} pairs {words}."] if {True, False} & {*outcomes} else []
    sentences += [more] if more else []
    for variant in barriers_of(results):
        mean, least, largest = (barriers_of(part)[variant]["test"] for part in (results, *spread(results)))
        ranges = [f"{mean[m]:.3f} ({least[m]:.3f} to {largest[m]:.3f}) in {m}" for m in METRICS]
        sentences.append(f"{variant[0].upper()}{variant[1:]} test barriers are {' and '.join(ranges)}.")
    shown = outcomes.index(agrees)
    config = results.pairs[shown].config
    seeds = {name: config[name] for name in SEED_FLAGS if config.get(name) is not None}
    chosen = (f"--{name.replace('_', '-')} {seed}" for name, seed in (seeds or {"seed": config["seed"]}).items())
    return Verdict(agrees, " ".join([*sentences, f"With {' '.join(chosen)}: {verdicts[shown].finding}"]))
