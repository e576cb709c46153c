"""Load texts as characters: the documentation that comes with Python, and Tiny Shakespeare.

The vocabulary is fixed, so that a network trained on one text runs on another. It consists of newline, printable ASCII,
and one symbol for all other characters.
"""

import hashlib
from pathlib import Path

import numpy as np
from jaxtyping import Integer, UInt8

from mcomb.errors import UserError
from mcomb.lab.data.datasets import Splits, TextDataset, count_windows, split_text
from mcomb.lab.data.download import Download, local_copy

OTHER = "\N{REPLACEMENT CHARACTER}"
SYMBOLS = OTHER + "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))
CONTEXT = 64  # characters

SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_BYTES = 1_115_394
SHAKESPEARE_DOWNLOAD = Download(
    name="Tiny Shakespeare",
    url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    url_variable="MCOMB_SHAKESPEARE_URL",
    file="tinyshakespeare.txt",
    size=SHAKESPEARE_BYTES,
    embedded="decoder-text",
)


def encode(text: str) -> UInt8[np.ndarray, "n"]:
    """Return the index in SYMBOLS of each character."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    table = np.zeros(128, np.uint8)
    table[[ord(symbol) for symbol in SYMBOLS[1:]]] = range(1, len(SYMBOLS))
    return table[np.where(codes < len(table), codes, 0)]


def decode(tokens: Integer[np.ndarray, "n"]) -> str:
    """Return the text of tokens."""
    return "".join(SYMBOLS[token] for token in tokens)


def read_topics() -> str:
    """Return the topics of Python's `help`, which differ between versions of Python."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise UserError("This Python lacks the module pydoc_data: install Python's standard library.") from error
    return "".join(topics[name] for name in sorted(topics))


def load_topics(data_dir: Path | None = None) -> Splits:
    """Load the topics of Python's `help`."""
    return _split("The text of pydoc_data", read_topics(), "install Python's standard library.")


def load_shakespeare(data_dir: Path | None = None) -> Splits:
    """Load Tiny Shakespeare from a local copy or from the internet.

    Args:
        data_dir: The file or its folder; None for the value of MCOMB_DATA_DIR, if set.

    Raises:
        UserError: The local copy is missing or has the wrong content, or the download fails.
    """
    local = local_copy(data_dir)
    if local is None:
        return SHAKESPEARE_DOWNLOAD.read_or_download(_read_shakespeare)
    return _read_shakespeare(local / SHAKESPEARE_DOWNLOAD.file if local.is_dir() else local)


def _read_shakespeare(path: Path) -> Splits:
    remedy = (
        f"pass the official {SHAKESPEARE_DOWNLOAD.file} or its folder, or use --setup {SHAKESPEARE_DOWNLOAD.embedded}."
    )
    try:
        content = path.read_bytes()
        text = content.decode()
    except OSError as error:
        raise UserError(f"Cannot read {path} ({error.strerror}): {remedy}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}): {remedy}") from error
    splits = _split(str(path), text, remedy)
    checksum = hashlib.sha256(content).hexdigest()
    if checksum != SHAKESPEARE_SHA256:
        raise UserError(f"{path} is not Tiny Shakespeare (SHA-256 {checksum}, not {SHAKESPEARE_SHA256}): {remedy}")
    return splits


def _split(what: str, text: str, remedy: str) -> Splits:
    """Return windows of a text; raise an error if it is too short for one in each split."""
    if min(count_windows(len(text), CONTEXT)) < 1:
        raise UserError(f"{what} has {len(text)} characters, too few for the context of {CONTEXT}: {remedy}")
    return split_text(encode(text), CONTEXT)


PYDOC_TOPICS = TextDataset(
    name="text",
    classes=len(SYMBOLS),
    shape=(CONTEXT,),
    count=lambda: count_windows(len(read_topics()), CONTEXT),
    load=load_topics,
    is_fixed=False,
)
SHAKESPEARE = TextDataset(
    name="shakespeare",
    classes=len(SYMBOLS),
    shape=(CONTEXT,),
    count=lambda: count_windows(SHAKESPEARE_BYTES, CONTEXT),
    load=load_shakespeare,
)
