"""Random inputs for the lab's networks."""

import numpy as np

from mcomb.lab.data.datasets import TextDataset


def raw_inputs(dataset, count, seed=0):
    """Return inputs as a dataset stores them."""
    largest = dataset.classes if isinstance(dataset, TextDataset) else 255
    return np.random.default_rng(seed).integers(0, largest, (count, *dataset.shape)).astype(np.uint8)


def model_inputs(dataset, count, seed=0):
    """Return inputs of a model: pixels between 0 and 1, or tokens."""
    raw = raw_inputs(dataset, count, seed)
    return raw.astype(np.int32) if isinstance(dataset, TextDataset) else raw.astype(np.float32) / 255
