"""Define setups: a model, a dataset and a training recipe under one name."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from mcomb.errors import UserError
from mcomb.io.fingerprints import fingerprint
from mcomb.keys import stream, unrolled
from mcomb.lab.data.augmentation import Augmentation
from mcomb.lab.data.cifar10 import CIFAR10
from mcomb.lab.data.datasets import Dataset, Splits
from mcomb.lab.data.digits import DIGITS, LARGE_DIGITS
from mcomb.lab.data.text import PYDOC_TOPICS, SHAKESPEARE
from mcomb.lab.models import MLP, Decoder, Model, ResNet20, Tiny10, ViT, network_function
from mcomb.lab.training.train import Recipe, Stage
from mcomb.runtime.processes import require_agreement
from mcomb.symmetry.derive import derive_spec
from mcomb.symmetry.null_space import GROUP_EXAMPLES, extend_spec
from mcomb.symmetry.spec import PermutationSpec
from mcomb.trees import Apply, Params

STREAM = "stream"  # a name for the permutation of the residual stream in any spec
WIDEST = 100_000  # limit of the width multiplier: wider networks are too large even to plan


@dataclass(frozen=True)
class Setup:
    """A model, its dataset and its training recipe. No method loads the dataset's examples."""

    title: str
    model: type[Model]
    dataset: Dataset
    recipe: Recipe
    expect: str = ""  # the expected accuracy and training time, for the help
    options: tuple[tuple[str, Any], ...] = ()  # fields of the model with other values than their defaults
    flags: tuple[tuple[str, Any], ...] = ()  # flags of experiments with other defaults than usual

    def module(self, width: int, dtype: str = "float32") -> Model:
        """Return the Flax module at a width, which computes in a dtype."""
        if width > WIDEST:
            raise UserError(f"Width {width} exceeds {WIDEST}: use a smaller width.")
        return self.model(width=width, classes=self.dataset.classes, dtype=dtype, **dict(self.options))

    def apply(self, width: int, dtype: str = "float32") -> Apply:
        """Return the function from parameters and raw inputs to logits."""
        return network_function(self.module(width, dtype), self.dataset)

    def init(self, width: int, seed: int) -> Params:
        """Return the parameters of a new network."""
        return self._compiled_init(width)(stream(seed, "init"))

    @cache  # noqa: B019 (there are as many setups as names)
    def _compiled_init(self, width: int) -> Callable[[PRNGKeyArray], Params]:
        """Return a function from a key to parameters, compiled once for all seeds."""
        model, prepare, shape = self.module(width), self.dataset.prepare, (1, *self.dataset.shape)
        return jax.jit(lambda key: model.init(unrolled(key), prepare(jnp.zeros(shape, jnp.uint8)))["params"])

    def shapes(self, width: int) -> Params:
        """Return the shapes of a network's parameters."""
        return jax.eval_shape(lambda: self.init(width, 0))

    @cache  # noqa: B019 (there are as many setups as names)
    def spec(
        self, width: int, dtype: str = "float32", frozen: tuple[str, ...] = (), groups: str = "permutations"
    ) -> PermutationSpec:
        """Return the symmetries of the network, without those in `frozen`; see `derive_spec` for `groups`."""
        if groups == "all":
            examples = self.dataset.random_inputs(GROUP_EXAMPLES)
            return extend_spec(self.spec(width, dtype, frozen), self.apply(width, dtype), self.init(width, 0), examples)
        if frozen:
            spec = self.spec(width, dtype)
            return spec.without(*dict.fromkeys(residual_stream(spec) if name == STREAM else name for name in frozen))
        inputs = jax.ShapeDtypeStruct((1, *self.dataset.shape), jnp.uint8)
        return derive_spec(self.apply(width, dtype), self.shapes(width), inputs)


def residual_stream(spec: PermutationSpec) -> str:
    """Return the permutation that acts on the most axes: in a transformer, that of the residual stream."""
    return max(spec.sizes, key=lambda name: len(spec.axes_of(name)))


class Setups(dict[str, Setup]):
    """Setups by name. A name may add variants of the model: `decoder-text+rotary+tied`."""

    def __missing__(self, name: str) -> Setup:
        base, *words = name.split("+")
        if not words:
            raise KeyError(name)
        setup = self[base]
        options = dict(setup.options) | dict(setup.model.variants[word] for word in words)
        return replace(setup, title=f"{setup.title} ({', '.join(words)})", options=tuple(options.items()))

    def __contains__(self, name: object) -> bool:
        try:
            return self[str(name)] is not None
        except KeyError:
            return False


PAPER_AUGMENTATION = Augmentation(scale=(0.8, 1.2), rotation=30.0, flip=True)

