"""The cache of networks and matchings."""

import dataclasses
import io
import shutil
import time
from pathlib import Path
from threading import Event

import jax
import numpy as np
import pytest
from numerics import assert_equal

from experiments.linear import LinearConfig
from experiments.width import WidthConfig
from mcomb import write_checkpoint
from mcomb.errors import Diverged, UserError
from mcomb.io.fingerprints import fingerprint
from mcomb.lab import run_folders, setups
from mcomb.lab.cache import durations, matchings
from mcomb.lab.cache.matchings import MatchingKey
from mcomb.lab.cache.networks import NotKeptError
from mcomb.lab.cache.store import Store
from mcomb.lab.flags import Config, SweepConfig
from mcomb.lab.setups import SETUPS
from mcomb.lab.training import side_by_side
from mcomb.lab.training import train as training
from mcomb.lab.training.train import Stopped, Training, compile_training
from mcomb.matching.matching import Matching
from mcomb.matching.weights import match_weights
from mcomb.runtime.batching import MEMORY_VARIABLE
from mcomb.runtime.devices import device_mesh

CONFIG = Config(setup="mlp-digits", width=1, epochs=4)
RECIPE = SETUPS["mlp-digits"].recipe


def match(store, a, b, matcher="weights", restarts=1, make=True):
    """The matching of B to A."""
    return store.matchings.get({"A": a, "B": b}, MatchingKey("B", "A", matcher, restarts), make)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A read-only folder with networks A and B and their matching."""
    out = tmp_path_factory.mktemp("kept")
    store = Store(dataclasses.replace(CONFIG, out=out))
    match(store, *store.networks.get("AB").values(), "weights")
    return out


@pytest.fixture
def store(kept, tmp_path):
    """A store on a copy of that folder."""
    shutil.copytree(kept, tmp_path / "runs")
    return Store(dataclasses.replace(CONFIG, out=tmp_path / "runs"))


@pytest.fixture
def no_work(monkeypatch):
    """Training and matching fail the test."""
    for module, name in ((side_by_side, "train"), (matchings, "as_matcher"), (matchings, "match_weights")):
        monkeypatch.setattr(module, name, lambda *args, **options: pytest.fail("work was repeated"))


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (Config(), "uniform"),
        (
            SweepConfig(train_images=50, epochs=60, points=3, samples=2),
            "uniform,epochs=60,train-images=50,points=3,samples=2",
        ),
        (SweepConfig(batch_size=100, learning_rate=0.1), "uniform"),  # equal to the recipe
        (SweepConfig(learning_rate=0.05, weight_decay=0.0), "uniform,learning-rate=0.05,weight-decay=0"),
        (SweepConfig(seed=1, seed_b=0, matcher="ste", repair=True), "uniform,matcher=ste,seed=1,seed-b=0,repair"),
        (SweepConfig(out=Path("x"), data_dir=Path("y"), vmap_size=3, steps_per_call=2, checkpoint_every=1), "uniform"),
        (LinearConfig(range=(-1.0, 2.0), dtype="bfloat16"), "uniform,dtype=bfloat16,range=-1..2"),
        (WidthConfig(widths=(2, 1)), "uniform,widths=2..1"),
    ],
)
def test_folder_name_has_flags_that_change_results(config, name):
    config = dataclasses.replace(config, setup="mlp-digits", width=2)
    assert Store(config).folder("uniform") == config.out / "mlp-digits" / "width-2" / name


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


def test_matching_name_has_dtype_if_matcher_computes():
    plain, other = (Store(dataclasses.replace(CONFIG, dtype=dtype)) for dtype in ("float32", "bfloat16"))
    assert other.folders.matching("A", "B", "weights") == plain.folders.matching("A", "B", "weights")
    assert plain.folders.matching("A", "B", "ste").name == "B-to-A,matcher=ste.npz"
    assert other.folders.matching("A", "B", "ste").name == "B-to-A,matcher=ste,dtype=bfloat16.npz"


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (MatchingKey("B", "A"), "B to A"),
        (MatchingKey("C", "B", "weights"), "C to B, weights"),
        (MatchingKey("B", "A", "ste"), "B to A, ste"),
        (MatchingKey("B", "A", "weights", 8), "B to A, weights best of 8"),
    ],
)
def test_matching_key_has_its_name_in_results(key, name):
    assert str(key) == name


def test_matching_name_fits_file_system_limit():
    store, long = Store(CONFIG), ",".join(f"option-{i}=0.001" for i in range(12))
    paths = [
        store.folders.matching(f"seed-0,{long}", f"seed-{i},{long}", "ste", restarts=restarts).name
        for i in (1, 2)
        for restarts in (1, 2)
    ]
    assert len({*paths}) == 4
    assert max(map(len, paths)) < 200


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


def test_store_reads_cached_objects(store, no_work, capsys):
    for make in (True, False):
        again = Store(store.config)
        a, b = again.networks.get("AB", make).values()
        assert (a.name, b.name) == ("seed-0,epochs=4", "seed-1,epochs=4")
        assert a.fingerprint == fingerprint(a.params) != b.fingerprint
        found = match(again, a, b, "weights", make=make)
        assert found.seconds > 0
        assert found.fingerprint == fingerprint(found.matching.perms)
    assert capsys.readouterr().err == ""


def test_matching_roundtrips_through_file(tmp_path):
    store = Store(dataclasses.replace(CONFIG, epochs=0, out=tmp_path))
    a, b = store.networks.get("AB").values()
    for matcher, restarts in (("weights", 1), ("weights", 3), ("activations", 1)):
        found, again = (match(store, a, b, matcher, restarts) for _ in range(2))
        for field in dataclasses.fields(Matching):
            assert_equal(getattr(again.matching, field.name), getattr(found.matching, field.name))
        assert (again.seconds, again.fingerprint) == (found.seconds, found.fingerprint)
    pair = "seed-1,epochs=0-to-seed-0,epochs=0"
    kept = {path.name for path in store.folders.home.glob("matchings/*.npz")}
    assert kept == {f"{pair}.npz", f"{pair},restarts=3.npz", f"{pair},matcher=activations.npz"}


@pytest.mark.parametrize("matcher", ["weights", "activations"])
def test_matching_of_first_process_is_used_by_all(matcher, tmp_path, monkeypatch):
    store = Store(dataclasses.replace(CONFIG, epochs=0, out=tmp_path))
    a, b = store.networks.get("AB").values()
    shared = []

    def from_first(make, *args, **options):
        shared.append(make(*args, **options))
        return shared[-1]

    monkeypatch.setattr(matchings, "from_first", from_first)
    assert match(store, a, b, matcher) is shared[-1]


def test_data_differing_between_processes_are_detected(monkeypatch):
    compared = {}
    monkeypatch.setattr(setups, "require_agreement", compared.__setitem__)
    setups.load_data.cache_clear()
    _, found = setups.load_data("mlp-digits", None)
    assert compared == {"images": found}


def matching_file(store):
    (path,) = store.folders.home.glob("matchings/*.npz")
    return path


def as_npy(content):
    buffer = io.BytesIO()
    np.save(buffer, np.arange(3))
    return buffer.getvalue()


def with_a_wrong_directory(content):
    """Flip the bit of the zip directory that marks a member as encrypted."""
    at = content.index(b"PK\x01\x02") + 8
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:100],
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1],
        lambda content: b"not a matching",
        lambda content: bytes(range(256)) * 9,
        lambda content: content.replace(b"NUMPY", b"NUMBY"),
        with_a_wrong_directory,
        as_npy,
    ],
    ids=["empty", "a start", "half", "but one", "text", "garbage", "a header", "a directory", "an array"],
)
def test_matching_file_truncated_is_recomputed(store, damage, capsys):
    a, b, path = *store.networks.get("AB").values(), matching_file(store)
    before = match(store, a, b, "weights")
    path.write_bytes(damage(path.read_bytes()))
    after = match(store, a, b, "weights")
    assert after.fingerprint == before.fingerprint
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if str(path) in line] == [line for line in lines if "matching again" in line]
    assert len([line for line in lines if line.startswith(f"{path} cannot be read (")]) == 1
    assert len(lines) == 2  # that, and that it is matching
    assert match(store, a, b, "weights").matching.trace == before.matching.trace
    assert capsys.readouterr().err == ""


def test_matching_file_with_wrong_byte_is_never_misread(store, capsys):
    path = matching_file(store)
    whole = path.read_bytes()
    with np.load(path) as file:
        made_from = file["made_from"].tolist()
    expected = matchings.read_matching(path, made_from, store.spec)
    read = 0
    for at in range(0, len(whole), 11):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        if found := matchings.read_matching(path, made_from, store.spec):
            read += 1
            assert_equal(dataclasses.asdict(found), dataclasses.asdict(expected))
    assert read < len(whole) / 11
    assert all("matching again" in line for line in capsys.readouterr().err.splitlines())


def change_kept(path, **changes):
    with np.load(path) as file:
        content = dict(file) | changes
    np.savez(path, **{name: value for name, value in content.items() if value is not None})


OTHER = "belongs to other networks, data or versions: matching again"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"made_from": ["x", "y", "version 1"]}, OTHER),
        ({"seconds": None}, "is from an older version: matching again"),
        ({"perms/dense2": None}, "is from an older version: matching again"),
    ],
)
def test_matching_of_other_networks_is_recomputed(changes, said, store, capsys):
    a, b, path = *store.networks.get("AB").values(), matching_file(store)
    before = match(store, a, b, "weights")
    change_kept(path, **changes)
    assert match(store, a, b, "weights").fingerprint == before.fingerprint
    assert capsys.readouterr().err.splitlines().count(f"{path} {said}") == 1


def test_matching_depends_on_data_only_if_matcher_does(store, monkeypatch, capsys):
    a, b = store.networks.get("AB").values()
    for matcher in ("weights", "activations"):
        match(store, a, b, matcher)
    data = store.data
    other = setups.LoadedData(data, "another fingerprint")
    monkeypatch.setattr(matchings, "load_data", lambda setup, data_dir: other)
    capsys.readouterr()
    for matcher, anew in (("weights", 0), ("activations", 1), ("activations", 0)):
        match(store, a, b, matcher)
        assert capsys.readouterr().err.count(OTHER) == anew


def test_matching_that_is_no_permutation_is_rejected(store):
    b = store.networks.get("B")["B"]
    perms = {name: np.arange(size) for name, size in store.spec.sizes.items()}
    assert_equal(store.permute(b, Matching(perms, 0.0, ())), b.params)
    twice = perms | {"dense1": np.zeros_like(perms["dense1"])}
    with pytest.raises(UserError, match="permutation dense1 does not have each index"):
        store.permute(b, Matching(twice, 0.0, ()))


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


@pytest.mark.parametrize("name", ["net/d/..", "...safetensors", "-", "a,seed=1", "é" * 60, "x" * 200], ids=range(6))
def test_given_network_name_stays_inside_output_folder(name, tmp_path):
    place, out = tmp_path / "given" / name, tmp_path / "out"
    (tmp_path / "given").mkdir()
    network = SETUPS["mlp-digits"].init(1, seed=0)
    write_checkpoint(tmp_path / "given" / name.removesuffix("/d/.."), network)
    given = Store(dataclasses.replace(CONFIG, out=out, checkpoint_a=place, checkpoint_b=place))
    folder = given.folder("uniform").resolve()
    assert folder.parent == given.folders.home.resolve()
    folder.mkdir(parents=True)  # its name is not too long
    a, b = given.networks.get("AB").values()
    match(given, a, b, "weights")
    assert len(list(given.folders.home.glob("matchings/*.npz"))) == len(list(tmp_path.rglob("*.npz"))) == 1


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


def test_a_long_training_says_so_at_its_start(monkeypatch, capsys):
    mesh = device_mesh()
    monkeypatch.setattr(side_by_side, "matrix_rate", lambda mesh: 1e12)
    side_by_side.say_if_long(3e15, mesh, "training seed-0")
    assert capsys.readouterr().err == ""
    side_by_side.say_if_long(1e18, mesh, "training seed-0")
    assert "training seed-0 takes 12 days or more on" in capsys.readouterr().err


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


def test_matching_seconds_exclude_compilation(tmp_path, monkeypatch):
    def compile_and_match(*args, **options):
        time.sleep(0.2)
        for event in durations.COMPILATION:
            jax.monitoring.record_event_duration_secs(event, 0.1)
        return match_weights(*args, **options)

    monkeypatch.setattr(matchings, "match_weights", compile_and_match)
    store = Store(dataclasses.replace(CONFIG, epochs=0, out=tmp_path))
    found = match(store, *store.networks.get("AB").values(), "weights")
    assert 0 < found.seconds <= store.durations.seconds["matching"] - 0.19


def test_timed_adds_up_seconds_of_same_kind(store):
    for _ in range(2):
        with store.durations.timed("sleeping"):
            pass
    first = store.durations.seconds["sleeping"]
    with store.durations.timed("sleeping"):
        pass
    assert store.durations.seconds["sleeping"] >= first > 0
