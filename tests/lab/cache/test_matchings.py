"""Matchings are found once, and only whole ones of the same networks are reused."""

import dataclasses
import io
import time

import jax
import numpy as np
import pytest
from groups import NETWORKS
from numerics import assert_equal

from mcomb import Matcher, derive_spec, weights
from mcomb.io.fingerprints import fingerprint
from mcomb.lab import setups
from mcomb.lab.cache import durations, matchings
from mcomb.lab.cache.matchings import MatchingKey
from mcomb.lab.cache.store import Store
from mcomb.lab.flags import Config
from mcomb.matching.matching import Matching
from mcomb.matching.weights import match_weights

CONFIG = Config(setup="mlp-digits", width=1, epochs=4)


def match(store, a, b, matcher="weights", restarts=1, make=True):
    """The matching of B to A."""
    return store.matchings.get({"A": a, "B": b}, MatchingKey("B", "A", matcher, restarts), make)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (MatchingKey("B", "A"), "B to A"),
        (MatchingKey("C", "B", "weights"), "C to B, weights"),
        (MatchingKey("B", "A", "ste"), "B to A, ste"),
        (MatchingKey("B", "A", "weights", 8), "B to A, weights best of 8"),
        (MatchingKey("A", "B", groups="permutations"), "A to B, permutations"),
        (MatchingKey("A", "B", "ste", groups="all"), "A to B, ste, all groups"),
    ],
)
def test_matching_key_has_its_name_in_results(key, name):
    assert str(key) == name


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


def test_matching_takes_steps_of_matcher(tmp_path):
    for steps in (1, 2):
        store = Store(dataclasses.replace(CONFIG, epochs=0, matcher="ste", matcher_steps=steps, out=tmp_path))
        a, b = store.networks.get("AB").values()
        assert len(match(store, a, b, "ste").matching.losses) == steps + 1


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


def test_matching_seconds_exclude_compilation(tmp_path, monkeypatch):
    def compile_and_match(*args, **options):
        time.sleep(0.2)
        for event in durations.COMPILATION:
            jax.monitoring.record_event_duration_secs(event, 0.1)
        return match_weights(*args, **options)

    monkeypatch.setattr(matchings, "weights", lambda restarts: Matcher("weights", compile_and_match))
    store = Store(dataclasses.replace(CONFIG, epochs=0, out=tmp_path))
    found = match(store, *store.networks.get("AB").values(), "weights")
    assert 0 < found.seconds <= store.durations.seconds["matching"] - 0.19


def test_matching_of_mixed_groups_is_read_as_written(tmp_path):
    network = NETWORKS["attention"]()
    spec = derive_spec(network.apply, network.params, network.inputs, groups="all")
    other = spec.apply(spec.random(jax.random.key(0)), network.params)
    matching = weights().match(spec, network.params, other)
    path, made_from = tmp_path / "matching.npz", ["a", "b"]
    written = matchings.KeptMatching(matching, 1.5, fingerprint(matching.perms))
    matchings.write_matching(path, made_from, written)
    read = matchings.read_matching(path, made_from, spec)
    assert read is not None
    assert read.fingerprint == written.fingerprint
    assert_equal(read.matching.perms, matching.perms)
    spec.check(network.apply, other, network.inputs, perms=read.matching.perms)
