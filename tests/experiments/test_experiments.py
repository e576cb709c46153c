"""Every experiment end to end, on the real digits with small networks, and the report that gathers them."""

import json
import math
from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from experiments import (
    bernoulli,
    centered,
    edges,
    functional,
    hyperplane,
    linear,
    matchers,
    minmax,
    report,
    robustness,
    schematic,
    stitching,
    subcube,
    transitivity,
    triangle,
    uniform,
    width,
)
from mcomb import cli, workspace
from mcomb.base import UserError
from mcomb.lab.experiment import command, run
from mcomb.lab.results import METRICS, SPLITS
from mcomb.lab.workspace import Config, Workspace

# As many images of both splits: one compilation serves both.
SMALL = ["--setup", "mlp-digits", "--width", "2", "--epochs", "40", "--train-images", "397"]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """One root for all, so that networks and matchings are made once."""
    return str(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def results(out):
    """Runs an experiment with flags and returns what it left on disk, with its finding."""

    def of(module, *flags):
        config = cli.parse(module.EXPERIMENT.config, "", [*SMALL, *flags, "--out", out])
        returned = run(module.EXPERIMENT, config)
        name = module.EXPERIMENT.name
        folder = Workspace(config).folder(name)
        assert (folder / f"{name}.png").stat().st_size > 5_000
        assert (folder / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        assert returned["finding"]
        stored = json.loads((folder / "results.json").read_text())
        assert stored["command"].startswith(f"python -m experiments.{name} --setup mlp-digits --width 2")
        return stored | {"agrees": returned["agrees"], "finding": returned["finding"]}

    return of


def curve(results, variant, metric="loss", split="test"):
    return np.array(results["curves"][variant][split][metric])


@pytest.mark.parametrize("module", [subcube, hyperplane, bernoulli])
def test_sampled_sweeps_run_from_a_to_b(module, results):
    found = results(module, "--points", "3", "--samples", "2")
    for variant in ("naive", "aligned"):
        for metric in METRICS:
            values = curve(found, variant, metric)
            assert values.shape == (3, 2)
            for end, model in ((0, "A"), (2, "B")):
                np.testing.assert_allclose(values[end], found["models"][model]["test"][metric], rtol=1e-4)
    assert curve(found, "naive")[1, 0] != curve(found, "naive")[1, 1]
    assert found["barriers"]["aligned"]["test"]["loss"] < found["barriers"]["naive"]["test"]["loss"]


def test_the_line_may_go_beyond_its_ends(results):
    inside = results(linear, "--points", "3")
    outside = results(linear, "--points", "4", "--range", "-1", "2")
    assert outside["parameter"]["values"] == [-1, 0, 1, 2]
    np.testing.assert_allclose(curve(outside, "aligned")[[1, 2]], curve(inside, "aligned")[[0, 2]], rtol=1e-5)
    assert curve(outside, "naive")[0, 0] > curve(outside, "naive")[1, 0]
    assert "[−0.25, 1.25]" in outside["finding"]


def test_stitching_goes_layer_by_layer_from_a_to_b(results):
    found = results(stitching)
    assert found["parameter"]["values"] == [0, 1, 2, 3, 4]
    for end, model in ((0, "A"), (4, "B")):
        np.testing.assert_allclose(curve(found, "aligned")[end], found["models"][model]["test"]["loss"], rtol=1e-4)
    assert found["barriers"]["aligned"]["test"]["accuracy"] < found["barriers"]["naive"]["test"]["accuracy"]


def test_the_box_around_a_starts_at_a(results):
    found = results(centered, "--points", "3", "--samples", "2")
    np.testing.assert_allclose(curve(found, "aligned")[0], found["models"]["A"]["test"]["loss"], rtol=1e-4)
    assert curve(found, "naive")[2].mean() > curve(found, "aligned")[2].mean()


def test_min_is_worse_than_max(results):
    found = results(minmax, "--points", "3")
    accuracy = curve(found, "aligned", "accuracy")[:, 0]
    assert accuracy[0] > accuracy[-1]
    assert f"{accuracy[-1]:.1%}" in found["finding"]


def test_b_and_c_are_connected_through_a(results):
    found = results(transitivity, "--points", "3")
    assert found["curves"].keys() == {"naive", "through A", "direct"}
    assert found["models"].keys() == {"B", "C"}
    for variant in found["curves"]:
        for end, model in ((0, "B"), (2, "C")):
            np.testing.assert_allclose(curve(found, variant)[end], found["models"][model]["test"]["loss"], rtol=1e-4)
    middle = {variant: curve(found, variant)[1, 0] for variant in found["curves"]}
    assert middle["direct"] < middle["naive"]
    assert middle["through A"] < middle["naive"]
    assert middle["through A"] != middle["direct"]


def test_the_triangle_has_the_networks_at_its_corners(results):
    found = results(triangle, "--grid", "4")
    shares = np.array(found["shares"])
    assert len(shares) == 15
    for corner, model in (([0, 0], "A"), ([1, 0], "B"), ([0, 1], "C")):
        (i,) = np.flatnonzero((shares == corner).all(1))
        for metric in METRICS:
            np.testing.assert_allclose(
                found["points"]["test"][metric][i], found["models"][model]["test"][metric], rtol=1e-4
            )
    accuracy = found["points"]["test"]["accuracy"]
    assert accuracy[found["best_index"]] == max(accuracy)
    assert found["best"]["place"] in found["finding"]


def test_the_triangle_can_be_left(results):
    found = results(triangle, "--grid", "2", "--beyond", "0.5")
    shares = np.array(found["shares"])
    assert shares.min() == -0.5
    assert (1 - shares.sum(1)).min() == -0.5
    assert len(shares) == 21  # a triangle of 5 steps


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
def test_places_on_the_triangle_are_named(shares, place):
    assert triangle.place(shares) == place


def test_labels_are_counted_for_five_sweeps(results):
    found = results(functional, "--points", "3", "--samples", "2")
    assert list(found["sweeps"]) == ["bernoulli", "subcube", "hyperplane", "uniform", "linear"]
    for sweep in found["sweeps"].values():
        counts = np.array(sweep["counts"])
        assert counts.shape[2:] == (4, 2)
        assert (counts.sum((2, 3)) == 397).all()
    ends = np.array(found["sweeps"]["linear"]["counts"])
    a_only, b_only, both, neither = ends[0, 0].sum(1)
    assert b_only == neither == 0
    assert found["disagreement"] == a_only / 397
    assert ends[2, 0].sum(1).tolist() == [0, a_only, both, 0]


def test_edges_count_every_weight_once(results):
    found = results(edges)
    weights = 64 * 32 + 2 * 32 * 32 + 32 * 10 + 3 * 32 + 10
    for variant in ("naive", "aligned"):
        assert sum(found["overall"][variant]) == weights
        assert np.sum([layer for layer in found["layers"][variant].values()]) == weights
    assert list(found["layers"]["naive"]) == ["1", "2", "3", "4"]
    assert found["mean"]["aligned"] < found["mean"]["naive"]


def test_rematching_more_pairs_costs_more(results):
    found = results(robustness, "--counts", "3", "--line-points", "3")
    assert list(found["layers"]) == ["dense1", "dense2", "dense3"]
    for layer in found["layers"].values():
        assert layer["k"] == [2, 17, 32]
        for split in SPLITS:
            loss = layer["barriers"][split]["loss"]
            assert max(loss[0], found["unperturbed"][split]["loss"]) < loss[-1]


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
    order = robustness.rematched(scores, 3, np.random.default_rng(0))
    moved = np.flatnonzero(order != np.arange(5))
    assert moved.tolist() == [1, 2, 3]
    assert sorted(order.tolist()) == list(range(5))


def test_matchers_are_compared_by_the_networks_that_each_would_give_a_sweep(results):
    flags = ("--points", "3", "--samples", "2")
    found = results(matchers, *flags, "--orders", "2")
    names = ["naive", "weights", "weights, best of 2", "activations", "ste"]
    assert list(found["matchings"]) == names
    assert list(found["barriers"]) == [f"{sweep}, {name}" for sweep in ("linear", "uniform") for name in names]
    for matcher in ("weights", "ste"):
        line = results(linear, *flags[:2], "--matcher", matcher)
        cube = results(uniform, *flags, "--matcher", matcher)
        assert found["barriers"][f"linear, {matcher}"] == line["barriers"]["aligned"]
        assert found["barriers"][f"uniform, {matcher}"] == cube["barriers"]["aligned"]
        assert found["barriers"]["uniform, naive"] == cube["barriers"]["naive"]
    reached = {name: matching["objective"] for name, matching in found["matchings"].items()}
    assert max(found["tried"]) == reached["weights, best of 2"] >= reached["weights"]
    assert reached["weights"] == found["tried"][0]
    assert reached["ste"] > reached["naive"]


def test_a_matching_is_kept_for_each_matcher_with_the_time_it_took(results, out, monkeypatch):
    flags = ("--points", "3", "--samples", "2", "--orders", "2")
    before = results(matchers, *flags)
    kept = {path.name for path in Workspace(cli.parse(Config, "", [*SMALL, "--out", out])).home.glob("matchings/*")}
    pair = "seed-1,epochs=40-to-seed-0,epochs=40"
    ways = ("", ",orders=2", ",matcher=activations", ",matcher=ste")
    assert {f"{pair}{way}.npz" for way in ways} <= kept
    for name in ("match", "match_weights"):
        monkeypatch.setattr(workspace, name, lambda *args, **options: pytest.fail("matched again"))
    again = results(matchers, *flags, "--train-images", "50")  # what is evaluated on changes no matching
    assert again["barriers"] != before["barriers"]
    assert again["matchings"] == before["matchings"]


def test_the_comparison_of_matchers_takes_no_matcher():
    with pytest.raises(UserError, match="--matcher"):
        cli.parse(matchers.EXPERIMENT.config, "", ["--matcher", "ste"])


def test_matchers_agree_with_the_paper_only_if_they_are_close():
    def verdict(worst):
        values = {"naive": 0.6, "weights": 0.02, "activations": 0.03, "ste": worst}
        barriers = {
            f"{sweep}, {name}": {"test": {"loss": value, "accuracy": value}}
            for sweep in ("linear", "uniform")
            for name, value in values.items()
        }
        return matchers.EXPERIMENT.conclude({"barriers": barriers, "tried": [99.0, 100.0]})

    assert verdict(0.05)[0]
    assert not verdict(0.2)[0]
    assert "ste 0.050 / 5.0%" in verdict(0.05)[1]
    assert "1.00% above the worst" in verdict(0.05)[1]


def test_barriers_are_compared_over_widths(results):
    found = results(width, "--widths", "1", "2", "--points", "3", "--samples", "2")
    assert found["widths"] == [1, 2]
    assert found["by_width"].keys() == {"linear", "uniform", "subcube", "hyperplane", "bernoulli"}
    for rows in found["by_width"].values():
        assert len(rows) == 2
        assert rows[0]["aligned"]["test"] != rows[1]["aligned"]["test"]


def test_the_schematic_shows_what_the_distributions_draw(results):
    panels = results(schematic)["panels"]
    shares = {name: np.concatenate([np.ravel(v) for v in panel["shares"].values()]) for name, panel in panels.items()}
    assert (shares["blue network"] == 0).all()
    assert (shares["orange network"] == 1).all()
    assert set(shares["Bernoulli"]) == {0, 1}
    assert 0.1 < shares["uniform"].std() < 0.4
    assert [np.mean(layer) for layer in panels["stitching"]["shares"].values()] == [1, 0, 0]


def test_the_command_gives_the_config_back():
    words = "--setup mlp-digits --width 3 --matcher ste --points 5 --range -1 2 --learning-rate 0.05"
    config = cli.parse(linear.EXPERIMENT.config, "", words.split())
    again = command("linear", config).split(" ", 3)[3]
    assert cli.parse(linear.EXPERIMENT.config, "", again.split()) == config
    assert math.isclose(config.learning_rate, 0.05)


def judged(module, naive, aligned):
    """What a sweep concludes from test accuracy barriers."""
    barriers = {"naive": naive, "aligned": aligned}
    return module.EXPERIMENT.conclude(
        {
            "barriers": {name: {"test": {"loss": 0.5, "accuracy": value}} for name, value in barriers.items()},
            "parameter": {"values": [0, 0.5, 1]},
        }
    )


@pytest.mark.parametrize("module", [subcube, hyperplane, bernoulli, stitching, linear])
def test_sweeps_agree_with_the_paper_only_if_aligned_combinations_work(module):
    assert judged(module, naive=0.6, aligned=0.02)[0]
    assert not judged(module, naive=0.6, aligned=0.4)[0]
    assert not judged(module, naive=0.01, aligned=0.02)[0]
    assert "2.0%" in judged(module, naive=0.6, aligned=0.02)[1]


def test_min_must_be_bad_to_agree_with_the_paper():
    def verdict(*accuracy):
        models = {model: {"test": {"accuracy": 0.98}} for model in "AB"}
        curves = {"aligned": {"test": {"accuracy": [[value] for value in accuracy]}}}
        return minmax.EXPERIMENT.conclude({"models": models, "curves": curves})[0]

    assert verdict(0.97, 0.9, 0.3)
    assert not verdict(0.97, 0.97, 0.96)


def test_a_barrier_counts_no_point_beyond_the_ends(results):
    beyond = results(linear, "--points", "4", "--range", "-1", "2")
    at_the_ends = [beyond["models"][model]["test"]["loss"] for model in "AB"]
    expected = max(at_the_ends) - np.mean(at_the_ends)  # of −1, 0, 1 and 2 only the ends are between the ends
    assert beyond["barriers"]["naive"]["test"]["loss"] == pytest.approx(expected, abs=1e-4)


def test_the_report_gathers_what_has_been_run(tmp_path, capsys):
    flags = [*SMALL, "--out", str(tmp_path)]
    run(schematic.EXPERIMENT, cli.parse(schematic.EXPERIMENT.config, "", flags))
    report.main(flags)
    assert "1 experiments in" in capsys.readouterr().out
    (path,) = (tmp_path / "mlp-digits" / "width-2").glob("report,*.html")
    page = path.read_text()
    assert "hat combinations do to weights" in page
    assert page.count("data:image/png;base64,") == 1
    for name in ("uniform", "triangle", "robustness", "width"):
        assert f"python -m experiments.{name} " in page


def test_the_report_runs_every_experiment_of_the_paper():
    jobs = report.plan(cli.parse(report.ReportConfig, "", ["--width", "8"]))
    names = [experiment.name for experiment, _ in jobs]
    assert len(names) == 17
    assert len(set(names)) == 16
    assert all(config.width == 8 for _, config in jobs)
    ranges = [config.range for experiment, config in jobs if experiment.name == "linear"]
    assert ranges == [(0, 1), (-1, 2)]
