import copy
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_close, assert_equal

from mcomb.combination import linear, mix, uniform
from mcomb.evaluation.evaluate import Metrics
from mcomb.lab.cache.matchings import B_TO_A
from mcomb.lab.cache.store import Store
from mcomb.lab.flags import SweepConfig
from mcomb.lab.runs import measure
from mcomb.lab.runs.measure import Run, Task, as_lists, curve_barriers, guessing
from mcomb.lab.runs.results import Parameter, to_json
from mcomb.lab.runs.rows import Rows
from mcomb.lab.runs.temperatures import TEMPERATURES, cross_fit
from mcomb.matching.matching import objective

EXAMPLES = 40  # equal for both splits, so that one compilation serves both
CONFIG = SweepConfig(setup="mlp-digits", width=1, epochs=0, train_examples=EXAMPLES, test_examples=EXAMPLES, samples=2)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A store, two untrained networks and their matching."""
    store = Store(dataclasses.replace(CONFIG, out=tmp_path_factory.mktemp("runs")))
    networks = store.networks.get("AB")
    return store, networks, {B_TO_A: store.matchings.get(networks)}


@pytest.fixture
def run(parts, tmp_path):
    store, networks, matchings = parts
    store = copy.copy(store)  # tests may change its config
    return Run("example", store, networks, matchings, {}, Rows(tmp_path, {}))


def task(run, draw=linear, **options):
    pair = run.networks["A"].params, run.align()
    return Task(mix(draw), pair, np.linspace(0, 1, 7, dtype=np.float32), **options)


def test_guessing_has_most_common_label_and_entropy():
    labels = np.array([3, 3, 3, 3, 0, 0, 7, 8])
    found = guessing(labels)
    assert found["accuracy"] == 0.5
    assert found["examples"] == 8
    assert found["loss"] == pytest.approx(0.5 * np.log(2) + 0.25 * np.log(4) + 2 * 0.125 * np.log(8))
    assert guessing(np.array([4, 4])) == {"loss": 0, "accuracy": 1, "examples": 2}


def test_guessing_tokens_counts_each_text_once():
    found = guessing(np.array([[3, 3], [3, 3], [0, 7]]))
    assert found["examples"] == 3
    assert found["accuracy"] == pytest.approx(4 / 6)


def test_run_measures_each_token(tmp_path):
    few = {"train_examples": 3, "test_examples": 3, "epochs": 0, "width": 1, "out": tmp_path}
    store = Store(SweepConfig(setup="decoder-text", **few))
    networks = store.networks.get("AB")
    run = Run("example", store, networks, {B_TO_A: store.matchings.get(networks)}, {}, Rows(tmp_path, {}))
    pair = networks["A"].params, run.align()
    found = run.evaluate({"line": Task(linear, pair, np.array([0.0, 0.5], np.float32))})["line"]["test"]
    inputs, labels = store.data.test.subset(3)
    tokens = labels.size
    logits = [np.asarray(store.apply(network.params, inputs), np.float64) for network in networks.values()]
    predicted = [each.argmax(-1) for each in logits]
    counts = found.agreement[0]  # of A itself
    assert counts.sum() == tokens == 3 * 64
    assert counts[0].sum() == (predicted[0] != predicted[1]).sum()
    assert counts[:, 0].sum() == (predicted[0] == labels).sum()
    assert found.accuracy[0] == pytest.approx((predicted[0] == labels).mean())
    shifted = logits[0] - logits[0].max(-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    loss = -np.take_along_axis(log_probabilities, labels[..., None], -1).mean()
    assert found.loss[0] == pytest.approx(loss, rel=1e-5)
    assert run.basics["models"]["A"]["test"]["loss"] == pytest.approx(loss, rel=1e-5)


def test_curves_have_shape_of_sweep():
    accuracy, agreement = np.arange(6.0) / 6, np.arange(48).reshape(6, 4, 2)
    metrics = Metrics({"loss": np.arange(6.0), "accuracy": accuracy, "agreement": agreement})
    lists = as_lists(metrics, (3, 2))
    assert lists.keys() == {"loss", "accuracy", "agreement"}
    assert lists["loss"] == [[0, 1], [2, 3], [4, 5]]
    assert np.array(lists["agreement"])[2, 1].tolist() == metrics.agreement[5].tolist()
    json.dumps(lists)


def test_cross_fit_uses_best_temperature_of_other_half():
    even = np.array([[3.0, 1.0, 2.0], [0.5, 0.7, 0.6]])
    odd = np.array([[9.0, 8.0, 7.0], [4.0, 5.0, 6.0]])
    assert cross_fit([even, odd], [3, 1]).tolist() == [(3 * 2.0 + 8.0) / 4, (3 * 0.5 + 4.0) / 4]
    assert cross_fit([even[0], odd[0]], [1, 1]) == 5.0


def test_temperatures_are_fitted_on_the_other_half(run):
    run.store.config = dataclasses.replace(run.config, temperatures=True)
    line = task(run)
    found = run.measure_curves({"aligned": line}, (7, 1))["at_best_temperature"]
    examples, labels = run.store.data.test.first(EXAMPLES)

    def expected(params):
        logits = np.asarray(run.store.apply(params, jnp.asarray(examples)), np.float64)
        scaled = logits[:, None] / np.array(TEMPERATURES)[:, None]
        logs = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
        losses = -np.take_along_axis(logs, labels[:, None, None], -1)[..., 0]
        halves = losses[::2].mean(0), losses[1::2].mean(0)
        return np.mean([halves[0][halves[1].argmin()], halves[1][halves[0].argmin()]])

    ends = [expected(run.networks[letter].params) for letter in "AB"]
    curve = [expected(line.draw(jax.random.key(0), jnp.asarray(value), *line.networks)) for value in line.points]
    assert_close([found.models[letter]["test"]["loss"] for letter in "AB"], ends, roundings=64)
    assert_close(np.ravel(found.curves["aligned"]["test"]["loss"]), curve, roundings=64)
    assert found.barriers["aligned"]["test"]["loss"] == pytest.approx(max(curve) - np.mean(ends), abs=1e-5)


def test_temperatures_flag_changes_no_other_number(run, tmp_path):
    plain = run.measure_curves({"aligned": task(run)}, (7, 1))
    assert plain.keys() == {"ends", "curves", "barriers", *run.basics}
    assert len(run.rows.rows) == 2 * 7
    run.store.config = dataclasses.replace(run.config, temperatures=True)
    (tmp_path / "flagged").mkdir()
    flagged = dataclasses.replace(run, rows=Rows(tmp_path / "flagged", {}))
    found = flagged.measure_curves({"aligned": task(run)}, (7, 1))
    assert {name: found[name] for name in plain} == plain
    assert len(flagged.rows.rows) == 4 * 7


def test_task_length_is_number_of_parameters():
    assert len(Task(mix(linear), (), (np.zeros(5), {"P": np.zeros((5, 3))}))) == 5


def test_line_ends_have_scores_of_networks(run):
    found = run.evaluate({"line": task(run)})["line"]
    for split in ("train", "test"):
        ends = [run.scores[letter][split] for letter in "AB"]
        assert_close(found[split].loss[[0, -1]], [end.loss for end in ends], roundings=64)
        assert found[split].accuracy[[0, -1]].tolist() == [end.accuracy for end in ends]
        agreement = found[split].agreement
        assert (agreement.sum((1, 2)) == EXAMPLES).all()
        examples = jnp.asarray(getattr(run.store.data, split).first(EXAMPLES).inputs)
        labels = [run.store.apply(run.networks[letter].params, examples).argmax(-1) for letter in "AB"]
        differing = int((labels[0] != labels[1]).sum())
        assert agreement[0].sum(1).tolist() == [differing, 0, EXAMPLES - differing, 0]
        assert agreement[-1].sum(1).tolist() == [0, differing, EXAMPLES - differing, 0]


def test_basics_have_networks_guessing_and_matchings(run):
    a, b = (run.networks[letter].params for letter in "AB")
    store, found = run.store, run.basics
    assert found["models"]["A"]["test"] == {m: getattr(run.scores["A"]["test"], m) for m in ("loss", "accuracy")}
    labels = store.data.train.labels[:EXAMPLES]
    assert found["guessing"]["train"]["accuracy"] == np.bincount(labels).max() / EXAMPLES
    products = found["inner_products"]["B to A"]
    assert products["naive"] == objective(store.spec, a, b)
    assert products["aligned"] == objective(store.spec, a, run.align()) > products["naive"]


def test_evaluate_resumes_from_rows(run, tmp_path, monkeypatch):
    whole = run.evaluate({"cube": task(run, uniform)})["cube"]
    calls = []
    real = measure.evaluate
    monkeypatch.setattr(measure, "evaluate", lambda *args, **options: calls.append(args[5]) or real(*args, **options))
    run.evaluate({"cube": task(run, uniform)})
    assert not calls
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert len(lines) == 1 + 2 * 7
    (tmp_path / "samples.jsonl").write_text("\n".join(lines[:10]) + "\n")  # all of train, and two of test
    again = dataclasses.replace(run, rows=Rows(tmp_path, {})).evaluate({"cube": task(run, uniform)})["cube"]
    (points,) = calls
    assert set(np.asarray(points).tolist()) == set(task(run).points[2:].tolist())
    for split in ("train", "test"):
        assert_equal(whole[split].values, again[split].values)


def test_keys_follow_name_of_experiment(run, parts, tmp_path):
    (tmp_path / "other").mkdir()
    other = Run("other", *parts, {}, Rows(tmp_path / "other", {}))
    own = run.evaluate({"cube": task(run, uniform)})["cube"]["test"].loss
    theirs = other.evaluate({"cube": task(run, uniform), "ours": task(run, uniform, rng_name="example")})
    assert (theirs["cube"]["test"].loss[2:] != own[2:]).all()
    np.testing.assert_array_equal(theirs["ours"]["test"].loss, own)


def test_measure_pair_samples_naive_and_aligned(run):
    values = np.linspace(0, 0.5, 3)
    found = run.measure_pair(mix(uniform), "s", "the label", values, between=values < 0.4)
    assert found.parameter == Parameter("s", "the label", [0, 0.25, 0.5])
    assert found.ends == ["A", "B"]
    for variant in ("naive", "aligned"):
        loss = np.array(found.curves[variant]["test"]["loss"])
        assert loss.shape == (3, 2)
        assert loss[0, 0] == loss[0, 1]
        assert loss[2, 0] != loss[2, 1]
        mean = np.mean([run.basics["models"][letter]["test"]["loss"] for letter in "AB"])
        assert found.barriers[variant]["test"]["loss"] == loss[:2].max() - mean
    json.dumps(to_json(found))


def test_align_applies_matching_to_b(run):
    perms = run.matchings[B_TO_A].matching.perms
    expected = run.store.spec.apply(perms, run.networks["B"].params)
    jax.tree.map(np.testing.assert_array_equal, run.align(), expected)
    assert run.align() is run.align()
    examples = jnp.asarray(run.store.data.test.inputs[:20])
    before, after = (run.store.apply(params, examples) for params in (run.networks["B"].params, run.align()))
    assert_close(after, before, roundings=64)


def test_curve_barriers_use_selected_points_and_given_ends():
    ends = [{s: {"loss": loss, "accuracy": 1 - loss} for s in ("train", "test")} for loss in (0.0, 0.5)]
    curve = {s: {"loss": [[0.5], [1.0], [2.0]], "accuracy": [[0.5], [0.25], [0.0]]} for s in ("train", "test")}
    every, some = (curve_barriers(ends, curve, between) for between in (..., [True, True, False]))
    assert every["train"] == {"loss": 1.75, "accuracy": 0.75}
    assert some["train"] == {"loss": 0.75, "accuracy": 0.5}
