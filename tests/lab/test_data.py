import hashlib
import io
import pickle
import sys
import tarfile

import numpy as np
import pytest

from mcomb import data
from mcomb.base import UserError


def test_digits_are_the_same_real_images_every_time(digits):
    again = data.digits()
    assert digits.train.images.shape == (1400, 8, 8, 1)
    assert digits.test.images.shape == (397, 8, 8, 1)
    assert digits.train.images.dtype == np.uint8
    assert digits.train.images.max() == 16
    assert set(digits.test.labels) == set(range(10))
    np.testing.assert_array_equal(digits.test.images, again.test.images)


def test_digits_split_shares_no_image(digits):
    rows = {row.tobytes() for row in digits.train.images}
    assert not any(row.tobytes() in rows for row in digits.test.images)


def test_first_takes_the_first_images_or_all(digits):
    np.testing.assert_array_equal(digits.test.first(5).images, digits.test.images[:5])
    assert len(digits.test.first(None).labels) == 397


def test_real_cifar10_is_read_whole(cifar_archive):
    dataset = data.cifar10(cifar_archive)
    assert dataset.train.images.shape == (50_000, 32, 32, 3)
    np.testing.assert_array_equal(np.bincount(dataset.train.labels), [5000] * 10)
    np.testing.assert_array_equal(np.bincount(dataset.test.labels), [1000] * 10)
    assert dataset.train.labels[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    np.testing.assert_allclose(dataset.train.images.mean((0, 1, 2)), dataset.mean, atol=0.1)
    np.testing.assert_allclose(dataset.train.images.std((0, 1, 2)), dataset.std, atol=0.1)


@pytest.fixture
def small_cifar(monkeypatch):
    """CIFAR-10's two layouts with three images a batch, and their checksums in place of the official ones."""
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
def test_archive_folder_and_their_parent_give_the_same_images(small_cifar, tmp_path, folder):
    unpacked, packed = tmp_path / "unpacked", tmp_path / "packed"
    (unpacked / folder).mkdir(parents=True)
    packed.mkdir()
    for name, content in small_cifar[folder].items():
        (unpacked / folder / name).write_bytes(content)
    kind = "binary" if folder.endswith("bin") else "python"
    archive = packed / f"cifar-10-{kind}.tar.gz"
    write_archive(archive, folder, small_cifar[folder])
    first = data.cifar10(archive)
    assert first.train.labels.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    assert first.test.labels.tolist() == [5] * 3
    for place in (packed, unpacked, unpacked / folder):
        np.testing.assert_array_equal(data.cifar10(place).train.images, first.train.images)


def test_both_layouts_hold_the_same_pixels(small_cifar, tmp_path):
    for folder, members in small_cifar.items():
        (tmp_path / folder).mkdir()
        for name, content in members.items():
            (tmp_path / folder / name).write_bytes(content)
    binary, python = (data.cifar10(tmp_path / folder) for folder in small_cifar)
    np.testing.assert_array_equal(binary.test.images, python.test.images)


def test_the_environment_variable_names_the_copy(small_cifar, tmp_path, monkeypatch):
    write_archive(tmp_path / "any.tar.gz", "x", small_cifar["cifar-10-batches-bin"])
    monkeypatch.setenv(data.DATA_VARIABLE, str(tmp_path / "any.tar.gz"))
    assert len(data.cifar10().train.labels) == 15


def test_a_damaged_member_is_named(small_cifar, tmp_path):
    members = small_cifar["cifar-10-batches-bin"] | {"data_batch_3.bin": b"damaged"}
    write_archive(tmp_path / "a.tar.gz", "x", members)
    with pytest.raises(UserError, match=r"data_batch_3\.bin is damaged"):
        data.cifar10(tmp_path / "a.tar.gz")


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("the pickle was opened",))


def test_a_pickle_with_a_wrong_checksum_is_never_opened(small_cifar, tmp_path):
    members = small_cifar["cifar-10-batches-py"] | {"test_batch": pickle.dumps(Bomb())}
    write_archive(tmp_path / "a.tar.gz", "x", members)
    with pytest.raises(UserError, match="test_batch is damaged"):
        data.cifar10(tmp_path / "a.tar.gz")


def test_a_truncated_archive_is_a_clear_error(small_cifar, tmp_path):
    path = tmp_path / "a.tar.gz"
    write_archive(path, "x", small_cifar["cifar-10-batches-bin"])
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(UserError, match="cannot be read"):
        data.cifar10(path)


def test_a_place_without_the_data_is_a_clear_error(small_cifar, tmp_path):
    with pytest.raises(UserError, match="nothing of it was found"):
        data.cifar10(tmp_path / "nowhere")
    some = dict(list(small_cifar["cifar-10-batches-bin"].items())[:2])
    write_archive(tmp_path / "a.tar.gz", "x", some)
    with pytest.raises(UserError, match=r"only data_batch_1\.bin, data_batch_2\.bin"):
        data.cifar10(tmp_path / "a.tar.gz")


def test_without_a_copy_and_without_tfds_three_ways_on_are_named(monkeypatch):
    monkeypatch.delenv(data.DATA_VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(UserError) as caught:
        data.cifar10()
    for way in ("--data-dir", '".[tfds]"', "--setup mlp-digits"):
        assert way in str(caught.value)
