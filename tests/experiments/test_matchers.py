import pytest
from results import results_of

from experiments import linear, matchers, uniform
from mcomb.lab.cache import matchings
from mcomb.lab.cache.store import Store
from mcomb.lab.runs.results import from_json

FLAGS = ("--points", "3", "--samples", "2")
NAMES = ["naive", "weights", "weights best of 2", "activations", "ste"]


@pytest.fixture
def found(results):
    return results(matchers, *FLAGS, "--restarts", "2")


@pytest.mark.slow
def test_matchers_use_same_combinations_as_sweeps(found, results):
    assert list(found["reached"]) == NAMES
    assert found["matchings"].keys() == {f"B to A, {name}" for name in NAMES[1:]}
    assert list(found["barriers"]) == [f"{sweep}, {name}" for sweep in ("linear", "uniform") for name in NAMES]
    for matcher in ("weights", "ste"):
        line = results(linear, *FLAGS[:2], "--matcher", matcher)
        cube = results(uniform, *FLAGS, "--matcher", matcher)
        assert found["barriers"][f"linear, {matcher}"] == line["barriers"]["aligned"]
        assert found["barriers"][f"uniform, {matcher}"] == cube["barriers"]["aligned"]
        assert found["barriers"]["uniform, naive"] == cube["barriers"]["naive"]
        assert found["matchings"][f"B to A, {matcher}"] == line["matchings"]["B to A"]
        assert ("matched by ste" in line["title"]) == (matcher == "ste")


@pytest.mark.slow
def test_matchers_beat_none_and_restarts_help(found, draws_pairs):
    assert draws_pairs(matchers, found)
    reached = {name: it["objective"] for name, it in found["reached"].items()}
    assert max(found["tried"]) == reached["weights best of 2"] >= reached["weights"]
    assert reached["weights"] == found["tried"][0]
    assert all(reached[name] > reached["naive"] for name in NAMES[1:])
    assert all((it["seconds"] > 0) == (name != "naive") for name, it in found["reached"].items())


@pytest.mark.slow
def test_matchers_cache_matchings_with_seconds(found, results, config_of, monkeypatch):
    kept = {path.name for path in Store(config_of(linear)).folders.home.glob("matchings/*")}
    pair = "seed-1,epochs=40-to-seed-0,epochs=40"
    ways = ("", ",restarts=2", ",matcher=activations", ",matcher=ste")
    assert {f"{pair}{way}.npz" for way in ways} <= kept
    monkeypatch.setattr(matchings, "MATCHERS", {})
    monkeypatch.setattr(matchings, "weights", lambda **options: pytest.fail("matched again"))
    again = results(
        matchers, *FLAGS, "--restarts", "2", "--train-examples", "50"
    )  # evaluation flags do not change matchings
    assert again["barriers"] != found["barriers"]
    assert again["reached"] == found["reached"]
    assert again["matchings"] == found["matchings"]


def test_matchers_finding_has_barriers_and_restarts():
    values = {"naive": 0.6, "weights": 0.02, "activations": 0.03, "ste": 0.05}
    barriers = {
        f"{sweep}, {name}": {"test": {"loss": value, "accuracy": value}}
        for sweep in ("linear", "uniform")
        for name, value in values.items()
    }
    agrees, finding = matchers.EXPERIMENT.judge(
        results_of(matchers.MatchersResults, {"barriers": barriers, "tried": [99.0, 100.0]})
    )
    assert agrees
    assert finding.count("naive 0.600 / 60.0%, weights 0.020 / 2.0%, activations 0.030 / 3.0%, ste 0.050 / 5.0%") == 2
    assert "1.00% above the worst" in finding


@pytest.mark.slow
def test_matchers_table_has_inner_products_and_seconds(found):
    *_, head, naive, _, _, _, ste = matchers.tables(from_json(matchers.MatchersResults, found)).splitlines()
    assert head.split() == ["inner", "product", "seconds"]
    assert naive.split() == ["naive", f"{found['reached']['naive']['objective']:.2f}", "0"]
    assert ste.split()[0] == "ste"
