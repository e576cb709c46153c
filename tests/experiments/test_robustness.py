from collections import Counter
from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pytest
from results import results_of

from experiments import robustness
from mcomb.errors import UserError
from mcomb.lab import cli
from mcomb.lab.cache.store import Store
from mcomb.lab.runs.pairs import pool
from mcomb.lab.runs.results import METRICS, SPLITS, from_json


@pytest.mark.slow
def test_robustness_barrier_grows_with_rematched_pairs(results, draws_pairs):
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
def test_derangement_preserves_distributions(results):
    for layer in results(robustness, "--counts", "3", "--line-points", "3")["layers"].values():
        assert layer["activations"]["alike"] is True
        assert abs(layer["activations"]["magnitude"] - 1) < 32 * np.finfo(np.float32).eps  # sums over 32 units or more
        assert layer["activations"]["distance"] < 1e-3  # equal except for the last bits
        assert layer["weights"]["alike"] is True


@pytest.mark.slow
def test_robustness_compares_measures_on_same_lines(results, draws_pairs):
    flags = ("--counts", "3", "--line-points", "3")
    found = results(robustness, *flags, "--by", "random", "variance", "fisher", "norm", "correlation")
    assert draws_pairs(robustness, found)
    assert list(found["extra"]) == [*robustness.MEASURES]
    alone = results(robustness, *flags)
    for name, layer in found["layers"].items():
        assert layer["barriers"] == layer["by"]["correlation"] == alone["layers"][name]["barriers"]
        assert len({tuple(curve["test"]["loss"]) for curve in layer["by"].values()}) == len(robustness.MEASURES)
    for measure, split in ((measure, split) for measure in robustness.MEASURES for split in SPLITS):
        for metric in METRICS:
            below = [layer["by"][measure][split][metric][:-1] for layer in found["layers"].values()]
            expected = np.mean(below) - found["unperturbed"][split][metric]
            assert found["extra"][measure][split][metric] == pytest.approx(expected)
    assert alone["agrees"] == found["agrees"]
    own, of_paper = alone["finding"].split(" The paper measures ")
    assert found["finding"].startswith(own)
    assert found["finding"].endswith(of_paper)
    assert all(f"{measure} 0." in found["finding"] for measure in robustness.MEASURES)
    *_, head, _, norm, _, _, _ = robustness.table(from_json(robustness.RobustnessResults, found)).splitlines()
    assert head.startswith("barrier increase by")
    assert norm.split() == ["norm", *(f"{found['extra']['norm'][s][m]:.4f}" for m in METRICS for s in SPLITS)]


@pytest.fixture(scope="module")
def a_run():
    """A run with untrained networks in which the third unit of the second layer is dead."""
    store = Store(cli.parse(robustness.RobustnessConfig, "", ["--setup", "mlp-digits", "--width", "1"]))
    networks = [store.setup.init(1, seed) for seed in (0, 1)]
    for params in networks:
        params["dense2"]["kernel"] = params["dense2"]["kernel"].at[:, 3].set(0)
        params["dense3"]["kernel"] = params["dense3"]["kernel"].at[3].set(0)
    run = SimpleNamespace(store=store, config=store.config, splits={"train": store.data.train.first(20)})
    return run, *networks


@pytest.mark.parametrize("measure", [name for name in robustness.MEASURES if name != "random"])
def test_measures_rank_dead_unit_lowest(measure, a_run):
    scores = robustness.MEASURES[measure](*a_run)
    assert {perm: len(values) for perm, values in scores.items()} == a_run[0].store.spec.sizes
    assert scores["dense2"][3] == 0
    others = np.delete(scores["dense2"], 3)
    assert measure == "correlation" or (others >= 0).all()
    assert np.count_nonzero(others) > len(others) / 2


def test_measures_use_both_units_of_pair(a_run):
    run, a, b = a_run
    for name in ("norm", "fisher", "variance"):
        both, one, other = (robustness.MEASURES[name](run, *pair)["dense1"] for pair in ((a, b), (a, a), (b, b)))
        power = 2 if name == "norm" else 1
        np.testing.assert_allclose(2 * both**power, one**power + other**power, rtol=1e-5)


