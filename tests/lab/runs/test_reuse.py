"""Cached results are used only if their identity is unchanged."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from experiments import linear, width
from mcomb import read_checkpoint, write_checkpoint
from mcomb.errors import UserError
from mcomb.io.paths import write_json
from mcomb.lab import algorithm_versions
from mcomb.lab.cache.store import Store
from mcomb.lab.data.datasets import Split, Splits
from mcomb.lab.flags import convert_config
from mcomb.lab.runs.run import read_results, run
from mcomb.lab.setups import SETUPS, load_data
from mcomb.lab.training.checkpoints import TrainingCheckpoints
from mcomb.lab.training.train import initial_state

CONFIG = linear.LinearConfig(setup="mlp-digits", width=1, epochs=2, points=3, train_examples=50, test_examples=50)


def draw(results, folder):
    """Draw nothing, to save time."""
    for kind in ("png", "pdf"):
        (folder / f"linear.{kind}").write_text("a figure")


LINE = dataclasses.replace(linear.EXPERIMENT, draw=draw)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A read-only run folder with results of `linear`."""
    out = tmp_path_factory.mktemp("finished")
    run(LINE, dataclasses.replace(CONFIG, out=out))
    return out


@pytest.fixture
def config(finished, tmp_path):
    """The config of that run, on a copy of its folder."""
    shutil.copytree(finished, tmp_path / "runs")
    return dataclasses.replace(CONFIG, out=tmp_path / "runs")


def stored(config):
    return json.loads((Store(config).folder("linear") / "results.json").read_text())


def change_network(config, seed):
    """Replace a trained network, as if it had been retrained elsewhere."""
    store = Store(config)
    recipe = store.networks.recipe
    (folder,) = store.folders.home.glob(f"networks/seed-{seed},*")
    made_from = json.loads((folder / "2" / "config" / "metadata").read_text())
    checkpoints = TrainingCheckpoints(folder, {"seed": made_from["seed"]})
    target = initial_state(store.setup.init(config.width, 7), recipe, 1400)
    state = checkpoints.restore(target)
    shutil.rmtree(folder)
    checkpoints.made_from = {
        k: v for k, v in made_from.items() if k in dataclasses.asdict(recipe) or k in ("setup", "width", "seed")
    }
    checkpoints.save(2, state._replace(params=target.params))


def test_results_are_reused_if_identity_is_equal(config, capsys):
    before = stored(config)
    after = run(LINE, config)
    assert stored(config) == before
    assert after.seconds == before["seconds"]
    assert "again" not in capsys.readouterr().err
    assert read_results(LINE, config).curves == before["curves"]


def test_results_with_train_temperatures_are_redrawn(config, capsys):
    folder, before = Store(config).folder("linear"), stored(config)
    assert "temperatures" not in before["config"]
    write_json(folder / "results.json", {k: v for k, v in before.items() if k != "digest"} | {"recalibrated": {}})
    figures = json.loads((folder / ".figures.json").read_text())
    write_json(folder / ".figures.json", {k: v for k, v in figures.items() if k not in ("version", "digest")})
    drawn = []
    after = run(dataclasses.replace(LINE, draw=lambda *args: draw(*args) or drawn.append(args)), config)
    assert after.seconds == before["seconds"]
    assert len(drawn) == 1
    assert "again" not in capsys.readouterr().err


def test_temperatures_have_own_folder_and_results(config):
    flagged = dataclasses.replace(config, temperatures=True)
    assert "temperatures" in Store(flagged).folder("linear").name.split(",")
    assert read_results(LINE, flagged) is None
    assert read_results(LINE, config).curves == run(LINE, flagged).curves
    assert read_results(LINE, flagged).config["temperatures"] is True


def test_results_depend_on_networks(config, capsys):
    before = stored(config)
    change_network(config, 1)
    assert read_results(LINE, config) is None
    after = run(LINE, config)
    assert after.curves != before["curves"]
    assert after.networks["A"] == before["networks"]["A"]
    assert after.networks["B"] != before["networks"]["B"]
    assert "was made from other networks, matchings: measuring again" in capsys.readouterr().err


def test_results_depend_on_matchings(config, capsys):
    before = stored(config)
    (path,) = Store(config).folders.home.glob("matchings/*.npz")
    with np.load(path) as file:
        kept = dict(file)
    np.savez(path, **kept | {name: value[::-1] for name, value in kept.items() if name.startswith("perms/")})
    assert read_results(LINE, config) is None
    after = run(LINE, config)
    assert after.curves["aligned"] != before["curves"]["aligned"]
    assert after.curves["naive"] == before["curves"]["naive"]
    assert "was made from other matchings: measuring again" in capsys.readouterr().err


