"""Load datasets as uint8 arrays: scikit-learn's digits, and CIFAR-10 from a local copy, TFDS or a download."""

import hashlib
import importlib.util
import lzma
import os
import pickle
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pooch
from jaxtyping import Int32, UInt8

from mcomb.errors import UserError
from mcomb.io.locks import lock
from mcomb.io.paths import make_writable
from mcomb.runtime.progress import progress_bar, say, warn

DATA_VARIABLE = "MCOMB_DATA_DIR"
URL_VARIABLE = "MCOMB_CIFAR10_URL"
CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR10_BYTES = 170_052_171  # initial total of the progress bar, until the server sends the size
TIMEOUT = 60  # seconds without a byte
REMEDY = (
    f"run it again, set {URL_VARIABLE} to a mirror, pass the official archive as --data-dir or {DATA_VARIABLE}, "
    "or use the embedded data with --setup mlp-digits."
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
        """Return the first `count` images; all if `count` is None."""
        return self.take(slice(count))

    def take(self, rows: Any) -> "Split":
        """Return the images in these rows."""
        return Split(self.images[rows], self.labels[rows])


class Splits(NamedTuple):
    """The images of a dataset, in the same order for every source."""

    train: Split
    test: Split


@dataclass(frozen=True)
class Dataset:
    """Constants of a dataset, and the function that loads it."""

    name: str
    classes: int
    image: tuple[int, int, int]  # height, width, channels
    images: tuple[int, int]  # numbers of train and test images
    mean: tuple[float, ...]  # of raw pixels, for each channel
    std: tuple[float, ...]
    load: Callable[[Path | None], Splits]  # from a local copy at this path, or from the default location


def load_digits(data_dir: Path | None = None) -> Splits:
    """Load scikit-learn's 8×8 digits, with a fixed split into 1,400 train and 397 test images."""
    place: Any = importlib.util.find_spec("sklearn")  # an import would load most of scipy and take more than a second
    file = Path(place.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if file.is_file():
        rows = np.loadtxt(file, np.uint8, delimiter=",")
    else:  # other versions store it elsewhere
        from sklearn.datasets import load_digits

        rows = np.column_stack(load_digits(return_X_y=True)).astype(np.uint8)
    rows = rows[np.random.RandomState(0).permutation(len(rows))]
    images, labels = rows[:, :64].reshape(-1, 8, 8, 1), rows[:, 64].astype(np.int32)
    return Splits(Split(images[:1400], labels[:1400]), Split(images[1400:], labels[1400:]))


def load_cifar10(data_dir: Path | None = None) -> Splits:
    """Load CIFAR-10 from a local copy, from TFDS or from the internet, in this order.

    Args:
        data_dir: An archive or a folder; None for the value of MCOMB_DATA_DIR, if set.

    Raises:
        UserError: The local copy is incomplete or damaged, or the download fails.
    """
    local = data_dir or (Path(os.environ[DATA_VARIABLE]) if os.environ.get(DATA_VARIABLE) else None)
    return _read_archive(local) if local else _read_tfds() or _download_archive()


DIGITS = Dataset(
    name="digits",
    classes=10,
    image=(8, 8, 1),
    images=(1400, 397),
    mean=(4.885546875,),
    std=(6.01334015811327,),
    load=load_digits,
)
CIFAR10 = Dataset(
    name="cifar10",
    classes=10,
    image=(32, 32, 3),
    images=(50_000, 10_000),
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
        raise UserError(f"Cannot read {archive} ({_reason(error)}): download it again.") from error


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


def _download_archive() -> Splits:
    """Download the official archive from CIFAR10_URL or a mirror, cache it in the user's cache folder, and read it."""
    url = os.environ.get(URL_VARIABLE) or CIFAR10_URL
    archive = Path(pooch.os_cache("mcomb")) / CIFAR10_PLACES[0]
    with lock(make_writable(archive.parent) / ".cifar10.lock", "downloading CIFAR-10"):
        if archive.is_file():
            try:
                return _read_archive(archive)
            except UserError as error:
                warn(f"{str(error).rpartition(': ')[0]}: downloading it again")
                archive.unlink()
        say(f"downloading CIFAR-10 from {url} to {archive}")
        pooch.get_logger().setLevel("ERROR")  # hide its advice to record a checksum, because each member has one
        try:
            with progress_bar(CIFAR10_BYTES, "B", "CIFAR-10") as bar:
                download = pooch.HTTPDownloader(progressbar=bar, chunk_size=2**16, timeout=TIMEOUT)
                pooch.retrieve(url, known_hash=None, fname=archive.name, path=archive.parent, downloader=download)
        except Exception as error:
            raise UserError(f"Cannot download CIFAR-10 from {url} ({_reason(error)}): {REMEDY}") from error
        try:
            return _read_archive(archive)
        except UserError as error:
            archive.unlink()
            problem = str(error).rpartition(": ")[0]
            raise UserError(f"The download from {url} is not CIFAR-10 ({problem}): {REMEDY}") from error


def _reason(error: Exception) -> str:
    """Return the first line of an error's message, or its type without a message."""
    return next(iter(str(error).strip().splitlines()), "").rstrip(":") or type(error).__name__