SHORT_CIFAR10_RECIPE = Recipe(  # most epochs see images of a quarter of the size, at a quarter of the cost
    epochs=10,
    learning_rate=0.15,
    weight_decay=1e-3,
    schedule="warmup-cosine",
    augmentation=Augmentation(flip=True, shift=2),
    clip=1.0,
    checkpoint_every=1,
    stages=(Stage(share=0.7, shrink=2), Stage(share=0.3, rate=0.5)),
)
DIGITS_RECIPE = Recipe(  # the strong weight decay makes convolutional networks easy to align
    epochs=40,
    learning_rate=0.1,
    weight_decay=3e-3,
    schedule="warmup-cosine",
    augmentation=Augmentation(shift=1),
    clip=1.0,
    checkpoint_every=10,
)
TRANSFORMER_RECIPE = Recipe(
    epochs=10,
    learning_rate=4e-3,
    weight_decay=1.0,
    schedule="warmup-cosine",
    batch_size=32,
    clip=1.0,
    algorithm="adamw",
)

# Of slow networks, so that a report of pretrained ones takes minutes on two cores. A line from -1 to 2 with 13 points
# passes through both networks and their midpoint.
FEW_COMBINATIONS = (
    *(("train_examples", 200), ("test_examples", 200), ("points", 13), ("samples", 2)),
    *(("grid", 4), ("scatter", 10), ("steps", 100), ("search_steps", 100), ("counts", 4), ("line_points", 3)),
)

SETUPS = Setups({
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
    "resnet20-cifar10-short": Setup(
        title="ResNet-20 on CIFAR-10, short recipe",
        model=ResNet20,
        dataset=CIFAR10,
        recipe=SHORT_CIFAR10_RECIPE,
    ),
    "tiny10-cifar10-short": Setup(
        title="Tiny-10 on CIFAR-10, short recipe",
        model=Tiny10,
        dataset=CIFAR10,
        recipe=SHORT_CIFAR10_RECIPE,
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
    "tiny10-digits": Setup(
        title="Tiny-10 on digits",
        model=Tiny10,
        dataset=LARGE_DIGITS,  # the valid padding of the seventh layer needs more than 8×8 pixels
        flags=(("width", 4),),
        recipe=replace(DIGITS_RECIPE, augmentation=Augmentation(shift=2)),
        expect="99 % test accuracy at width 4, a few minutes per network on two CPU cores",
    ),
    "resnet20-digits": Setup(
        title="ResNet-20 on digits",
        model=ResNet20,
        dataset=DIGITS,
        flags=(("width", 4),),
        recipe=DIGITS_RECIPE,
        expect="99 % test accuracy at width 2 with --epochs 20, a few minutes per network on two CPU cores",
    ),
    "decoder-text": Setup(
        title="Decoder on text",
        model=Decoder,
        dataset=PYDOC_TOPICS,
        flags=(("width", 8), *FEW_COMBINATIONS),
        recipe=TRANSFORMER_RECIPE,
        expect="test loss 1.18 and 68 % test accuracy at width 8, about three minutes per network on two CPU cores",
    ),
    "decoder-shakespeare": Setup(
        title="Decoder on Tiny Shakespeare",
        model=Decoder,
        dataset=SHAKESPEARE,
        flags=(("width", 8), *FEW_COMBINATIONS),
        recipe=TRANSFORMER_RECIPE,
    ),
    "vit-digits": Setup(
        title="ViT on digits",
        model=ViT,
        dataset=DIGITS,
        flags=(("width", 4),),
        recipe=replace(
            TRANSFORMER_RECIPE,
            epochs=200,
            learning_rate=3e-3,
            augmentation=Augmentation(shift=1),
            batch_size=100,
            checkpoint_every=50,
        ),
        expect="98 % test accuracy at width 4, about two minutes per network on two CPU cores",
    ),
    "vit-cifar10": Setup(
        title="ViT on CIFAR-10",
        model=ViT,
        options=(("patch", 4),),
        dataset=CIFAR10,
        recipe=replace(TRANSFORMER_RECIPE, epochs=20, batch_size=100, augmentation=Augmentation(flip=True, shift=4)),
    ),
})  # fmt: skip


class LoadedData(NamedTuple):
    """The examples of a setup and their fingerprint."""

    splits: Splits
    fingerprint: str


@cache
def load_data(setup: str, data_dir: Path | None) -> LoadedData:
    """Load a setup's examples once, and require the same examples in all processes."""
    splits = SETUPS[setup].dataset.load(data_dir)
    # Fingerprints contain names, and those of trained networks contain these names.
    named = ((name, {"images": split.inputs, "labels": split.labels}) for name, split in splits._asdict().items())
    found = fingerprint(OrderedDict(named))
    require_agreement("data", found)
    return LoadedData(splits, found)
