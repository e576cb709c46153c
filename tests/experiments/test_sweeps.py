"""Sweeps from A to B: their combinations, ends and findings."""

import numpy as np
import pytest
from results import results_of

from experiments import bernoulli, centered, hyperplane, linear, minmax, stitching, subcube, transitivity, uniform
from mcomb.errors import UserError
from mcomb.lab.runs.results import METRICS

FEW = ("--points", "3", "--samples", "2")


# They differ only in their distributions, which other tests check without networks.
@pytest.mark.parametrize(
    "module", [subcube, *(pytest.param(module, marks=pytest.mark.slow) for module in (hyperplane, bernoulli))]
)
def test_sweeps_run_from_a_to_b(module, results, curve, is_score):
    found = results(module, *FEW)
    for variant in ("naive", "aligned"):
        for metric in METRICS:
            values = curve(found, variant, metric)
            assert values.shape == (3, 2)
            for end, letter in ((0, "A"), (2, "B")):
                assert is_score(values[end], found["models"][letter], metric)
    assert curve(found, "naive")[1, 0] != curve(found, "naive")[1, 1]
    assert found["barriers"]["aligned"]["test"]["loss"] < found["barriers"]["naive"]["test"]["loss"]


@pytest.mark.slow
def test_pairs_are_runs_of_seeds_judged_together(results):
    both = results(linear, *FEW[:2], "--pairs", "2", "--seed", "1")
    each = [results(linear, *FEW[:2], "--seed", str(seed)) for seed in (1, 2)]
    assert both["title"] == "MLP on digits, width 2, 2 pairs: the line through A and B"
    for name in ("models", "curves", "barriers"):
        assert [pair[name] for pair in both["pairs"]] == [one[name] for one in each]
    for variant in ("naive", "aligned"):
        losses = [one["barriers"][variant]["test"]["loss"] for one in each]
        folded = [part["barriers"][variant]["test"]["loss"] for part in (both["least"], both, both["largest"])]
        assert folded == pytest.approx([min(losses), np.mean(losses), max(losses)])
    agreeing = [one["agrees"] for one in each]
    assert both["agrees"] is (None if None in agreeing else all(agreeing))
    assert both["finding"].startswith(f"{agreeing.count(True)} of 2 pairs show the paper's effect.")


@pytest.mark.parametrize("flags", [("--pretrained",), ("--checkpoint-b", "somewhere"), ("--seed-a", "0")])
def test_pairs_reject_given_networks(flags, results):
    with pytest.raises(UserError, match=f"--pairs 2 chooses its own networks: remove --pairs or {flags[0]}"):
        results(linear, "--pairs", "2", *flags)


def test_pairs_abc_reject_checkpoints(results):
    with pytest.raises(UserError, match="--pairs abc chooses its own networks: remove --pairs or --checkpoint-b"):
        results(linear, "--pairs", "abc", "--checkpoint-b", "somewhere")


@pytest.mark.slow
def test_pairs_abc_are_three_pairs_of_three_networks(results):
    together = results(linear, *FEW[:2], "--pairs", "abc")
    assert together["title"] == "MLP on digits, width 2, pairs of A, B and C: the line through A and B"
    flags = ([], ["--seed-b", "2"], ["--seed-a", "1", "--seed-b", "2"])
    each = [results(linear, *FEW[:2], *seeds) for seeds in flags]
    for name in ("models", "curves", "barriers"):
        assert [pair[name] for pair in together["pairs"]] == [one[name] for one in each]
    assert together["finding"].count("With --seed") == 1


@pytest.mark.slow
def test_pairs_abc_of_triples_take_each_network_as_middle(results):
    together = results(transitivity, "--points", "3", "--pairs", "abc")
    each = [
        results(transitivity, "--points", "3", "--seed-a", str(a), "--seed-b", str(b), "--seed-c", str(c))
        for a, b, c in ((0, 1, 2), (0, 2, 1), (1, 2, 0))
    ]
    assert [pair["curves"] for pair in together["pairs"]] == [one["curves"] for one in each]


