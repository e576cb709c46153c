"""Datasets as uint8 arrays: scikit-learn's digits, and CIFAR-10 from a local copy or from TFDS."""

import hashlib
import os
import pickle
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32, UInt8

from mcomb.base import UserError

DATA_VARIABLE = "MCOMB_DATA_DIR"

# SHA-256 of the binary archive's members, MD5 of the pickled ones (the only checksum published for those).
CIFAR10_BINARY = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
CIFAR10_PYTHON = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
CIFAR10_MEMBERS = CIFAR10_BINARY | CIFAR10_PYTHON
CIFAR10_PLACES = (
    "cifar-10-binary.tar.gz",
    "cifar-10-python.tar.gz",
    "cifar-10-batches-bin",
    "cifar-10-batches-py",
)


class Split(NamedTuple):
    """Images and their labels."""

    images: UInt8[np.ndarray, "n h w c"]
    labels: Int32[np.ndarray, "n"]

    def first(self, count: int | None) -> "Split":
        """The first `count` images, or all of them."""
        return Split(self.images[:count], self.labels[:count])


class Splits(NamedTuple):
    """A dataset's images, always in the same order whatever they were read from."""

    train: Split
    test: Split


@dataclass(frozen=True)
class Dataset:
    """What is known of a dataset before it is loaded, and how to load it."""

    name: str
    classes: int
    image: tuple[int, int, int]  # height, width, channels
    mean: tuple[float, ...]  # of raw pixels, for each channel
    std: tuple[float, ...]
    load: Callable[[Path | None], Splits]  # from a local copy at this path, or from wherever it usually is


def load_digits(data_dir: Path | None = None) -> Splits:
    """Scikit-learn's bundled 8×8 digits, always split into the same 1,400 for training and 397 for testing."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = np.random.RandomState(0).permutation(len(bunch.target))
    images = bunch.images[order, :, :, None].astype(np.uint8)
    labels = bunch.target[order].astype(np.int32)
    return Splits(Split(images[:1400], labels[:1400]), Split(images[1400:], labels[1400:]))


def load_cifar10(data_dir: Path | None = None) -> Splits:
    """CIFAR-10 from `data_dir`, else from the folder that MCOMB_DATA_DIR names, else from TFDS."""
    local = data_dir or (Path(os.environ[DATA_VARIABLE]) if os.environ.get(DATA_VARIABLE) else None)
    return _cifar10_local(local) if local else _cifar10_tfds()


DIGITS = Dataset(
    name="digits",
    classes=10,
    image=(8, 8, 1),
    mean=(4.885546875,),
    std=(6.01334015811327,),
    load=load_digits,
)
CIFAR10 = Dataset(
    name="cifar10",
    classes=10,
    image=(32, 32, 3),
    mean=(255 * 0.4914, 255 * 0.4822, 255 * 0.4465),
    std=(255 * 0.2470, 255 * 0.2435, 255 * 0.2616),
    load=load_cifar10,
)


def _cifar10_local(path: Path) -> Splits:
    places = [place for place in (path / name for name in CIFAR10_PLACES) if place.exists()]
    source = places[0] if places else path
    batches: dict[str, Split] = {}
    for name, content in _archive_members(source) if source.is_file() else _folder_members(source):
        checksum = (hashlib.sha256 if name.endswith(".bin") else hashlib.md5)(content).hexdigest()
        if checksum != CIFAR10_MEMBERS[name]:
            raise UserError(
                f"{source}: {name} is damaged (its checksum is {checksum}, not {CIFAR10_MEMBERS[name]}): "
                "download it again"
            )
        batches[name] = _parse(name, content)
    for layout in (CIFAR10_BINARY, CIFAR10_PYTHON):
        if layout.keys() <= batches.keys():
            *train, test = (batches[name] for name in layout)
            return Splits(Split(*(np.concatenate(parts) for parts in zip(*train, strict=True))), test)
    found = f"only {', '.join(sorted(batches))}" if batches else "nothing of it"
    raise UserError(
        f"{path} is no whole CIFAR-10 ({found} was found): give the official cifar-10-binary.tar.gz or "
        "cifar-10-python.tar.gz, or the folder unpacked from it"
    )


def _folder_members(folder: Path) -> Iterator[tuple[str, bytes]]:
    for name in CIFAR10_MEMBERS:
        if (folder / name).is_file():
            yield name, (folder / name).read_bytes()


def _archive_members(archive: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = Path(member.name).name
                if name in CIFAR10_MEMBERS and (content := tar.extractfile(member)):
                    yield name, content.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise UserError(f"{archive} cannot be read ({error}): download it again") from error


def _parse(name: str, content: bytes) -> Split:
    """The images and labels of one member whose checksum is right."""
    if name.endswith(".bin"):
        rows = np.frombuffer(content, np.uint8).reshape(-1, 1 + 3 * 32 * 32)
        labels, pixels = rows[:, 0], rows[:, 1:]
    else:
        batch = pickle.loads(content, encoding="bytes")
        labels, pixels = np.array(batch[b"labels"]), np.asarray(batch[b"data"])
    images = np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return Split(images, labels.astype(np.int32))


def _cifar10_tfds() -> Splits:
    try:
        import tensorflow_datasets as tfds

        builder = tfds.builder("cifar10", file_format="array_record")
        builder.download_and_prepare()
        train, test = (_in_archive_order(builder.as_data_source(split)) for split in ("train", "test"))
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"CIFAR-10 is not here and TFDS cannot get it ({reason}): "
            f"give the official archive with --data-dir or {DATA_VARIABLE}, "
            'or `pip install -e ".[tfds]"` on a machine with internet, '
            "or run the embedded data with --setup mlp-digits"
        ) from error
    return Splits(train, test)


def _in_archive_order(examples: Iterable[Mapping[str, Any]]) -> Split:
    """TFDS's examples, which it shuffles, in the archive's order: that of their ids, such as `train_00042`."""
    ordered = sorted(examples, key=lambda example: example["id"])
    images, labels = ([example[name] for example in ordered] for name in ("image", "label"))
    return Split(np.stack(images), np.array(labels, np.int32))
