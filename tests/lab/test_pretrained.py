"""Pretrained networks and their model cards."""

import re

import pytest

from mcomb import read_checkpoint, score
from mcomb.io.fingerprints import fingerprint
from mcomb.lab.cache.store import Store
from mcomb.lab.flags import Config
from mcomb.lab.run_folders import PRETRAINED
from mcomb.lab.setups import SETUPS

FILES = sorted(PRETRAINED.rglob("*.safetensors"))
FOLDERS = sorted({file.parent for file in FILES})


def test_pretrained_has_three_small_files_per_width():
    assert FILES
    for folder in FOLDERS:
        names = sorted(file.name for file in folder.glob("*.safetensors"))
        assert names == [f"seed-{i}.safetensors" for i in range(3)]
    assert sum(file.stat().st_size for file in FILES) < 22e6


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(PRETRAINED)))
def test_pretrained_card_has_fingerprint(folder):
    setup, width = folder.parent.name, int(folder.name.removeprefix("width-"))
    found = []
    for file in sorted(folder.glob("*.safetensors")):
        found.append(fingerprint(read_checkpoint(file, SETUPS[setup].shapes(width))))
        assert f"Fingerprint `{found[-1]}`" in file.with_suffix(".md").read_text()
    config = Config(setup=setup, width=width, pretrained=True)
    assert [network.fingerprint for network in Store(config).networks.get("ABC").values()] == found


@pytest.mark.slow
def test_pretrained_network_has_accuracy_of_card(cifar_archive):
    file = PRETRAINED / "mlp-cifar10" / "width-32" / "seed-0.safetensors"
    setup = SETUPS["mlp-cifar10"]
    found = score(setup.apply(32), read_checkpoint(file, setup.shapes(32)), *setup.dataset.load(cifar_archive).test)
    (stated,) = re.findall(r"Test accuracy ([\d.]+)%", file.with_suffix(".md").read_text())
    # Rounding on another CPU may change a few of the 10,000 predictions.
    assert found.accuracy == pytest.approx(float(stated) / 100, abs=5e-4)
