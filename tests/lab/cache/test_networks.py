"""Networks are trained once, resumed where they stopped, and read only if they are whole."""

import dataclasses
import shutil
from threading import Event

import jax
import numpy as np
import pytest
from numerics import assert_equal

from mcomb import write_checkpoint
from mcomb.errors import Diverged, UserError
from mcomb.io.fingerprints import fingerprint
from mcomb.lab import run_folders
from mcomb.lab.cache.networks import NotKeptError
from mcomb.lab.cache.store import Store
from mcomb.lab.flags import Config
from mcomb.lab.setups import SETUPS
from mcomb.lab.training import side_by_side
from mcomb.lab.training import train as training
from mcomb.lab.training.train import Stopped, Training, compile_training
from mcomb.runtime.batching import MEMORY_VARIABLE
from mcomb.runtime.devices import device_mesh

CONFIG = Config(setup="mlp-digits", width=1, epochs=4)
RECIPE = SETUPS["mlp-digits"].recipe


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, "seed-0 seed-1 seed-2"),
        ({"seed": 2}, "seed-6 seed-7 seed-8"),
        ({"seed": 2, "seed_a": 0, "seed_c": 9}, "seed-0 seed-7 seed-9"),
        ({"epochs": 3, "weight_decay": 0.5}, "seed-0,epochs=3,weight-decay=0.5 seed-1,epochs=3,weight-decay=0.5"),
        ({"epochs": 3, "dtype": "bfloat16"}, "seed-0,epochs=3,dtype=bfloat16 seed-1,epochs=3,dtype=bfloat16"),
        ({"epochs": RECIPE.epochs, "checkpoint_every": 2, "matcher": "ste"}, "seed-0 seed-1 seed-2"),
    ],
)
def test_network_name_has_seed_and_changed_flags(changes, names, tmp_path):
    store = Store(Config(setup="mlp-digits", width=1, out=tmp_path / "runs", **changes))
    for letter, name in zip("ABC", names.split(), strict=False):
        with pytest.raises(NotKeptError, match=f"^{name}$"):
            store.networks.get(letter, make=False)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_network_trained_in_bfloat16_has_own_name(tmp_path):
    stores = [Store(dataclasses.replace(CONFIG, epochs=1, out=tmp_path, dtype=d)) for d in ("float32", "bfloat16")]
    plain, other = (store.networks.get("A")["A"] for store in stores)
    assert plain.fingerprint != other.fingerprint
    assert {leaf.dtype.name for leaf in jax.tree.leaves(other.params)} == {"float32"}
    difference = np.abs(plain.params["dense2"]["kernel"] - other.params["dense2"]["kernel"]).max()
    assert 0 < difference < 0.1 * np.abs(plain.params["dense2"]["kernel"]).max()
    other_folder = tmp_path / "mlp-digits" / "width-1" / "networks" / other.name
    shutil.rmtree(other_folder)
    other_folder.with_name(plain.name).rename(other_folder)
    with pytest.raises(UserError, match="was trained with dtype = None, not bfloat16"):
        Store(stores[1].config).networks.get("A")


def stopping(train):
    """Interrupt training after the second epoch of seed 0."""

    def train_two(apply, state, data, recipe, seed, **options):
        for item in train(apply, state, data, recipe, seed, **options):
            yield item
            if seed == 0 and item[0] == 2:
                raise KeyboardInterrupt

    return train_two


@pytest.mark.slow
def test_training_resumes_to_uninterrupted_result(store, tmp_path, monkeypatch):
    config = dataclasses.replace(store.config, out=tmp_path / "stopped", checkpoint_every=1)
    real = side_by_side.train

    monkeypatch.setattr(side_by_side, "train", stopping(real))
    with pytest.raises(KeyboardInterrupt):
        Store(config).networks.get("AB")
    (folder,) = (tmp_path / "stopped").rglob("seed-0,epochs=4")
    assert {path.name for path in folder.iterdir()} == {"1", "2"}
    monkeypatch.setattr(side_by_side, "train", real)
    assert Store(config).networks.get("AB")["A"].fingerprint == store.networks.get("A")["A"].fingerprint


class StopsAfter(Event):
    """An event that is set after a number of queries."""

    def __init__(self, times):
        super().__init__()
        self.left = times

    def is_set(self):
        self.left -= 1
        return self.left < 0