def test_results_depend_on_number_of_devices(config, monkeypatch, capsys):
    before = stored(config)
    several = len(jax.devices()) > 1
    # Use one device if there are several, and otherwise a fake description of devices.
    if several:
        first = jax.devices()[:1]
        monkeypatch.setattr(jax, "devices", lambda: first)
    else:
        monkeypatch.setattr("mcomb.lab.runs.reuse.describe_devices", lambda: "2 × cpu")
    assert read_results(LINE, config) is None
    after = run(LINE, config)
    assert after.devices != before["devices"]
    assert after.networks == before["networks"]
    out = capsys.readouterr()
    assert "was made from other devices: measuring again" in out.err
    assert "training" not in out.err


def test_results_depend_on_data(config, monkeypatch, capsys):
    setup = SETUPS["mlp-digits"]
    train, test = setup.dataset.load(None)
    reordered = Splits(train, Split(test.inputs[::-1], test.labels[::-1]))
    other = dataclasses.replace(setup, dataset=dataclasses.replace(setup.dataset, load=lambda path: reordered))
    monkeypatch.setitem(SETUPS, "mlp-digits", other)
    load_data.cache_clear()
    try:
        assert read_results(LINE, config) is None
        run(LINE, config)
    finally:
        load_data.cache_clear()
    assert "was made from other data: measuring again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [("MEASUREMENT", "was made from other version: measuring again"), ("MATCHING", "versions: matching again")],
)
def test_results_depend_on_algorithm_versions(name, said, config, monkeypatch, capsys):
    monkeypatch.setattr(algorithm_versions, name, getattr(algorithm_versions, name) + 1)
    if name == "MEASUREMENT":
        assert read_results(LINE, config) is None
    run(LINE, config)
    assert said in capsys.readouterr().err


def test_network_of_older_training_version_is_rejected(config, monkeypatch):
    monkeypatch.setattr(algorithm_versions, "TRAINING", 2)
    with pytest.raises(UserError, match=r"seed-0.* was trained by version 1 .* version 2: move it away"):
        run(LINE, config)


def test_results_without_digest_are_measured_again(config, capsys):
    path = Store(config).folder("linear") / "results.json"
    old = stored(config)
    del old["digest"]
    path.write_text(json.dumps(old))
    run(LINE, config)
    assert capsys.readouterr().err.count("is damaged or has no digest: measuring again") == 1
    assert stored(config)["version"] == algorithm_versions.MEASUREMENT


@pytest.mark.slow
def test_results_depend_on_results_of_parts(config, monkeypatch, capsys):
    two = {name: width.WIDTH_SWEEPS[name] for name in ("linear", "bernoulli")}
    monkeypatch.setattr(width, "WIDTH_SWEEPS", two)
    gathering = convert_config(config, width.WidthConfig, widths=(2, 1), samples=1)
    before = run(width.EXPERIMENT, gathering)
    assert before.widths == [1, 2]
    assert read_results(width.EXPERIMENT, gathering).by_width == before.by_width
    change_network(config, 1)
    assert read_results(width.EXPERIMENT, gathering) is None
    capsys.readouterr()
    after = run(width.EXPERIMENT, gathering)
    assert "was made from other parts: measuring again" in capsys.readouterr().err
    for name, rows in after.by_width.items():
        assert rows[0] != before.by_width[name][0]
        assert rows[1] == before.by_width[name][1]


def test_checkpoints_of_same_name_have_own_folders(config, tmp_path):
    (trained,) = Store(config).folders.home.glob("networks/seed-0,*")
    params = read_checkpoint(trained)
    folders = [tmp_path / name / "network" for name in ("x", "y")]
    for scale, folder in enumerate(folders, 1):
        write_checkpoint(folder, jax.tree.map(lambda leaf, scale=scale: scale * leaf, params))
    with_a, with_b = (dataclasses.replace(config, checkpoint_a=folder) for folder in folders)
    assert Store(with_a).folder("linear") != Store(with_b).folder("linear")
    first = run(LINE, with_a)
    second = run(LINE, with_b)
    assert first.networks["A"] != second.networks["A"]
    assert stored(with_a)["curves"] == first.curves
    both = dataclasses.replace(config, checkpoint_a=folders[0], checkpoint_b=folders[1])
    a, b = Store(both).networks.get("AB").values()
    assert a.name != b.name
