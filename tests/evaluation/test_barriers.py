import pytest

from mcomb.evaluation.barriers import barrier


def test_barrier_compares_worst_sample_with_mean_of_ends():
    assert barrier("loss", [[0.5, 0.9], [0.7, 0.6]], 0.2, 0.4) == pytest.approx(0.9 - 0.3)
    assert barrier("accuracy", [[0.5, 0.9], [0.7, 0.6]], 0.8, 1.0) == pytest.approx(0.9 - 0.5)
