"""The results of several independent pairs of networks as one: means, and the range over the pairs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mcomb.lab.runs.results import METRICS, Results
from mcomb.lab.runs.verdicts import Verdict


def pool(pairs: Sequence[Results]) -> Results:
    """The means of all numbers, and in the same form, as `least` and `largest`, their range; then each pair's own."""
    return {
        **_fold(pairs, np.mean),
        "least": _fold(pairs, np.min),
        "largest": _fold(pairs, np.max),
        "pairs": list(pairs),
    }


def _fold(values: Sequence[Any], by: Callable[[Any], Any]) -> Any:
    """One value for several of the same form: folded where they are numbers, a list of all where they differ."""
    first = values[0]
    if all(isinstance(value, dict) and value.keys() == first.keys() for value in values):
        return {key: _fold([value[key] for value in values], by) for key in first}
    if all(isinstance(value, list) and len(value) == len(first) for value in values):
        return [_fold(items, by) for items in zip(*values, strict=True)]
    if all(value == first for value in values):
        return first
    if all(isinstance(value, int | float) for value in values):
        return by(values).item()
    return list(values)


def spread(results: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The least and the largest numbers over pairs, in the form of the results; for one pair, its own twice."""
    return results.get("least", results), results.get("largest", results)


def judge_all(
    verdicts: Sequence[Verdict], results: Results, more: str, is_open: bool = False, is_papers: bool = True
) -> Verdict:
    """Agreement if every pair agrees, and the range of barriers; None if there is a pair that cannot tell.

    With `is_open`, agreement is with a question that the paper leaves open; `is_papers` says whether the paper has
    these networks.
    """
    outcomes = [verdict.agrees for verdict in verdicts]
    agrees = None if None in outcomes else all(outcomes)
    words = "answer yes" if is_open else "agree with the paper" if is_papers else "show the paper's effect"
    sentences = [f"{outcomes.count(True)} of {len(outcomes)} pairs {words}."] if {True, False} & {*outcomes} else []
    sentences += [more] if more else []
    for variant in results.get("barriers", {}):
        mean, least, largest = (part["barriers"][variant]["test"] for part in (results, *spread(results)))
        ranges = [f"{mean[m]:.3f} ({least[m]:.3f} to {largest[m]:.3f}) in {m}" for m in METRICS]
        sentences.append(f"{variant[0].upper()}{variant[1:]} test barriers are {' and '.join(ranges)}.")
    shown = outcomes.index(agrees)
    seed = results["pairs"][shown]["config"]["seed"]
    return Verdict(agrees, " ".join([*sentences, f"With --seed {seed}: {verdicts[shown].finding}"]))
