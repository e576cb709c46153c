"""Pretrained networks and their model cards."""

import platform
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


def score_of_file(file, data_dir):
    """Return the score of a network on all test examples, the stated accuracy and loss, and the number of labels."""
    setup, width = SETUPS[file.parents[1].name], int(file.parent.name.removeprefix("width-"))
    test = setup.dataset.load(data_dir).test
    found = score(setup.apply(width), read_checkpoint(file, setup.shapes(width)), *test)
    (stated,) = re.findall(r"Test accuracy ([\d.]+)% and test loss ([\d.]+)", file.with_suffix(".md").read_text())
    return found, float(stated[0]) / 100, float(stated[1]), test.labels.size


@pytest.mark.slow
def test_pretrained_network_has_accuracy_of_card(cifar_archive):
    found, accuracy, _, _ = score_of_file(PRETRAINED / "mlp-cifar10" / "width-32" / "seed-0.safetensors", cifar_archive)
    # Rounding on another CPU may change a few of the 10,000 predictions.
    assert found.accuracy == pytest.approx(accuracy, abs=5e-4)


EMBEDDED = [folder for folder in FOLDERS if folder.parent.name.endswith(("-digits", "-text"))]


@pytest.mark.parametrize("folder", EMBEDDED, ids=lambda folder: folder.parent.name)
def test_pretrained_network_on_embedded_data_has_score_of_card(folder):
    file = folder / "seed-0.safetensors"
    found, accuracy, loss, labels = score_of_file(file, None)
    python = re.findall(r"those of Python ([\d.]+);", file.with_suffix(".md").read_text())
    if python and python != [platform.python_version()]:  # another text, of the same kind
        assert found.loss < 1.5 * loss
    else:
        assert found.accuracy == pytest.approx(accuracy, abs=5e-5 + 2 / labels)
        assert found.loss == pytest.approx(loss, abs=1e-3)
