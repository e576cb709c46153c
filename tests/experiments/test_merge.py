import numpy as np
import pytest

from experiments import merge
from mcomb.errors import UserError
from mcomb.lab import cli
from mcomb.lab.cache.store import Store
from mcomb.lab.runs.experiment import reach_verdict
from mcomb.lab.runs.pairs import over_pairs, pool
from mcomb.lab.runs.results import from_json
from mcomb.lab.runs.rows import Rows
from mcomb.lab.runs.run import run

SMALL = ("--pairs", "1", "--steps", "20", "--candidates", "4", "--test-examples", "200")


@pytest.fixture
def pair(config_of, tmp_path):
    """A pair of small networks trained on split data."""
    store = Store(config_of(merge, *SMALL))
    examples = store.data.train
    withheld = examples.take(store.config.subset("withheld").rows(examples.labels))
    networks = store.networks.get("AB")
    a, b = (networks[letter].params for letter in "AB")
    this = merge.Run("merge", store, networks, {}, {}, Rows(tmp_path, {}))
    return merge.Pair(this, a, b, a, withheld)  # perfectly aligned: B is A


@pytest.mark.slow
def test_merge_measures_every_method_once(results, config_of, draws_pairs, monkeypatch):
    found = results(merge, *SMALL)
    assert found["methods"].keys() == merge.COMPARED_METHODS.keys()
    assert found["seen"]["A"] + found["seen"]["B"] == 1400 - 280
    for name, letter in (("A", "A"), ("B", "B"), ("joint", "C")):
        scored = found["methods"][name]["test"]
        assert scored == pytest.approx(found["models"][letter]["test"])
    test = {name: at["test"] for name, at in found["methods"].items()}
    assert test["midpoint, naive"]["loss"] > test["midpoint, aligned"]["loss"] > test["ensemble"]["loss"]
    assert test["learned per weight"]["loss"] < test["midpoint, aligned"]["loss"]
    assert test["A, bias corrected"]["loss"] < test["A"]["loss"]
    assert draws_pairs(merge, found)
    assert merge.table(from_json(merge.MergeResults, found)).count("\n") == len(merge.COMPARED_METHODS)
    monkeypatch.setattr(merge, "score", lambda *args: pytest.fail("it is measured"))
    assert run(merge.EXPERIMENT, config_of(merge, *SMALL)).methods == found["methods"]


@pytest.mark.slow
def test_merge_resumes_after_kill(results, config_of, monkeypatch):
    flags = (*SMALL, "--seed", "1")
    whole = results(merge, *flags)["methods"]
    folder = Store(config_of(merge, *flags)).folder("merge")
    (folder / "results.json").unlink()
    rows = folder / "samples.jsonl"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:-2]))
    measured, real = [], merge.score
    monkeypatch.setattr(merge, "score", lambda *args: measured.append(args) or real(*args))
    assert results(merge, *flags)["methods"] == whole
    assert len(measured) == 2 * len(merge.MEASURED)


@pytest.mark.slow
def test_merge_with_itself_is_identity(pair):
    """Every merge of A with itself has A's logits."""
    examples = pair.withheld.inputs[:50]
    logits = np.asarray(pair.apply(pair.a, examples))
    for name in ("midpoint, aligned", "best sample", "learned per unit", "Fisher"):
        merged = merge.COMPARED_METHODS[name](pair)
        assert np.allclose(merged.apply(merged.params, examples), logits, atol=1e-4 * np.abs(logits).max()), name


def test_ensemble_has_mean_logits_of_parents(pair):
    examples = pair.withheld.inputs[:50]
    merged = merge.COMPARED_METHODS["ensemble"](pair)
    each = [np.asarray(pair.apply(params, examples)) for params in (pair.a, pair.b)]
    assert np.allclose(merged.apply(merged.params, examples), np.mean(each, axis=0), atol=1e-5 * np.abs(each).max())


@pytest.mark.slow
def test_correct_bias_shifts_logits_and_lowers_loss(pair):
    apply, (params, bias) = merge.correct_bias(pair, pair.a)
    examples = pair.withheld.inputs[:50]
    change = np.asarray(apply((params, bias), examples)) - np.asarray(pair.apply(pair.a, examples))
    assert np.allclose(change, np.broadcast_to(bias, change.shape), atol=1e-4)
    before = merge.score(pair.apply, pair.a, *pair.withheld).loss
    after = merge.score(apply, (params, bias), *pair.withheld).loss
    assert after < before


