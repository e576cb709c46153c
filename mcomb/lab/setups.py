"""Define setups: a model, a dataset and a training recipe under one name."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from mcomb.errors import UserError
from mcomb.io.fingerprints import fingerprint
from mcomb.keys import stream, unrolled
from mcomb.lab.data.augmentation import Augmentation
from mcomb.lab.data.datasets import CIFAR10, DIGITS, Dataset, Splits
from mcomb.lab.models import MLP, Classifier, ResNet20, Tiny10, classifier
from mcomb.lab.training.train import Recipe
from mcomb.runtime.processes import require_agreement
from mcomb.symmetry.derive import derive_spec
from mcomb.symmetry.spec import PermutationSpec
from mcomb.trees import Apply, Params

WIDEST = 100_000  # limit of the width multiplier: wider networks are too large even to plan


@dataclass(frozen=True)
class Setup:
    """A model, its dataset and its training recipe. No method loads the dataset's images."""

    title: str
    model: type[Classifier]
    dataset: Dataset
    recipe: Recipe
    expect: str = ""  # the expected accuracy and training time, for the help

    def module(self, width: int, dtype: str = "float32") -> Classifier:
        """Return the Flax module at a width, which computes in a dtype."""
        if width > WIDEST:
            raise UserError(f"Width {width} exceeds {WIDEST}: use a smaller width.")
        return self.model(width=width, classes=self.dataset.classes, dtype=dtype)

    def apply(self, width: int, dtype: str = "float32") -> Apply:
        """Return the function from parameters and raw pixels to logits."""
        return classifier(self.module(width, dtype), self.dataset.mean, self.dataset.std)

    def init(self, width: int, seed: int) -> Params:
        """Return the parameters of a new network."""
        return self._compiled_init(width)(stream(seed, "init"))

    @cache  # noqa: B019 (there are as many setups as names)
    def _compiled_init(self, width: int) -> Callable[[PRNGKeyArray], Params]:
        """Return a function from a key to parameters, compiled once for all seeds."""
        model, shape = self.module(width), (1, *self.dataset.image)
        return jax.jit(lambda key: model.init(unrolled(key), jnp.zeros(shape))["params"])

    def shapes(self, width: int) -> Params:
        """Return the shapes of a network's parameters."""
        return jax.eval_shape(lambda: self.init(width, 0))

    @cache  # noqa: B019 (there are as many setups as names)
    def spec(self, width: int, dtype: str = "float32") -> PermutationSpec:
        """Return the permutation symmetries of the network."""
        images = jax.ShapeDtypeStruct((1, *self.dataset.image), jnp.uint8)
        return derive_spec(self.apply(width, dtype), self.shapes(width), images)


PAPER_AUGMENTATION = Augmentation(scale=(0.8, 1.2), rotation=30.0, flip=True)

SETUPS = {
    "resnet20-cifar10": Setup(
        title="ResNet-20 on CIFAR-10",
        model=ResNet20,
        dataset=CIFAR10,
        recipe=Recipe(
            epochs=250,
            learning_rate=0.1,
            weight_decay=1e-4,
            schedule="warmup-cosine",
            augmentation=PAPER_AUGMENTATION,
        ),
    ),
    "tiny10-cifar10": Setup(
        title="Tiny-10 on CIFAR-10",
        model=Tiny10,
        dataset=CIFAR10,
        recipe=Recipe(
            epochs=300,
            learning_rate=0.01,
            weight_decay=1e-4,
            schedule="thirds",
            augmentation=PAPER_AUGMENTATION,
        ),
    ),
    "mlp-cifar10": Setup(
        title="MLP on CIFAR-10",
        model=MLP,
        dataset=CIFAR10,
        recipe=Recipe(
            epochs=20,
            learning_rate=0.05,
            weight_decay=1e-3,
            schedule="cosine",
            augmentation=Augmentation(flip=True, shift=2),
            batch_size=200,
            clip=1.0,
        ),
        expect="59 % test accuracy at width 32, a few minutes per network on two CPU cores",
    ),
    "mlp-digits": Setup(
        title="MLP on digits",
        model=MLP,
        dataset=DIGITS,
        recipe=Recipe(
            epochs=200,
            learning_rate=0.1,
            weight_decay=1e-3,
            schedule="cosine",
            augmentation=Augmentation(shift=1),
            clip=1.0,
            checkpoint_every=50,
        ),
        expect="99 % test accuracy at width 32, less than twenty seconds per network on two CPU cores",
    ),
}


class LoadedData(NamedTuple):
    """The images of a setup and their fingerprint."""

    splits: Splits
    fingerprint: str


@cache
def load_data(setup: str, data_dir: Path | None) -> LoadedData:
    """Load a setup's images once, and require the same images in all processes."""
    splits = SETUPS[setup].dataset.load(data_dir)
    found = fingerprint(splits)
    require_agreement("images", found)
    return LoadedData(splits, found)