def test_random_measure_depends_only_on_seed(a_run):
    run, *networks = a_run
    first, again = (robustness.by_chance(run, *networks)["dense1"] for _ in range(2))
    other = robustness.by_chance(SimpleNamespace(store=run.store, config=SimpleNamespace(seed=1)), *networks)
    assert (first == again).all()
    assert (first != other["dense1"]).all()
    assert not np.array_equal(*(np.argsort(other[layer]) for layer in ("dense1", "dense2")))


def test_measures_reject_unknown_and_drop_duplicates():
    with pytest.raises(UserError, match="magic"):
        cli.parse(robustness.RobustnessConfig, "", ["--by", "norm", "magic"])
    flags = ["--setup", "mlp-digits", "--width", "2"]
    one, twice, two = (
        robustness.combinations(cli.parse(robustness.RobustnessConfig, "", [*flags, "--by", *by]))
        for by in (["norm"], ["norm", "norm"], ["norm", "correlation"])
    )
    assert one == twice
    assert two - one == one - 5  # all lines except the unperturbed one


def test_rank_names_measure_with_lowest_increase():
    def of(**added):
        extra = {name: {"test": {"loss": loss, "accuracy": loss / 2}} for name, loss in added.items()}
        return results_of(robustness.RobustnessResults, {"extra": extra})

    pairs = [of(correlation=0.2, norm=0.1, random=0.3), of(correlation=0.1, norm=0.4, random=0.5)]
    assert "The measure norm predicts" in robustness.rank(pairs[0])
    assert "norm 0.100 / 5.0%, correlation 0.200 / 10.0%, random 0.300 / 15.0%" in robustness.rank(pairs[0])
    together = robustness.EXPERIMENT.judge_together(pairs)
    assert "The measure correlation predicts" in together
    assert together == robustness.rank(pool(pairs))
    assert robustness.rank(of(norm=0.1)) == ""


def test_compare_uses_magnitude_and_distribution():
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=20_000) for _ in range(2))
    same, wider, shifted = (robustness.compare(x, other) for other in (y, 2 * y, y + 0.5))
    assert same.alike
    assert abs(same.magnitude - 1) < 5 / np.sqrt(len(x))
    assert not wider.alike
    assert abs(wider.magnitude - 2) < 10 / np.sqrt(len(x))
    assert not shifted.alike
    assert robustness.compare(x, rng.permutation(x)) == robustness.Comparison(magnitude=1.0, distance=0.0, alike=True)


def test_derangement_is_uniform_without_fixed_points():
    rng = np.random.default_rng(0)
    count = 9000
    seen = Counter(tuple(robustness.derangement(rng, 4).tolist()) for _ in range(count))
    all_of_them = [p for p in permutations(range(4)) if all(i != x for i, x in enumerate(p))]
    assert seen.keys() == set(all_of_them)
    expected = count / len(all_of_them)
    chi_square = sum((seen[p] - expected) ** 2 / expected for p in all_of_them)
    assert chi_square < 30  # 8 degrees of freedom: probability 1 / 5,000
    assert robustness.derangement(rng, 2).tolist() == [1, 0]


def test_rematch_moves_lowest_pairs_of_each_head():
    scores = np.random.default_rng(1).random((3, 9))
    order = robustness.rematch(scores, 4, np.random.default_rng(0))
    assert order.shape == scores.shape
    for row, moved in zip(scores, order != np.arange(9), strict=True):
        assert {*np.flatnonzero(moved)} == {*np.argsort(row)[:4]}


@pytest.mark.parametrize("measure", robustness.MEASURES)
def test_measures_score_heads_and_their_dimensions(measure):
    store = Store(cli.parse(robustness.RobustnessConfig, "", ["--setup", "vit-digits", "--width", "4"]))
    run = SimpleNamespace(store=store, config=store.config, splits={"train": store.data.train.first(8)})
    scores = robustness.MEASURES[measure](run, *(store.setup.init(4, seed) for seed in (0, 1)))
    assert {perm: np.shape(values) for perm, values in scores.items()} == {
        perm: store.spec.shape(perm) for perm in store.spec.sizes
    }
    assert (2, 32) in {np.shape(values) for values in scores.values()}


def test_rematch_moves_only_lowest_pairs():
    scores = np.array([0.9, 0.1, 0.5, 0.2, 0.8])
    order = robustness.rematch(scores, 3, np.random.default_rng(0))
    moved = np.flatnonzero(order != np.arange(5))
    assert moved.tolist() == [1, 2, 3]
    assert sorted(order.tolist()) == list(range(5))
