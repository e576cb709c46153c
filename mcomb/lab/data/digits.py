"""Load scikit-learn's digits, which need no download."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mcomb.lab.data.datasets import ImageDataset, Split, Splits


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


def load_large_digits(data_dir: Path | None = None) -> Splits:
    """Load the digits enlarged to 16×16, each pixel repeated twice in both directions."""
    train, test = load_digits(data_dir)
    return Splits(*(Split(split.inputs.repeat(2, axis=1).repeat(2, axis=2), split.labels) for split in (train, test)))


DIGITS = ImageDataset(
    name="digits",
    classes=10,
    shape=(8, 8, 1),
    count=lambda: (1400, 397),
    mean=(4.885546875,),
    std=(6.01334015811327,),
    load=load_digits,
)
LARGE_DIGITS = replace(DIGITS, name="large digits", shape=(16, 16, 1), load=load_large_digits)