@pytest.mark.slow
def test_linear_extrapolates_beyond_ends(results, curve, is_score):
    inside = results(linear, *FEW[:2])
    beyond = results(linear, "--points", "13", "--range", "-1", "2")
    assert inside["parameter"]["values"] == [0, 0.5, 1]
    assert beyond["parameter"]["values"] == np.linspace(-1, 2, 13).tolist()
    for variant in ("naive", "aligned"):
        for at, same in ((4, 0), (6, 1), (8, 2)):
            network = {"test": {"loss": curve(inside, variant)[same, 0]}}
            assert is_score(curve(beyond, variant)[at], network, "loss")
    assert curve(beyond, "naive")[0, 0] > curve(beyond, "naive")[4, 0]
    assert "Up to 0.25 beyond the ends" in beyond["finding"]


@pytest.mark.slow
def test_linear_barrier_ignores_points_beyond_ends(results, curve):
    beyond = results(linear, "--points", "13", "--range", "-1", "2")
    for variant in ("naive", "aligned"):
        loss = curve(beyond, variant)[:, 0]
        mean = np.mean([beyond["models"][letter]["test"]["loss"] for letter in "AB"])
        assert beyond["barriers"][variant]["test"]["loss"] == pytest.approx(loss[4:9].max() - mean)
        assert loss.max() > loss[4:9].max()


@pytest.mark.slow
def test_linear_without_near_points_has_no_verdict(results):
    beyond = results(linear, "--points", "4", "--range", "-1", "2")
    assert beyond["parameter"]["values"] == [-1, 0, 1, 2]
    assert beyond["agrees"] is None
    assert "Increase --points" in beyond["finding"]


def test_stitching_replaces_layer_after_layer(results, curve, is_score):
    found = results(stitching)
    assert found["parameter"]["values"] == [0, 1, 2, 3, 4]
    for end, letter in ((0, "A"), (4, "B")):
        assert is_score(curve(found, "aligned")[end], found["models"][letter], "loss")
    assert found["barriers"]["aligned"]["test"]["accuracy"] < found["barriers"]["naive"]["test"]["accuracy"]


@pytest.mark.slow
def test_centered_starts_at_a(results, curve, is_score):
    found = results(centered, *FEW)
    assert is_score(curve(found, "aligned")[0], found["models"]["A"], "loss")
    assert curve(found, "naive")[2].mean() > curve(found, "aligned")[2].mean()


@pytest.mark.slow
def test_minmax_min_is_worse_than_max(results, curve):
    found = results(minmax, *FEW[:2])
    accuracy = curve(found, "aligned", "accuracy")[:, 0]
    assert accuracy[0] > accuracy[-1]
    assert f"{accuracy[-1]:.1%}" in found["finding"]


@pytest.mark.parametrize("module", [uniform, subcube, hyperplane, bernoulli, stitching, linear])
def test_sweep_finding_has_barriers_of_both_curves(module):
    level = {split: {"loss": 0.1, "accuracy": 0.95} for split in ("train", "test")}
    barriers = {"naive": {"loss": 1.5, "accuracy": 0.6}, "aligned": {"loss": 0.033, "accuracy": 0.02}}
    made_up = {
        "config": {"setup": "mlp-digits", "width": 32},
        "ends": ["A", "B"],
        "models": {"A": level, "B": level},
        "guessing": {split: {"loss": 2.3, "accuracy": 0.1, "examples": 10_000} for split in ("train", "test")},
        "barriers": {name: {"test": barrier} for name, barrier in barriers.items()},
        "parameter": {"name": "s", "label": "s", "values": [0, 0.5, 1]},
    }
    agrees, finding = module.EXPERIMENT.judge(results_of(module.EXPERIMENT.results, made_up))
    assert agrees
    for number in ("0.033", "2.0%", "1.500", "60.0%"):
        assert number in finding
