import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_close, assert_equal
from results import results_of

from experiments import landscape
from mcomb.combination import blend, combine
from mcomb.errors import UserError
from mcomb.lab import cli
from mcomb.lab.runs.results import METRICS, SPLITS, from_json

FLAGS = ("--grid", "2", "--scatter", "3")


@pytest.fixture(scope="module")
def trees():
    """Two networks, random shares that stand for learned ones, and their combination."""
    rng = np.random.default_rng(0)
    shapes = {"w": (40, 50), "v": (50, 20)}
    a, b = ({name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()} for _ in range(2))
    shares = {name: rng.uniform(0.1, 0.9, shape).astype(np.float32) for name, shape in shapes.items()}
    return a, b, shares, combine(a, b, shares)


def at(place, a, b, learned):
    return blend(jax.random.key(0), jnp.asarray(landscape.as_shares(np.array([place]))[0]), a, b, learned)


def test_slice_contains_networks_midpoint_and_learned(trees):
    a, b, shares, learned = trees
    assert_close(at((0, 0), a, b, learned), a, roundings=4)
    assert_close(at((1, 0), a, b, learned), b, roundings=4)
    assert_close(at((0.5, 0), a, b, learned), combine(a, b, 0.5), roundings=4)
    assert_close(at((0.5, 1), a, b, learned), learned, roundings=4)
    there = {name: 0.3 + 1.5 * (share - 0.5) for name, share in shares.items()}
    assert_close(at((0.3, 1.5), a, b, learned), combine(a, b, there), roundings=8)


@pytest.mark.parametrize("steps", [2, 3, 6])
def test_slice_axes_contain_marks_and_margin(steps):
    x, y = landscape.slice_axes(steps)
    assert {0, 0.5, 1} < {*x}
    assert {0, 1} < {*y}
    for axis, step in ((x, 1 / (2 * steps)), (y, 1 / steps)):
        assert axis[0] < 0
        assert axis[-1] > 1
        np.testing.assert_allclose(np.diff(axis), step)


@pytest.mark.slow
@pytest.mark.parametrize("place", [(0.4, 0.8), (0.5, 0.0), (0.05, -0.4)])
def test_random_shares_have_slice_shares_as_means(trees, place):
    _, _, shares, _ = trees
    place = jnp.array(place)
    for kind in landscape.KINDS.values():
        draws = [landscape.random_shares(kind)(jax.random.key(i), place, shares)["w"] for i in range(200)]
        expected = np.clip(place[0] + place[1] * (shares["w"] - 0.5), 0, 1)
        # Shares have a standard deviation of at most ½. Five standard errors occur once in two million times.
        assert np.abs(np.mean(draws, axis=0) - expected).max() < 5 * 0.5 / np.sqrt(len(draws))
        assert np.min(draws) >= 0
        assert np.max(draws) <= 1
    assert {*np.unique(draws)} == {0, 1}


def test_project_inverts_slice_and_averages_random_shares(trees):
    _, _, shares, _ = trees
    places = np.array([(0.5, 0.0), (0.3, 0.7), (0.6, -0.3)], np.float32)
    keys = jax.random.split(jax.random.key(0), len(places))

    def on_the_slice(key, place, shares):
        return jax.tree.map(lambda share: place[0] + place[1] * (share - 0.5), shares)

    assert_close(landscape.project(on_the_slice, keys, places, shares), places, roundings=256)
    deviation = np.std(np.concatenate([np.ravel(share) for share in shares.values()]))
    chance = 5 * 0.5 / np.sqrt(3000) / deviation
    for kind in landscape.KINDS.values():
        found = landscape.project(landscape.random_shares(kind), keys, places, shares)
        assert np.abs(found - places).max() < chance
    nothing = jax.tree.map(lambda share: np.full_like(share, 0.5), shares)  # learned shares equal the midpoint
    found = landscape.project(landscape.random_shares(landscape.corner), keys, places, nothing)
    assert np.abs(found - places * (1, 0)).max() < 5 * 0.5 / np.sqrt(3000)


def test_random_network_combines_with_random_shares(trees):
    a, b, shares, _ = trees
    key, place = jax.random.key(1), jnp.array([0.5, 0.5])
    network = landscape.random_network(landscape.corner)(key, place, a, b, shares)
    drawn = landscape.random_shares(landscape.corner)(key, place, shares)
    assert_equal(network, {name: np.where(drawn[name] == 1, b[name], a[name]) for name in a})


def test_landscape_rejects_one_share_per_network():
    with pytest.raises(UserError, match="network"):
        cli.parse(landscape.LandscapeConfig, "", ["--per", "network"])


def test_judge_together_counts_pairs_beaten_by_learned():
    def pair(loss, accuracy):
        models = {letter: {"test": {"loss": 0.1, "accuracy": 0.9}} for letter in "AB"}
        found = {"learned": {"test": {"loss": loss, "accuracy": accuracy}}}
        return results_of(landscape.LandscapeResults, {"models": models, "found": found})

    said = landscape.judge_together([pair(0.05, 0.9), pair(0.08, 0.95), pair(0.2, 0.8)])
    assert said.endswith("beat both networks in test loss for 2 of 3 pairs and in test accuracy for 1 of 3 pairs.")


@pytest.mark.slow
@pytest.mark.parametrize("per", ["weight", "layer"])
def test_learned_shares_beat_midpoint_on_train_examples(per, results, is_score, draws_pairs):
    found = results(landscape, *FLAGS, "--per", per)
    assert draws_pairs(landscape, found)
    x, y = found["slice"]["x"], found["slice"]["y"]
    for metric in METRICS:
        values = np.array(found["slice"]["test"][metric])
        assert values.shape == (len(y), len(x))
        for letter, at_x in (("A", 0.0), ("B", 1.0)):
            assert is_score(values[y.index(0), x.index(at_x)], found["models"][letter], metric)
        assert values[y.index(1), x.index(0.5)] == found["found"]["learned"]["test"][metric]
        assert values[y.index(0), x.index(0.5)] == found["found"]["midpoint"]["test"][metric]
    for name in ("", "naive "):
        learned, midpoint = (found["found"][f"{name}{mark}"]["train"]["loss"] for mark in ("learned", "midpoint"))
        assert learned < midpoint
    for name, sample in found["samples"].items():
        assert len(sample["places"]) == 3
        best = found["found"][f"best {name}"]
        i = int(np.argmin(sample["train"]["loss"]))
        assert all(best[split][m] == sample[split][m][i] for split in SPLITS for m in METRICS)
    losses = found["held_out_losses"]["aligned"]
    assert min(losses) < losses[0]
    rows = landscape.table(from_json(landscape.LandscapeResults, found)).splitlines()
    assert [row.split("  ")[0].strip() for row in rows[1:]] == ["network A", "network B", *found["found"]]
