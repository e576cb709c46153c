"""Setups: a model, a dataset and a training recipe under one name."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mcomb.data import Dataset, cifar10, digits
from mcomb.models import MLP, Classifier, ResNet20, Tiny10
from mcomb.train import Augmentation, Recipe


@dataclass(frozen=True)
class Setup:
    """What is trained, on what, and how."""

    title: str
    model: type[Classifier]
    data: Callable[[Path | None], Dataset]
    image: tuple[int, int, int]
    recipe: Recipe


PAPER_AUGMENTATION = Augmentation(scale=(0.8, 1.2), rotation=30.0, flip=True)

SETUPS = {
    "resnet20-cifar10": Setup(
        title="ResNet-20 on CIFAR-10",
        model=ResNet20,
        data=cifar10,
        image=(32, 32, 3),
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
        data=cifar10,
        image=(32, 32, 3),
        recipe=Recipe(
            epochs=300,
            learning_rate=0.01,
            weight_decay=1e-4,
            schedule="thirds",
            augmentation=PAPER_AUGMENTATION,
        ),
    ),
    "mlp-digits": Setup(
        title="MLP on digits",
        model=MLP,
        data=digits,
        image=(8, 8, 1),
        recipe=Recipe(
            epochs=200,
            learning_rate=0.1,
            weight_decay=1e-3,
            schedule="cosine",
            augmentation=Augmentation(shift=1),
            clip=1.0,
            checkpoint_every=50,
        ),
    ),
}
