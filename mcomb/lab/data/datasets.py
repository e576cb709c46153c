"""Define datasets: inputs and labels in NumPy arrays, and how networks read and score them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int32, Int64, Integer, Shaped, UInt8

from mcomb.trees import Array

PARTS_OF_TEXT = 10  # consecutive parts of a text that take the place of classes when networks split the data


class Split(NamedTuple):
    """Inputs and their labels."""

    inputs: UInt8[np.ndarray, "n *shape"]
    labels: Int32[np.ndarray, "n *positions"]

    def first(self, count: int | None) -> "Split":
        """Return the first `count` examples; all if `count` is None."""
        return self.take(slice(count))

    def take(self, rows: Any) -> "Split":
        """Return the examples in these rows."""
        return type(self)(self.inputs[rows], self.labels[rows])

    def subset(self, count: int | None) -> "Split":
        """Return the first `count` examples, which represent all because images are in random order."""
        return self.first(count)


class Windows(Split):
    """Consecutive windows of a text, which differ in difficulty from one passage to the next."""

    def subset(self, count: int | None) -> Split:
        """Return `count` windows at even distances over the whole text; all if `count` is None or too large."""
        total = len(self.labels)
        count = total if count is None else min(count, total)
        return self.take(np.arange(count) * total // count)


class Splits(NamedTuple):
    """The train and test examples of a dataset, in the same order for every source."""

    train: Split
    test: Split


@dataclass(frozen=True, kw_only=True)
class Dataset(ABC):
    """A dataset: its inputs and classes, and the function that loads it.

    Attributes:
        name: The name in messages.
        classes: The number of logits.
        shape: The shape of one input.
        count: Returns the numbers of train and test examples without loading them.
        load: The function from the path of a local copy, or None, to the splits.
        is_fixed: Whether every source has the same examples. Otherwise their fingerprint is part of a network's key.
        unit: The unit that has a label: an example, or a token of it.
    """

    name: str
    classes: int
    shape: tuple[int, ...]
    count: Callable[[], tuple[int, int]]
    load: Callable[[Path | None], Splits]
    is_fixed: bool = True
    unit: ClassVar[str] = "example"

    @abstractmethod
    def prepare(self, inputs: Array) -> Array:
        """Convert raw inputs to the inputs of a model."""

    @abstractmethod
    def random_inputs(self, count: int) -> UInt8[np.ndarray, "n *shape"]:
        """Return random raw inputs, the same in every call, without loading the dataset."""

    @abstractmethod
    def groups(self, labels: np.ndarray) -> Int64[np.ndarray, "n"]:
        """Return the group of each example. Networks with different data see groups with different frequencies."""


@dataclass(frozen=True, kw_only=True)
class ImageDataset(Dataset):
    """Images of shape (height, width, channels) with one label each.

    Attributes:
        mean: Means of raw pixels, for each channel.
        std: Standard deviations of raw pixels, for each channel.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def prepare(self, inputs: Shaped[Array, "n h w c"]) -> Float32[Array, "n h w c"]:
        """Normalize the pixels of each channel."""
        mean, std = (jnp.array(values, jnp.float32).reshape(1, 1, 1, -1) for values in (self.mean, self.std))
        return (inputs.astype(jnp.float32) - mean) / std

    def random_inputs(self, count: int) -> np.ndarray:
        """Return pixels with the mean and standard deviation of each channel."""
        pixels = np.random.default_rng(0).normal(self.mean, self.std, (count, *self.shape))
        return np.clip(np.rint(pixels), 0, 255).astype(np.uint8)

    def groups(self, labels: np.ndarray) -> np.ndarray:
        """Return the labels."""
        return labels.astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class TextDataset(Dataset):
    """Windows of consecutive tokens, labelled with the next token at each position."""

    unit = "token"

    def prepare(self, inputs: Integer[Array, "n t"]) -> Int32[Array, "n t"]:
        """Return the tokens as indices."""
        return inputs.astype(jnp.int32)

    def random_inputs(self, count: int) -> np.ndarray:
        """Return random tokens."""
        return np.random.default_rng(0).integers(self.classes, size=(count, *self.shape), dtype=np.uint8)

    def groups(self, labels: np.ndarray) -> np.ndarray:
        """Return the tenth of the text that each window is from."""
        return np.arange(len(labels)) * PARTS_OF_TEXT // len(labels)


def count_windows(tokens: int, context: int) -> tuple[int, int]:
    """Return the numbers of train and test windows in a text."""
    train, test = ((part - 1) // context for part in split_length(tokens))
    return train, test


def split_length(tokens: int) -> tuple[int, int]:
    """Return the numbers of tokens in the train and the test split: the first nine tenths, and the rest."""
    train = tokens * 9 // 10
    return train, tokens - train


def split_text(tokens: UInt8[np.ndarray, "n"], context: int) -> Splits:
    """Cut a text into windows of `context` tokens without overlap, for training and for testing."""
    train, test = np.split(tokens, [split_length(len(tokens))[0]])
    return Splits(_windows(train, context), _windows(test, context))


def _windows(tokens: UInt8[np.ndarray, "n"], context: int) -> Split:
    count = (len(tokens) - 1) // context
    inputs, labels = (tokens[start:][: count * context].reshape(count, context) for start in (0, 1))
    return Windows(np.ascontiguousarray(inputs), labels.astype(np.int32))
