import pytest

from mcomb.lab.runs.barriers import barrier, barriers


def test_barriers_compare_the_worst_sample_with_the_mean_of_the_ends():
    assert barrier("loss", [[0.5, 0.9], [0.7, 0.6]], 0.2, 0.4) == pytest.approx(0.9 - 0.3)
    assert barrier("accuracy", [[0.5, 0.9], [0.7, 0.6]], 0.8, 1.0) == pytest.approx(0.9 - 0.5)


def test_every_curve_has_barriers():
    level = {split: {"loss": 0.1, "accuracy": 0.9} for split in ("train", "test")}
    curve = {split: {"loss": [[0.2], [0.3]], "accuracy": [[0.8], [0.7]]} for split in ("train", "test")}
    found = barriers([level, level], {"naive": curve, "aligned": curve})
    assert found.keys() == {"naive", "aligned"}
    assert found["naive"]["test"] == {"loss": pytest.approx(0.2), "accuracy": pytest.approx(0.2)}


def test_a_barrier_is_that_of_the_points_that_count_between_the_two_ends_given():
    ends = [{s: {"loss": loss, "accuracy": 1 - loss} for s in ("train", "test")} for loss in (0.0, 0.5)]
    curve = {s: {"loss": [[0.5], [1.0], [2.0]], "accuracy": [[0.5], [0.25], [0.0]]} for s in ("train", "test")}
    every, some = (barriers(ends, {"aligned": curve}, between) for between in (..., [True, True, False]))
    assert every["aligned"]["train"] == {"loss": 1.75, "accuracy": 0.75}
    assert some["aligned"]["train"] == {"loss": 0.75, "accuracy": 0.5}
