import hashlib
import importlib.util
import io
import pickle
import sys
import tarfile
from types import SimpleNamespace

import numpy as np
import pytest
from pixels import statistics

from mcomb.errors import UserError
from mcomb.lab.data import cifar10 as data
from mcomb.lab.data.cifar10 import CIFAR10, load_cifar10
from mcomb.lab.data.download import DATA_VARIABLE, Download


@pytest.fixture(scope="module")
def cifar10(cifar_archive):
    return CIFAR10.load(cifar_archive)


def test_cifar10_is_read_completely(cifar10):
    assert cifar10.train.inputs.shape == (50_000, 32, 32, 3)
    assert cifar10.test.inputs.shape == (10_000, 32, 32, 3)
    np.testing.assert_array_equal(np.bincount(cifar10.train.labels), [5000] * 10)
    np.testing.assert_array_equal(np.bincount(cifar10.test.labels), [1000] * 10)
    assert cifar10.train.labels[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]


def test_cifar10_constants_equal_loaded_data(cifar10):
    assert cifar10.train.inputs.shape[1:] == CIFAR10.shape
    assert 1 + cifar10.train.labels.max() == CIFAR10.classes
    for known, found in zip((CIFAR10.mean, CIFAR10.std), statistics(cifar10.train.inputs), strict=True):
        assert [f"{value / 255:.4f}" for value in found] == [f"{value / 255:.4f}" for value in known]
        np.testing.assert_allclose(known, found, rtol=0, atol=255 * 0.5e-4)  # the constants have four digits


@pytest.fixture
def small_cifar(monkeypatch):
    """Both layouts of CIFAR-10 with three images per batch, and their checksums instead of the official ones."""
    rng = np.random.default_rng(0)
    members = {}
    for i, (binary, python) in enumerate(zip(data.CIFAR10_BINARY, data.CIFAR10_PYTHON, strict=True)):
        labels = np.array([i, i, i], np.uint8)
        pixels = rng.integers(0, 256, (3, 3072), dtype=np.uint8)
        members[binary] = np.concatenate([labels[:, None], pixels], axis=1).tobytes()
        members[python] = pickle.dumps({b"labels": labels.tolist(), b"data": pixels})
    layouts = {"cifar-10-batches-bin": {}, "cifar-10-batches-py": {}}
    for name, content in members.items():
        folder, kind = ("bin", hashlib.sha256) if name.endswith(".bin") else ("py", hashlib.md5)
        layouts[f"cifar-10-batches-{folder}"][name] = content
        monkeypatch.setitem(data.CIFAR10_MEMBERS, name, kind(content).hexdigest())
    return layouts


def write_archive(path, folder, members):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


@pytest.mark.parametrize("folder", ["cifar-10-batches-bin", "cifar-10-batches-py"])
def test_archive_folder_and_parent_give_same_images(small_cifar, tmp_path, folder):
    unpacked, packed = tmp_path / "unpacked", tmp_path / "packed"
    (unpacked / folder).mkdir(parents=True)
    packed.mkdir()
    for name, content in small_cifar[folder].items():
        (unpacked / folder / name).write_bytes(content)
    kind = "binary" if folder.endswith("bin") else "python"
    archive = packed / f"cifar-10-{kind}.tar.gz"
    write_archive(archive, folder, small_cifar[folder])
    first = load_cifar10(archive)
    assert first.train.labels.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    assert first.test.labels.tolist() == [5] * 3
    for place in (packed, unpacked, unpacked / folder):
        np.testing.assert_array_equal(load_cifar10(place).train.inputs, first.train.inputs)


def test_layouts_hold_same_pixels(small_cifar, tmp_path):
    for folder, members in small_cifar.items():
        (tmp_path / folder).mkdir()
        for name, content in members.items():
            (tmp_path / folder / name).write_bytes(content)
    binary, python = (load_cifar10(tmp_path / folder) for folder in small_cifar)
    np.testing.assert_array_equal(binary.test.inputs, python.test.inputs)


def test_environment_variable_selects_copy(small_cifar, tmp_path, monkeypatch):
    write_archive(tmp_path / "any.tar.gz", "x", small_cifar["cifar-10-batches-bin"])
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "any.tar.gz"))
    assert len(load_cifar10().train.labels) == 15


def test_archive_error_names_damaged_member(small_cifar, tmp_path):
    members = small_cifar["cifar-10-batches-bin"] | {"data_batch_3.bin": b"damaged"}
    write_archive(tmp_path / "a.tar.gz", "x", members)
    with pytest.raises(UserError, match=r"data_batch_3\.bin in .* is damaged"):
        load_cifar10(tmp_path / "a.tar.gz")


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("the pickle was opened",))


