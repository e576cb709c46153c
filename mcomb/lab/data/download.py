"""Find local copies of datasets, and download missing ones into the user's cache folder."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pooch

from mcomb.errors import UserError
from mcomb.io.locks import lock
from mcomb.io.paths import make_writable
from mcomb.runtime.progress import progress_bar, say, warn

T = TypeVar("T")

DATA_VARIABLE = "MCOMB_DATA_DIR"
TIMEOUT = 60  # seconds without a byte


def local_copy(data_dir: Path | None) -> Path | None:
    """Return the path of local data: `data_dir`, or the value of MCOMB_DATA_DIR; None if neither is set."""
    if data_dir is None and os.environ.get(DATA_VARIABLE):
        return Path(os.environ[DATA_VARIABLE])
    return data_dir


@dataclass(frozen=True)
class Download:
    """A file to download.

    Attributes:
        name: The dataset's name in messages.
        url: The official address.
        url_variable: The environment variable with the address of a mirror.
        file: The file's name in the cache folder.
        size: The expected number of bytes, which the server's own number replaces.
        embedded: A setup whose data need no download.
    """

    name: str
    url: str
    url_variable: str
    file: str
    size: int
    embedded: str

    def read_or_download(self, read: Callable[[Path], T]) -> T:
        """Read the file from the cache folder, and download it if it is missing or damaged.

        Args:
            read: Reads the file, and raises UserError if it has the wrong content.

        Raises:
            UserError: The download fails, or the file has the wrong content.
        """
        url, path = os.environ.get(self.url_variable) or self.url, Path(pooch.os_cache("mcomb")) / self.file
        with lock(make_writable(path.parent) / f".{self.file.partition('.')[0]}.lock", f"downloading {self.name}"):
            if path.is_file():
                try:
                    return read(path)
                except UserError as error:
                    warn(f"{str(error).rpartition(': ')[0]}: downloading it again")
                    path.unlink()
            say(f"downloading {self.name} from {url} to {path}")
            self._download(url, path)
            try:
                return read(path)
            except UserError as error:
                path.unlink()
                problem = str(error).rpartition(": ")[0]
                raise UserError(f"The download from {url} is not {self.name} ({problem}): {self._remedy}") from error

    def _download(self, url: str, path: Path) -> None:
        pooch.get_logger().setLevel("ERROR")  # hide its advice to record a checksum, because `read` verifies one
        try:
            with progress_bar(self.size, "B", self.name) as bar:
                downloader = pooch.HTTPDownloader(progressbar=bar, chunk_size=2**16, timeout=TIMEOUT)
                pooch.retrieve(url, known_hash=None, fname=path.name, path=path.parent, downloader=downloader)
        except Exception as error:
            problem = first_line(error)
            raise UserError(f"Cannot download {self.name} from {url} ({problem}): {self._remedy}") from error

    @property
    def _remedy(self) -> str:
        return (
            f"run it again, set {self.url_variable} to a mirror, pass the official file as --data-dir or "
            f"{DATA_VARIABLE}, or use the embedded data with --setup {self.embedded}."
        )


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type without a message."""
    return next(iter(str(error).strip().splitlines()), "").rstrip(":") or type(error).__name__
