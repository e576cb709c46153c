"""Random data in the form of a setup's dataset."""

import jax
import numpy as np

from mcomb.lab.data.datasets import ImageDataset
from mcomb.lab.setups import Setup


def random_inputs(setup: Setup, count: int) -> np.ndarray:
    """Return random pixels or tokens."""
    largest = 256 if isinstance(setup.dataset, ImageDataset) else setup.dataset.classes
    return np.random.default_rng(0).integers(0, largest, (count, *setup.dataset.shape)).astype(np.uint8)


def random_data(setup: Setup, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random inputs, and a random label for each of a network's predictions."""
    inputs = random_inputs(setup, count)
    logits = jax.eval_shape(setup.apply(1), setup.shapes(1), inputs)
    return inputs, np.random.default_rng(1).integers(0, setup.dataset.classes, logits.shape[:-1]).astype(np.int32)