def test_parents_see_subsets_and_joint_network_sees_all(config_of):
    config = config_of(merge, *SMALL)
    assert [config.training_of(letter).subset for letter in "ABC"] == [config.subset("A"), config.subset("B"), None]
    assert config.subset("A").skew == 0.95
    assert cli.parse(merge.MergeConfig, "", ["--setup", "mlp-cifar10"]).subset("A")[:3] == ("biased", 0.8, 10_000)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--split", "none", "--skew", "0.5"], r"--skew 0\.5 is invalid with --split none: remove it"),
        (["--skew", "1.5"], r"--skew 1\.5 is invalid with --split biased: use a fraction from 0 to 1"),
        (["--split", "dirichlet", "--skew", "0"], r"--skew 0 is invalid with --split dirichlet"),
        (["--split", "dirichlet", "--skew", "1e308"], r"--skew: 1e308 is more than 1000000"),
        (["--pretrained"], r"merge trains its own networks: remove --pretrained"),
        (["--withheld", "3"], r"--withheld: 3 is less than 20"),
        (
            ["--setup", "mlp-digits", "--withheld", "1400"],
            r"--withheld 1400 leaves none of 1,400 train examples: withhold fewer",
        ),
        (["--split", "odd"], r"--split: invalid choice: 'odd'"),
    ],
)
def test_merge_rejects_incompatible_flags(flags, problem):
    with pytest.raises(UserError, match=problem):
        cli.parse(merge.MergeConfig, "", flags)


def pair_of(less=0.0, models=None, **accuracies):
    """Return results with equal methods, except for some accuracies; refit is best on withheld examples."""
    scored = {
        name: {s: {"loss": 0.2 - less, "accuracy": 0.9 - less} for s in merge.MEASURED}
        for name in merge.COMPARED_METHODS
    }
    for name, accuracy in accuracies.items():
        scored[name]["test"]["accuracy"] = accuracy
    scored["refit"]["withheld"]["loss"] = 0.1
    config = {"setup": "mlp-digits", "width": 2, "split": "biased", "candidates": 100, "seed": 0}
    guess = {"test": {"examples": 100, "accuracy": 0.1}}
    return merge.MergeResults(methods=scored, seen={}, config=config, guessing=guess, models=models or {})


def test_merge_judges_and_tabulates_means_over_pairs():
    one, two = pair_of(), pair_of(less=0.1)
    both = pool([one, two])
    assert "0.8500 (0.8000–0.9000)" in merge.table(both)
    assert "85.0%" in merge.EXPERIMENT.judge_together([one, two])


@pytest.mark.parametrize(
    ("midpoint", "ensemble", "said"),
    [
        (0.7, 0.9, "50% of the gap between the aligned midpoint and the ensemble"),
        (0.7, 0.75, "It is better than the ensemble."),
        (0.8, 0.8, None),
        (0.9, 0.8, None),
    ],
)
def test_finding_has_closed_gap_if_ensemble_is_better(midpoint, ensemble, said):
    found = merge.judge(pair_of(**{"midpoint, aligned": midpoint, "ensemble": ensemble, "refit": 0.8})).finding
    assert said is None or said in found
    assert ("of the way" in found, "better than the ensemble" in found) == (
        bool(said and "way" in said),
        bool(said and "better" in said),
    )


def test_finding_quotes_pair_without_verdict():
    networks = {letter: {"test": {"accuracy": 0.9}} for letter in "AB"}
    good, bad = (pair_of(models=networks | {"B": {"test": {"accuracy": accuracy}}}) for accuracy in (0.9, 0.15))
    several = over_pairs(merge.EXPERIMENT, merge.MergeConfig(setup="mlp-digits", pairs=2))
    assert "On average: The best merge on the withheld" in reach_verdict(several, pool([good, good])).finding
    agrees, finding = reach_verdict(several, pool([bad, bad]))
    assert agrees is None
    assert finding.startswith("With --seed 0: No verdict: network B hardly beats guessing.")
    assert "The merge" not in reach_verdict(several, pool([good, bad])).finding


def test_split_networks_have_own_names(config_of):
    flags = ((), ("--skew", "0.7"), ("--split", "none"), ("--withheld", "300"))
    stores = [Store(config_of(merge, *SMALL, *each)) for each in flags]
    assert len({store.networks.name(letter) for store in stores for letter in "AB"}) == 8
    assert len({store.networks.name("C") for store in stores}) == 1
