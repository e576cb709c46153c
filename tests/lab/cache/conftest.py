"""Networks and a matching that are trained and found once."""

import dataclasses
import shutil

import pytest

from mcomb.lab.cache import matchings
from mcomb.lab.cache.store import Store
from mcomb.lab.flags import Config
from mcomb.lab.training import side_by_side

CONFIG = Config(setup="mlp-digits", width=1, epochs=4)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A read-only folder with networks A and B and their matching."""
    out = tmp_path_factory.mktemp("kept")
    store = Store(dataclasses.replace(CONFIG, out=out))
    store.matchings.get(store.networks.get("AB"))
    return out


@pytest.fixture
def store(kept, tmp_path):
    """A store on a copy of that folder."""
    shutil.copytree(kept, tmp_path / "runs")
    return Store(dataclasses.replace(CONFIG, out=tmp_path / "runs"))


@pytest.fixture
def no_work(monkeypatch):
    """Training and matching fail the test."""
    monkeypatch.setattr(matchings, "MATCHERS", {})
    for module, name in ((side_by_side, "train"), (matchings, "weights")):
        monkeypatch.setattr(module, name, lambda *args, **options: pytest.fail("work was repeated"))
