import json

import pytest

from mcomb.lab.runs.pairs import judge_all, pool
from mcomb.lab.runs.results import spread
from mcomb.lab.runs.verdicts import Verdict


def pair(loss, place="inside", counts=(1, 2)):
    barrier = {"test": {"loss": loss, "accuracy": loss / 10}}
    return {"barriers": {"aligned": barrier}, "place": place, "counts": list(counts), "values": [0.0, 0.5]}


def test_pool_returns_means_ranges_and_lists():
    pairs = [pair(0.1), pair(0.2, "outside"), pair(0.6, counts=(3, 2))]
    pooled = pool(pairs)
    assert pooled["barriers"]["aligned"]["test"] == pytest.approx({"loss": 0.3, "accuracy": 0.03})
    assert pooled["place"] == ["inside", "outside", "inside"]
    assert pooled["counts"] == [pytest.approx(5 / 3), 2]
    assert pooled["values"] == [0.0, 0.5]
    assert pooled["pairs"] == pairs
    least, largest = spread(pooled)
    assert [side["barriers"]["aligned"]["test"]["loss"] for side in (least, largest)] == [0.1, 0.6]
    assert spread(pairs[0]) == (pairs[0], pairs[0])
    assert json.loads(json.dumps(pooled)) == pooled


def test_pool_keeps_lists_of_different_lengths():
    assert pool([{"x": [1.0]}, {"x": [1.0, 2.0]}])["x"] == [[1.0], [1.0, 2.0]]


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
    found = judge_all(
        verdicts, pool([pair(0.1 * (i + 1)) | {"config": {"seed": i}} for i in range(len(outcomes))]), "And more."
    )
    assert found.agrees is agrees
    assert found.finding.startswith(f"{outcomes.count(True)} of {len(outcomes)} pairs agree with the paper. And more.")
    assert "Aligned test barriers are 0." in found.finding
    assert found.finding.endswith(shown)


def test_judge_all_counts_answers_to_open_question():
    verdicts = [Verdict(True, "finding 0"), Verdict(False, "finding 1")]
    results = pool([pair(0.1) | {"config": {"seed": i}} for i in range(2)])
    assert judge_all(verdicts, results, "", is_open=True).finding.startswith("1 of 2 pairs answer yes.")


def test_judge_all_counts_effects_of_other_networks():
    results = pool([pair(0.1) | {"config": {"seed": i}} for i in range(2)])
    found = judge_all([Verdict(True, ""), Verdict(False, "")], results, "", is_papers=False)
    assert found.agrees is False
    assert found.finding.startswith("1 of 2 pairs show the paper's effect.")