def test_pickle_with_wrong_checksum_is_never_opened(small_cifar, tmp_path):
    members = small_cifar["cifar-10-batches-py"] | {"test_batch": pickle.dumps(Bomb())}
    write_archive(tmp_path / "a.tar.gz", "x", members)
    with pytest.raises(UserError, match=r"test_batch in .* is damaged"):
        load_cifar10(tmp_path / "a.tar.gz")


def test_archive_truncated_raises_user_error(small_cifar, tmp_path):
    path = tmp_path / "a.tar.gz"
    write_archive(path, "x", small_cifar["cifar-10-batches-bin"])
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(UserError, match="Cannot read"):
        load_cifar10(path)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
@pytest.mark.parametrize("target", ["nowhere", "data_batch_1.bin"])
def test_archive_links_are_ignored(kind, target, small_cifar, tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        info = tarfile.TarInfo("data_batch_1.bin")
        info.type, info.linkname = kind, target
        tar.addfile(info)
    with pytest.raises(UserError, match="no file of it was found"):
        load_cifar10(tmp_path / "a.tar")


def test_archive_damaged_xz_raises_user_error(small_cifar, tmp_path):
    with tarfile.open(tmp_path / "a.tar.xz", "w:xz") as tar:
        for name, content in small_cifar["cifar-10-batches-bin"].items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    content = bytearray((tmp_path / "a.tar.xz").read_bytes())
    content[len(content) // 2] ^= 0xFF
    (tmp_path / "a.tar.xz").write_bytes(content)
    with pytest.raises(UserError, match="Cannot read"):
        load_cifar10(tmp_path / "a.tar.xz")


def test_missing_data_raises_user_error(small_cifar, tmp_path):
    with pytest.raises(UserError, match="no file of it was found"):
        load_cifar10(tmp_path / "nowhere")
    some = dict(list(small_cifar["cifar-10-batches-bin"].items())[:2])
    write_archive(tmp_path / "a.tar.gz", "x", some)
    with pytest.raises(UserError, match=r"only data_batch_1\.bin, data_batch_2\.bin"):
        load_cifar10(tmp_path / "a.tar.gz")


def shuffled_examples(split, name, seed):
    """A split as TFDS returns it: shuffled examples with ids."""
    rows = enumerate(zip(split.inputs, split.labels, strict=True))
    examples = [{"id": b"%s_%05d" % (name, i), "image": image, "label": int(label)} for i, (image, label) in rows]
    return [examples[i] for i in np.random.default_rng(seed).permutation(len(examples))]


@pytest.mark.parametrize("seed", range(3))
def test_tfds_examples_are_sorted_like_archive(digits, seed):
    examples = shuffled_examples(digits.train, b"train", seed)
    assert [example["label"] for example in examples] != digits.train.labels.tolist()
    found = data._in_archive_order(examples)
    np.testing.assert_array_equal(found.inputs, digits.train.inputs)
    np.testing.assert_array_equal(found.labels, digits.train.labels)
    assert (found.inputs.dtype, found.labels.dtype) == (np.uint8, np.int32)


@pytest.fixture
def tfds(small_cifar, tmp_path, monkeypatch):
    """A TFDS that can prepare CIFAR-10, no local copy, and the data of the archive."""
    write_archive(tmp_path / "a.tar.gz", "x", small_cifar["cifar-10-batches-bin"])
    local = load_cifar10(tmp_path / "a.tar.gz")
    fake = SimpleNamespace(prepared=tmp_path / "prepared", local=local)
    fake.builder = lambda name, file_format: SimpleNamespace(
        data_dir=str(fake.prepared / name / file_format),
        download_and_prepare=lambda: (fake.prepared / name / file_format).mkdir(parents=True),
        as_data_source=lambda split: shuffled_examples(getattr(local, split), split.encode(), 0),
    )
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", fake)
    fake.downloads = []
    monkeypatch.setattr(Download, "read_or_download", lambda *_: fake.downloads.append(local) or local)
    return fake


@pytest.mark.parametrize("prepared", [True, False])
def test_tfds_equals_archive_once_prepared(prepared, tfds, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if prepared else name)
    folder = tfds.prepared / "cifar10" / "array_record"
    if prepared:
        folder.mkdir(parents=True)
    found = load_cifar10()
    assert folder.is_dir()
    assert not tfds.downloads
    for split in ("train", "test"):
        np.testing.assert_array_equal(getattr(found, split).inputs, getattr(tfds.local, split).inputs)
        np.testing.assert_array_equal(getattr(found, split).labels, getattr(tfds.local, split).labels)


def test_tfds_failure_falls_back_to_archive(tfds, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert load_cifar10() is tfds.local
    assert not tfds.prepared.exists()
    monkeypatch.setattr(tfds, "builder", lambda name, file_format: 1 / 0)
    assert load_cifar10() is tfds.local
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    assert load_cifar10() is tfds.local
    assert len(tfds.downloads) == 3
