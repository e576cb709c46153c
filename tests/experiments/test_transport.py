import jax
import numpy as np
import pytest
from results import results_of

from experiments import transport
from mcomb import UserError
from mcomb.io.fingerprints import fingerprint
from mcomb.lab import cli
from mcomb.lab.cache.networks import Network
from mcomb.lab.cache.store import Store
from mcomb.lab.data.datasets import Split, Splits
from mcomb.lab.data.text import SYMBOLS, decode
from mcomb.lab.runs.measure import Run
from mcomb.lab.runs.pairs import pool
from mcomb.lab.runs.results import METRICS
from mcomb.lab.runs.reuse import result_identity
from mcomb.lab.runs.rows import Rows

MLP = ("--setup", "mlp-digits", "--width", "2", "--epochs", "40")
VIT = ("--setup", "vit-digits", "--width", "1", "--epochs", "20")
SMALL = ("--steps", "20", "--train-examples", "200", "--test-examples", "397")


@pytest.fixture
def measure_copy(out, tmp_path, monkeypatch):
    """Measure transport from A to a copy of A, moved by a random element of a group."""

    monkeypatch.setattr(transport, "SCALES", np.array([0, 1], np.float32))

    def of(groups, *flags):
        config = cli.parse(transport.TransportConfig, "", [*flags, *SMALL, "--out", out])
        store = Store(config)
        a = store.networks.get("A")["A"]
        spec = store.matchings.spec(groups)
        element = spec.identity() if groups is None else spec.random(jax.random.key(1))
        moved = spec.apply(element, a.params)
        networks = {"A": a, "B": Network(f"copy-{groups}", moved, fingerprint(moved))}
        matchings = {key: store.matchings.get(networks, key) for key in transport.KEYS.values()}
        run = Run(f"transport-{groups}", store, networks, matchings, {}, Rows(tmp_path, {}))
        return transport.measure(run)

    return of


@pytest.mark.parametrize(("setup", "differs"), [("decoder-text", True), ("mlp-digits", False)])
def test_transport_results_depend_on_python_code(setup, differs, tmp_path, monkeypatch):
    store = Store(cli.parse(transport.TransportConfig, "", ["--setup", setup, "--width", "1", "--out", str(tmp_path)]))
    network = {"A": Network("a", {}, "fingerprint")}
    before = result_identity(transport.EXPERIMENT, store, network, {}, {})
    monkeypatch.setattr(transport, "MODULES", ("argparse",))
    after = result_identity(transport.EXPERIMENT, store, network, {}, {})
    assert (before != after) == differs
    assert before["data"].startswith(store.data_fingerprint)


def tuned_loss(found):
    """Return the loss of A before and after fine-tuning, and check that it falls."""
    before, after = (of["A"]["test"]["loss"] for of in (found.before, found.after))
    assert after < before - 0.1
    assert found.before["B"]["test"]["loss"] == pytest.approx(before, rel=1e-3)
    return before, after


@pytest.mark.parametrize(
    ("groups", "flags", "exact"),
    [
        ("permutations", MLP, ("permutations", "all groups")),
        ("all", MLP, ("all groups",)),
        pytest.param("all", VIT, ("all groups",), marks=pytest.mark.slow),
    ],
)
def test_transport_carries_whole_gain_to_moved_copy(measure_copy, groups, flags, exact):
    found = measure_copy(groups, *flags)
    before, after = tuned_loss(found)
    for way in transport.WAYS:
        reached = found.carried[way]["loss"]
        assert (reached == pytest.approx(after, rel=1e-3)) is (way in exact), way
        assert way in transport.KEYS or reached > after + 0.2 * (before - after), way


def test_transport_to_itself_equals_naive_addition(measure_copy):
    found = measure_copy(None, *MLP)
    _, after = tuned_loss(found)
    assert found.carried["naive"]["loss"] == pytest.approx(after, rel=1e-4)
    for way in transport.KEYS:
        assert found.curves[way]["test"]["loss"] == pytest.approx(found.curves["naive"]["test"]["loss"], rel=1e-4)
    assert found.carried["random order"]["loss"] > 1.05 * after


def test_transport_measures_and_draws_all_ways(results, config_of, draws_pairs):
    found = results(transport, "--steps", "20", "--test-examples", "397")
    at_zero = transport.SCALES.tolist().index(0.0)
    for way in transport.WAYS:
        for split in ("train", "test"):
            for metric in METRICS:
                values = found["curves"][way][split][metric]
                assert values[at_zero] == pytest.approx(found["before"]["B"][split][metric], rel=1e-5)
        best = int(np.argmin(found["curves"][way]["train"]["loss"]))
        carried = found["carried"][f"{way}{transport.BEST}"]
        assert carried == {"scale": transport.SCALES[best]} | {
            m: found["curves"][way]["test"][m][best] for m in METRICS
        }
        assert found["carried"][way]["scale"] == 1
    assert {*found["inner_products"]} == {"A to B, permutations", "A to B, all groups"}
    assert draws_pairs(transport, found)
    kept = sorted(path.name for path in Store(config_of(transport)).folders.networks.glob("*,transport.npz"))
    assert kept == ["seed-0,epochs=40,transport.npz", "seed-1,epochs=40,transport.npz"]


