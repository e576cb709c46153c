from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from experiments import robustness
from mcomb.lab.results import SPLITS


@pytest.mark.slow
def test_rematching_more_pairs_costs_more(results, draws_pairs):
    found = results(robustness, "--counts", "3", "--line-points", "3")
    assert draws_pairs(robustness, found)
    assert list(found["layers"]) == ["dense1", "dense2", "dense3"]
    for layer in found["layers"].values():
        assert layer["k"] == [2, 17, 32]
        assert layer["units"] == len(layer["correlation"]) == 32
        assert layer["correlation"] == sorted(layer["correlation"])
        for split in SPLITS:
            loss = layer["barriers"][split]["loss"]
            assert max(loss[0], found["unperturbed"][split]["loss"]) < loss[-1]


@pytest.mark.slow
def test_a_derangement_keeps_the_activations_and_the_distribution_of_the_weights(results):
    for layer in results(robustness, "--counts", "3", "--line-points", "3")["layers"].values():
        assert layer["activations"]["alike"] is True
        assert abs(layer["activations"]["magnitude"] - 1) < 32 * np.finfo(np.float32).eps  # sums over 32 units or more
        assert layer["activations"]["distance"] < 1e-3  # the same values, but for their last bits
        assert layer["weights"]["alike"] is True


def test_samples_are_compared_by_magnitude_and_distribution():
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=20_000) for _ in range(2))
    same, wider, shifted = (robustness.compare(x, other) for other in (y, 2 * y, y + 0.5))
    assert same["alike"]
    assert abs(same["magnitude"] - 1) < 5 / np.sqrt(len(x))
    assert not wider["alike"]
    assert abs(wider["magnitude"] - 2) < 10 / np.sqrt(len(x))
    assert not shifted["alike"]
    assert robustness.compare(x, rng.permutation(x)) == {"magnitude": 1.0, "distance": 0.0, "alike": True}


def test_derangements_are_uniform_and_leave_nothing_in_place():
    rng = np.random.default_rng(0)
    count = 9000
    seen = Counter(tuple(robustness.derangement(rng, 4).tolist()) for _ in range(count))
    all_of_them = [p for p in permutations(range(4)) if all(i != x for i, x in enumerate(p))]
    assert seen.keys() == set(all_of_them)
    expected = count / len(all_of_them)
    chi_square = sum((seen[p] - expected) ** 2 / expected for p in all_of_them)
    assert chi_square < 30  # 8 degrees of freedom: beyond 30 once in 5,000 times
    assert robustness.derangement(rng, 2).tolist() == [1, 0]


def test_only_the_lowest_pairs_are_rematched():
    scores = np.array([0.9, 0.1, 0.5, 0.2, 0.8])
    order = robustness.rematch(scores, 3, np.random.default_rng(0))
    moved = np.flatnonzero(order != np.arange(5))
    assert moved.tolist() == [1, 2, 3]
    assert sorted(order.tolist()) == list(range(5))
