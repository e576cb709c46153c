import numpy as np
import pytest
from results import results_of

from experiments import triangle
from mcomb.lab.runs.results import METRICS


def test_triangle_has_networks_at_corners(results, is_score, draws_pairs):
    found = results(triangle, "--grid", "4")
    assert draws_pairs(triangle, found)
    shares = np.array(found["shares"])
    assert len(shares) == 15
    for corner, letter in (([0, 0], "A"), ([1, 0], "B"), ([0, 1], "C")):
        (i,) = np.flatnonzero((shares == corner).all(1))
        for metric in METRICS:
            assert is_score(found["points"]["test"][metric][i], found["models"][letter], metric)
    accuracy, loss = (np.array(found["points"]["test"][metric]) for metric in ("accuracy", "loss"))
    best = found["best"]["index"]
    assert accuracy[best] == accuracy.max()
    assert loss[best] == loss[accuracy == accuracy.max()].min()
    assert found["best"]["shares"] == found["shares"][best]
    assert found["best"]["place"] == triangle.locate(found["shares"][best])
    assert found["best"]["place"] in found["finding"]


def test_triangle_extends_beyond_edges(results):
    found = results(triangle, "--grid", "2", "--beyond", "0.5")
    shares = np.array(found["shares"])
    assert shares.min() == -0.5
    assert (1 - shares.sum(1)).min() == -0.5
    assert len(shares) == 21  # a triangle of 5 steps


def test_triangle_counts_locations_of_best_networks():
    places = ("on an edge", "in the interior", "on an edge")
    found = [
        results_of(triangle.TriangleResults, {"best": {"shares": [], "index": 0, "place": place}}) for place in places
    ]
    assert triangle.judge_together(found) == "The best network lies 1 times in the interior, 2 times on an edge."


@pytest.mark.parametrize(
    ("shares", "place"),
    [
        ([0.0, 0.0], "at a corner"),
        ([0.0, 1.0], "at a corner"),
        ([0.5, 0.5], "on an edge"),
        ([0.0, 0.3], "on an edge"),
        ([0.2, 0.3], "in the interior"),
        ([-0.1, 0.3], "outside the triangle"),
        ([0.9, 0.3], "outside the triangle"),
    ],
)
def test_locate_names_places_on_triangle(shares, place):
    assert triangle.locate(shares) == place


@pytest.mark.parametrize("beyond", [0.0, 0.3, 1.0])
def test_count_points_equals_size_of_grid(beyond):
    assert triangle.count_points(7, beyond) == len(triangle.grid(7, beyond))


@pytest.mark.parametrize("steps", [3, 7, 20])
def test_triangle_points_have_their_shares(steps):
    """Float32 shares on an edge do not add up to exactly one."""
    places = [triangle.locate(shares) for shares in triangle.grid(steps, 0.0).tolist()]
    assert places.count("at a corner") == 3
    assert places.count("on an edge") == 3 * (steps - 1)
    assert places.count("in the interior") == (steps - 1) * (steps - 2) // 2
    assert "outside the triangle" not in places