def scored(carried, before=2.0, after=1.0):
    """Return results in which these ways reach these losses at their best scale; accuracy is 1 − loss / 4."""

    def at(loss):
        return {"loss": loss, "accuracy": 1 - loss / 4}

    losses = {"naive": 2.1, "permutations": 1.8, "all groups": 1.2, "random order": 2.0} | carried
    ways = {name: at(loss) | {"scale": 1.0} for name, loss in losses.items()}
    ways |= {f"{name}{transport.BEST}": scores | {"scale": 0.5} for name, scores in ways.items()}
    ends = {"before": before, "after": after}
    fields = {name: {letter: {"test": at(loss)} for letter in "AB"} for name, loss in ends.items()}
    return results_of(transport.TransportResults, {**fields, "carried": ways, "config": {"setup": "mlp-digits"}})


@pytest.mark.parametrize(
    ("carried", "answer"),
    [
        ({}, True),
        ({"permutations": 1.1}, True),
        ({"naive": 1.1}, False),
        ({"random order": 1.1}, False),
        ({"all groups": 2.05, "random order": 2.1}, False),
    ],
)
def test_transport_answer_compares_with_naive_and_control(carried, answer):
    agrees, finding = transport.judge(scored(carried))
    assert agrees is answer
    assert "test loss from 2.000 to 1.000 and its accuracy from 50.0% to 75.0%" in finding
    if not carried:
        assert "naive -10% and -10%, permutations 20% and 20%, all groups 80% and 80%" in finding


def test_transport_answers_no_without_gain():
    agrees, finding = transport.judge(scored({}, after=2.0))
    assert agrees is False
    assert "nan%" in finding


def test_transport_table_has_range_over_pairs():
    one, two = scored({}), scored({"all groups": 1.4})
    row = {line.split("  ")[0]: line for line in transport.table(pool([one, two])).splitlines()}
    assert row["B + all groups"].split() == [
        *(
            "B",
            "+",
            "all",
            "groups",
            "1.00",
            "1.3000",
            "(1.2000–1.4000)",
            "0.6750",
            "(0.6500–0.7000)",
            "70%",
            "/",
            "70%",
        )
    ]
    assert max(map(len, row.values())) <= 100
    assert row["B"].split() == ["B", "2.0000", "(2.0000–2.0000)", "0.5000", "(0.5000–0.5000)"]


def test_new_task_of_images_turns_them(monkeypatch):
    images = np.random.default_rng(0).integers(17, size=(3, 8, 8, 1), dtype=np.uint8)
    split = Split(images, np.arange(3, dtype=np.int32))
    turned = transport.new_task("mlp-digits", Splits(split, split)).test
    assert (turned.inputs.dtype, turned.inputs.shape) == (np.uint8, images.shape)
    assert np.array_equal(turned.labels, split.labels)
    assert not turned.inputs[:, 0, 0].any()  # the corners are outside of the image
    monkeypatch.setattr(transport, "ANGLE", 90)
    assert np.array_equal(transport.turn(images), np.rot90(images, axes=(1, 2)))


def test_new_task_of_text_is_python_code():
    text = Split(np.zeros((1, 64), np.uint8), np.zeros((1, 64), np.int32))
    train, test = transport.new_task("decoder-text", Splits(text, text))
    assert train.inputs.shape[1:] == (64,)
    assert 8 < len(train.inputs) / len(test.inputs) < 10
    assert decode(train.inputs[0]).startswith("# Author: Steven J. Bethard")
    assert np.array_equal(train.labels[:, :-1], train.inputs[:, 1:])
    assert "def " in decode(test.inputs.ravel())
    assert train.labels.max() < len(SYMBOLS)


def test_transport_refuses_groups():
    with pytest.raises(UserError, match="--groups"):
        cli.parse(transport.TransportConfig, "", ["--groups", "all"])


@pytest.mark.slow
def test_transport_plan_lists_both_matchings(config_of, capsys):
    from mcomb.lab.runs.command import main

    main(transport.EXPERIMENT, "", ["--setup", "mlp-digits", "--width", "3", "--plan"])
    printed = capsys.readouterr().out
    assert "match seed-0 to seed-1 by weights " in printed
    assert "match seed-0 to seed-1 by weights, all groups" in printed
