"""Load CIFAR-10 from a local copy, from TFDS or from a download, as uint8 arrays."""

import hashlib
import importlib.util
import lzma
import pickle
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mcomb.errors import UserError
from mcomb.lab.data.datasets import ImageDataset, Split, Splits
from mcomb.lab.data.download import Download, first_line, local_copy

CIFAR10_DOWNLOAD = Download(
    name="CIFAR-10",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    url_variable="MCOMB_CIFAR10_URL",
    file="cifar-10-binary.tar.gz",
    size=170_052_171,
    embedded="mlp-digits",
)

# SHA-256 of the binary archive's members; MD5 of the pickled members, their only published checksum.
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
    CIFAR10_DOWNLOAD.file,
    "cifar-10-python.tar.gz",
    "cifar-10-batches-bin",
    "cifar-10-batches-py",
)


def load_cifar10(data_dir: Path | None = None) -> Splits:
    """Load CIFAR-10 from a local copy, from TFDS or from the internet, in this order.

    Args:
        data_dir: An archive or a folder; None for the value of MCOMB_DATA_DIR, if set.

    Raises:
        UserError: The local copy is incomplete or damaged, or the download fails.
    """
    local = local_copy(data_dir)
    return _read_archive(local) if local else _read_tfds() or CIFAR10_DOWNLOAD.read_or_download(_read_archive)


CIFAR10 = ImageDataset(
    name="cifar10",
    classes=10,
    shape=(32, 32, 3),
    count=lambda: (50_000, 10_000),
    mean=(255 * 0.4914, 255 * 0.4822, 255 * 0.4465),
    std=(255 * 0.2470, 255 * 0.2435, 255 * 0.2616),
    load=load_cifar10,
)


def _read_archive(path: Path) -> Splits:
    places = [place for place in (path / name for name in CIFAR10_PLACES) if place.exists()]
    source = places[0] if places else path
    batches: dict[str, Split] = {}
    for name, content in _archive_members(source) if source.is_file() else _folder_members(source):
        checksum = (hashlib.sha256 if name.endswith(".bin") else hashlib.md5)(content).hexdigest()
        if checksum != CIFAR10_MEMBERS[name]:
            raise UserError(
                f"{name} in {source} is damaged (checksum {checksum}, not {CIFAR10_MEMBERS[name]}): download it again."
            )
        batches[name] = _parse(name, content)
    for layout in (CIFAR10_BINARY, CIFAR10_PYTHON):
        if layout.keys() <= batches.keys():
            *train, test = (batches[name] for name in layout)
            return Splits(Split(*(np.concatenate(parts) for parts in zip(*train, strict=True))), test)
    found = f"only {', '.join(sorted(batches))}" if batches else "no file of it"
    raise UserError(
        f"{path} is not a complete CIFAR-10 ({found} was found): use the official cifar-10-binary.tar.gz or "
        "cifar-10-python.tar.gz, or the folder unpacked from it."
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
                # Skip links, which may be dangling or circular.
                if name in CIFAR10_MEMBERS and member.isfile() and (content := tar.extractfile(member)):
                    yield name, content.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"Cannot read {archive} ({first_line(error)}): download it again.") from error


def _parse(name: str, content: bytes) -> Split:
    """Return the images and labels of a member with a verified checksum."""
    if name.endswith(".bin"):
        rows = np.frombuffer(content, np.uint8).reshape(-1, 1 + 3 * 32 * 32)
        labels, pixels = rows[:, 0], rows[:, 1:]
    else:
        batch = pickle.loads(content, encoding="bytes")
        labels, pixels = np.array(batch[b"labels"]), np.asarray(batch[b"data"])
    images = np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return Split(images, labels.astype(np.int32))


def _read_tfds() -> Splits | None:
    """Load CIFAR-10 with TFDS, and prepare it if TensorFlow is installed; return None if TFDS cannot provide it."""
    try:
        import tensorflow_datasets as tfds

        builder = tfds.builder("cifar10", file_format="array_record")
        if not Path(builder.data_dir).is_dir():
            if importlib.util.find_spec("tensorflow") is None:
                return None
            builder.download_and_prepare()
        return Splits(*(_in_archive_order(builder.as_data_source(split)) for split in ("train", "test")))
    except Exception:  # fall back to the archive on any error
        return None


def _in_archive_order(examples: Iterable[Mapping[str, Any]]) -> Split:
    """Sort the shuffled examples of TFDS by ids such as `train_00042`, which restores the archive's order."""
    ordered = sorted(examples, key=lambda example: example["id"])
    images, labels = ([example[name] for example in ordered] for name in ("image", "label"))
    return Split(np.stack(images), np.array(labels, np.int32))
