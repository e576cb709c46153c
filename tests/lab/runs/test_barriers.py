import pytest

from mcomb.lab.runs.barriers import barrier, barriers


def test_barrier_compares_worst_sample_with_mean_of_ends():
    assert barrier("loss", [[0.5, 0.9], [0.7, 0.6]], 0.2, 0.4) == pytest.approx(0.9 - 0.3)
    assert barrier("accuracy", [[0.5, 0.9], [0.7, 0.6]], 0.8, 1.0) == pytest.approx(0.9 - 0.5)


def test_barriers_exist_for_every_curve():
    level = {split: {"loss": 0.1, "accuracy": 0.9} for split in ("train", "test")}
    curve = {split: {"loss": [[0.2], [0.3]], "accuracy": [[0.8], [0.7]]} for split in ("train", "test")}
    found = barriers([level, level], {"naive": curve, "aligned": curve})
    assert found.keys() == {"naive", "aligned"}
    assert found["naive"]["test"] == {"loss": pytest.approx(0.2), "accuracy": pytest.approx(0.2)}


def test_barrier_uses_selected_points_and_given_ends():
    ends = [{s: {"loss": loss, "accuracy": 1 - loss} for s in ("train", "test")} for loss in (0.0, 0.5)]
    curve = {s: {"loss": [[0.5], [1.0], [2.0]], "accuracy": [[0.5], [0.25], [0.0]]} for s in ("train", "test")}
    every, some = (barriers(ends, {"aligned": curve}, between) for between in (..., [True, True, False]))
    assert every["aligned"]["train"] == {"loss": 1.75, "accuracy": 0.75}
    assert some["aligned"]["train"] == {"loss": 0.75, "accuracy": 0.5}
