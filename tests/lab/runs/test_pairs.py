import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from mcomb.lab.runs.pairs import judge_all, pool
from mcomb.lab.runs.results import Curves, from_json, sides, spread, to_json
from mcomb.lab.runs.verdicts import Verdict


@dataclass(frozen=True, kw_only=True)
class Best:
    index: int
    place: str | list[str]


@dataclass(frozen=True, kw_only=True)
class Found(Curves):
    best: Best | None = None
    counts: list[Any] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


def pair(loss=0.1, place="inside", counts=(1, 2), seed=0):
    barriers = {"aligned": {"test": {"loss": loss, "accuracy": loss / 10}}}
    best = Best(index=len(counts), place=place)
    config = {"seed": seed}
    return Found(
        ends=["A", "B"], curves={}, barriers=barriers, best=best, counts=list(counts), values=[0.0, 0.5], config=config
    )


def test_pool_returns_means_ranges_and_lists():
    pairs = [pair(0.1), pair(0.2, "outside"), pair(0.6, counts=(3, 2))]
    pooled = pool(pairs)
    assert pooled.barriers["aligned"]["test"] == pytest.approx({"loss": 0.3, "accuracy": 0.03})
    assert pooled.best == Best(index=2, place=["inside", "outside", "inside"])
    assert pooled.counts == [pytest.approx(5 / 3), 2]
    assert pooled.values == [0.0, 0.5]
    assert pooled.pairs == pairs
    assert [side.barriers["aligned"]["test"]["loss"] for side in spread(pooled)] == [0.1, 0.6]
    assert sides(pooled) == (pooled, pooled.least, pooled.largest)
    assert spread(pairs[0]) == (pairs[0], pairs[0])
    assert sides(pairs[0]) == (pairs[0],)
    assert from_json(Found, json.loads(json.dumps(to_json(pooled)))) == pooled


def test_pool_keeps_lists_of_different_lengths():
    assert pool([pair(counts=(1,)), pair(counts=(1, 2))]).counts == [[1], [1, 2]]


def test_pool_drops_what_differs_between_equal_runs():
    pooled = pool([replace(pair(), title="a title", seconds=3.0, finding="It works.") for _ in range(2)])
    assert (pooled.title, pooled.seconds, pooled.finding) == ("", 0.0, "")
    assert pooled.pairs == [pair(), pair()]


@pytest.mark.parametrize(
    ("outcomes", "agrees", "shown"),
    [
        ([True, True], True, "With --seed 0: finding 0"),
        ([True, False], False, "With --seed 1: finding 1"),
        ([True, None, False], None, "With --seed 1: finding 1"),
    ],
)
def test_judge_all_requires_all_and_quotes_deciding_pair(outcomes, agrees, shown):
    verdicts = [Verdict(outcome, f"finding {i}") for i, outcome in enumerate(outcomes)]
    found = judge_all(verdicts, pool([pair(0.1 * (i + 1), seed=i) for i in range(len(outcomes))]), "And more.")
    assert found.agrees is agrees
    assert found.finding.startswith(f"{outcomes.count(True)} of {len(outcomes)} pairs agree with the paper. And more.")
    assert "Aligned test barriers are 0." in found.finding
    assert found.finding.endswith(shown)


def test_judge_all_names_seeds_of_the_deciding_pair():
    pairs = [pair(), replace(pair(), config={"seed": 0, "seed_a": None, "seed_b": 2})]
    found = judge_all([Verdict(True, "finding 0"), Verdict(False, "finding 1")], pool(pairs), "")
    assert found.finding.endswith("With --seed-b 2: finding 1")


def test_judge_all_counts_answers_to_open_question():
    verdicts = [Verdict(True, "finding 0"), Verdict(False, "finding 1")]
    results = pool([pair(seed=i) for i in range(2)])
    assert judge_all(verdicts, results, "", is_open=True).finding.startswith("1 of 2 pairs answer yes.")


def test_judge_all_counts_effects_of_other_networks():
    results = pool([pair(seed=i) for i in range(2)])
    found = judge_all([Verdict(True, ""), Verdict(False, "")], results, "", is_papers=False)
    assert found.agrees is False
    assert found.finding.startswith("1 of 2 pairs show the paper's effect.")