@pytest.mark.slow
def test_training_resumes_within_epoch(tmp_path, monkeypatch):
    """Stop after 20 steps and again 15 steps later, with 14 steps per epoch."""
    config = dataclasses.replace(CONFIG, steps_per_call=1, out=tmp_path / "stopped")
    whole = Store(dataclasses.replace(config, out=tmp_path / "whole")).networks.get("A")["A"]
    (folder,) = (tmp_path / "whole").rglob("seed-0*/")
    folder = tmp_path / "stopped" / folder.relative_to(tmp_path / "whole")
    real = side_by_side.train
    for steps, total in ((20, 20), (15, 35)):
        with monkeypatch.context() as patch:
            event = StopsAfter(steps)
            patch.setattr(side_by_side, "train", lambda *args, event=event, **how: real(*args, **how | {"stop": event}))
            with pytest.raises(Stopped):
                Store(config).networks.get("A")
        assert max(int(path.name) for path in (folder / "stopped").iterdir()) == total
    assert Store(config).networks.get("A")["A"].fingerprint == whole.fingerprint
    assert not (folder / "stopped").exists()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_given_network_with_nonfinite_weight_is_rejected(value, store, tmp_path):
    params = store.setup.init(1, seed=0)
    params["dense2"]["kernel"] = params["dense2"]["kernel"].at[0, 0].set(value)
    write_checkpoint(tmp_path / "mine.safetensors", params)
    given = Store(dataclasses.replace(store.config, checkpoint_a=tmp_path / "mine.safetensors"))
    with pytest.raises(UserError, match=r"1 of 256 entries of dense2/kernel in .*mine\.safetensors are not finite"):
        given.networks.get("A")


def devices_of(store, seed):
    return store.networks._checkpoints(Training(seed)).devices


def train(store, *seeds):
    """The networks of some seeds, by seed."""
    return {one.seed: network for one, network in store.networks.train([Training(seed) for seed in seeds]).items()}


@pytest.mark.slow
def test_network_is_independent_of_networks_beside_it(tmp_path):
    config = Config(setup="mlp-digits", width=1, epochs=2, out=tmp_path / "two")
    three = Store(dataclasses.replace(config, out=tmp_path / "three"))
    two = Store(config)
    count = len(jax.local_devices())
    for seeds in ((0, 1), (1, 0)):  # the second time, both are cached
        networks = train(two, *seeds)
        assert list(networks) == list(seeds)
    others = train(three, 2, 1, 0)
    assert [devices_of(two, seed) for seed in (0, 1)] == [[f"{max(1, count // 2)} × cpu"]] * 2
    assert [devices_of(three, seed) for seed in (0, 1, 2)] == [[f"{max(1, count // 3)} × cpu"]] * 3
    if count // 2 == count // 3 or count < 3:
        for seed in (0, 1):
            assert_equal(networks[seed].params, others[seed].params)


@pytest.mark.slow
def test_training_resumed_alone_keeps_its_devices(tmp_path, monkeypatch):
    config = Config(setup="mlp-digits", width=1, epochs=4, checkpoint_every=1, out=tmp_path / "stopped")
    real, whole = side_by_side.train, train(Store(dataclasses.replace(config, out=tmp_path / "whole")), 0, 1)

    monkeypatch.setattr(side_by_side, "train", stopping(real))
    with pytest.raises(KeyboardInterrupt):
        train(Store(config), 0, 1)
    monkeypatch.setattr(side_by_side, "train", real)
    both = [Training(0), Training(1)]
    assert Store(config).networks._unfinished(both) == both
    assert_equal(train(Store(config), 0)[0].params, whole[0].params)
    assert_equal(train(Store(config), 0, 1)[1].params, whole[1].params)


def needed(config, devices):
    """Return the memory in GB that XLA reports for a training step on a number of devices."""
    store, mesh = Store(config), device_mesh(jax.devices()[:devices])
    shapes = store.setup.shapes(config.width)
    return compile_training(store.apply, shapes, store.data.train, store.networks.recipe, mesh).memory / 1e9


