"""A store reads what is cached, and hands out checked alignments."""

import dataclasses

import numpy as np
import pytest
from numerics import assert_equal

from mcomb import write_checkpoint
from mcomb.errors import UserError
from mcomb.io.fingerprints import fingerprint
from mcomb.lab.cache.store import Store
from mcomb.lab.flags import Config
from mcomb.lab.setups import SETUPS
from mcomb.matching.matching import Matching

CONFIG = Config(setup="mlp-digits", width=1, epochs=4)


def test_store_reads_cached_objects(store, no_work, capsys):
    for make in (True, False):
        again = Store(store.config)
        a, b = again.networks.get("AB", make).values()
        assert (a.name, b.name) == ("seed-0,epochs=4", "seed-1,epochs=4")
        assert a.fingerprint == fingerprint(a.params) != b.fingerprint
        found = again.matchings.get({"A": a, "B": b}, make=make)
        assert found.seconds > 0
        assert found.fingerprint == fingerprint(found.matching.perms)
    assert capsys.readouterr().err == ""


def test_matching_roundtrips_through_file(store):
    b = store.networks.get("B")["B"]
    perms = {name: np.arange(size) for name, size in store.spec.sizes.items()}
    assert_equal(store.permute(b, Matching(perms, 0.0, ())), b.params)
    twice = perms | {"dense1": np.zeros_like(perms["dense1"])}
    with pytest.raises(UserError, match="Permutation dense1 lacks index 1: pass each index from 0 to 15 once"):
        store.permute(b, Matching(twice, 0.0, ()))


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
    given.matchings.get({"A": a, "B": b})
    assert len(list(given.folders.home.glob("matchings/*.npz"))) == len(list(tmp_path.rglob("*.npz"))) == 1