def test_networks_train_in_turn_if_memory_is_small(kept, tmp_path, monkeypatch, capsys):
    config = dataclasses.replace(CONFIG, out=tmp_path)
    share = max(1, len(jax.devices()) // 2)
    monkeypatch.setenv(MEMORY_VARIABLE, str(1.5 * needed(config, share)))
    networks = Store(config).networks.get("AB")
    said = capsys.readouterr().err
    assert said.count(": waiting for memory (") == (len(jax.devices()) > 1)
    _, second = (line.split(":")[0] for line in said.splitlines() if "100%" in line)
    assert f"{second}: waiting for memory" in said or len(jax.devices()) == 1
    before = Store(dataclasses.replace(config, out=kept)).networks.get("AB")
    assert [networks[x].fingerprint for x in "AB"] == [before[x].fingerprint for x in "AB"]


@pytest.mark.skipif(len(jax.devices()) == 1, reason="there is one device")
def test_network_trains_on_one_device_if_memory_is_small(tmp_path, monkeypatch, capsys):
    config = dataclasses.replace(CONFIG, out=tmp_path)
    least, most = needed(config, 1), needed(config, len(jax.devices()))
    assert least < most
    monkeypatch.setenv(MEMORY_VARIABLE, str((least + most) / 2))
    store = Store(config)
    store.networks.get("A")
    assert devices_of(store, 0) == ["1 × cpu"]
    assert "on 1 × cpu to fit into" in capsys.readouterr().err


@pytest.mark.parametrize(("width", "memory"), [(1, "0.0001"), (20_000, "8")])
def test_network_exceeding_memory_is_rejected(width, memory, tmp_path, monkeypatch):
    """Reject it before any allocation: the weights of the wide network alone would take a terabyte."""
    monkeypatch.setenv(MEMORY_VARIABLE, memory)
    store = Store(dataclasses.replace(CONFIG, width=width, out=tmp_path))
    with pytest.raises(UserError, match=r"seed-\d,epochs=4 needs .*B of memory, but only .* is free: reduce --width"):
        store.networks.get("AB")
    assert not [path for path in tmp_path.rglob("networks/*") if path.is_dir()]


def test_training_that_diverges_keeps_last_good_checkpoint(tmp_path, monkeypatch):
    """Diverge in the third epoch by an absurd learning rate."""
    real = training.learning_rate

    def schedule(recipe, steps_per_epoch):
        rate = real(recipe, steps_per_epoch)
        return lambda step: rate(step) + 1e30 * (step >= 2 * steps_per_epoch)

    monkeypatch.setattr(training, "learning_rate", schedule)
    training.make_optimizer.cache_clear()
    try:
        with pytest.raises(Diverged, match=r"in epoch 3 \(earlier checkpoints are intact\)"):
            Store(Config(setup="mlp-digits", width=1, epochs=5, checkpoint_every=1, out=tmp_path)).networks.get("A")
    finally:
        training.make_optimizer.cache_clear()
    assert {path.name for path in tmp_path.rglob("seed-0,epochs=5/*")} == {"1", "2"}


def test_untrained_networks_depend_on_seed(tmp_path):
    store = Store(dataclasses.replace(CONFIG, epochs=0, out=tmp_path))
    assert_equal(store.networks.get("B")["B"].params, store.setup.init(1, seed=1))


def test_given_checkpoint_replaces_training(store, tmp_path, no_work):
    params = store.networks.get("A")["A"].params
    write_checkpoint(tmp_path / "mine", params)
    given = Store(dataclasses.replace(store.config, checkpoint_b=tmp_path / "mine")).networks.get("B")["B"]
    assert_equal(given.params, params)
    assert given.name == f"mine-{fingerprint(params)}"


@pytest.fixture
def pretrained(store, tmp_path, monkeypatch):
    """A store whose networks come with the repository: A and B of this setup and width."""
    monkeypatch.setattr(run_folders, "PRETRAINED", tmp_path / "pretrained")
    for seed, letter in enumerate("AB"):
        path = run_folders.pretrained_path("mlp-digits", 1, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_checkpoint(path, store.networks.get(letter)[letter].params)
    config = dataclasses.replace(store.config, epochs=None, pretrained=True, out=tmp_path / "others")
    return Store(config)


def test_pretrained_networks_are_used_and_named(pretrained, store, no_work):
    for seed, letter in enumerate("AB"):
        network, expected = pretrained.networks.get(letter)[letter], store.networks.get(letter)[letter]
        assert_equal(network.params, expected.params)
        assert network.fingerprint == expected.fingerprint
        assert network.name == f"pretrained-{seed}-{expected.fingerprint}"
    assert pretrained.folder("linear").name == "linear,pretrained"
    assert not pretrained.config.out.exists()


def test_pretrained_error_lists_available_networks(pretrained):
    with pytest.raises(UserError, match=r"No pretrained network mlp-digits/width-1/seed-2\.saf.* the seeds 0, 1\.$"):
        pretrained.networks.get("C")
    for name in ("tiny10/width-2", "tiny10/width-10"):
        (run_folders.PRETRAINED / name).mkdir(parents=True)
    wider = Store(dataclasses.replace(pretrained.config, width=8))
    with pytest.raises(UserError, match=r"or use mlp-digits --width 1, tiny10 --width 2 or 10\.$"):
        wider.networks.get("A")
    retrained = Store(dataclasses.replace(pretrained.config, learning_rate=0.5))
    with pytest.raises(UserError, match="fixed recipe: remove --learning-rate"):
        retrained.networks.get("A")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed_a": 1}, "A and B both have seed 1"),
        ({"seed_b": 0}, "A and B both have seed 0"),
        ({"seed_c": 1}, "B and C both have seed 1"),
        ({"seed_b": 0, "pretrained": True}, "A and B both have seed 0"),
    ],
)
def test_networks_with_equal_seeds_are_rejected(changes, said, tmp_path):
    config = Config(setup="mlp-digits", width=1, out=tmp_path / "runs", **changes)
    with pytest.raises(UserError, match=f"Networks {said}: use different seeds"):
        Store(config).networks.get("ABC")
    given = dataclasses.replace(config, **{f"checkpoint_{letter}": tmp_path for letter in "ab"})
    assert list(Store(given).networks.trainings("ABC")) == ([] if config.pretrained else ["C"])


def test_checkpoint_of_other_width_is_rejected(store):
    (folder,) = store.folders.home.glob("networks/seed-0*")
    wider = Store(dataclasses.replace(store.config, width=3, checkpoint_a=folder))
    with pytest.raises(UserError, match=r"of shape \(16,\) where the model has \(48,\)"):
        wider.networks.get("A")
