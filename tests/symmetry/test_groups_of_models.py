"""The groups of the lab's networks and of Hugging Face families are those that a person derives."""

import os
from collections import Counter
from typing import ClassVar

os.environ["HF_HUB_OFFLINE"] = "1"

import jax
import numpy as np
import pytest

from benchmarks.pytorch_families import FAMILIES
from mcomb import derive_spec
from mcomb.lab.models import Decoder, ViT
from mcomb.pytorch import from_module, to_arrays

HEADS = ("invertible matrix", "invertible matrix")  # queries with keys, values with outputs
STREAM = {"rms": "rotation", "layer": "mean-keeping rotation"}


class SmallDecoder(Decoder):
    layers: ClassVar[int] = 1


class SmallViT(ViT):
    layers: ClassVar[int] = 1


def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 20, (16, 9))


def images(size: int, channels: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(8, size, size, channels)).astype(np.float32)


def groups_of(apply, params, inputs):
    """Derive and check a spec, and count its matrices and scalings; foldings have the kind `fold`."""
    with jax.numpy_rank_promotion("allow"):
        spec = derive_spec(apply, params, inputs, groups="all")
        spec.check(apply, params, inputs)
    scalings = ["fold" if own.gain else own.values for own in spec.scalings.values()]
    return Counter([*(group.kind for group in spec.groups.values()), *scalings])


def groups_of_module(module, inputs):
    params = module.init(jax.random.key(0), inputs)["params"]
    return groups_of(lambda p, x: module.apply({"params": p}, x), jax.tree.map(np.asarray, params), inputs)


@pytest.mark.parametrize(
    ("norm", "tied", "positions"),  # every pair of options
    [("rms", False, "learned"), ("rms", True, "rotary"), ("layer", False, "rotary"), ("layer", True, "learned")],
)
def test_groups_of_decoders(norm, tied, positions):
    module = SmallDecoder(1, 20, norm=norm, tied=tied, positions=positions, bias=norm == "layer")
    heads = HEADS if positions == "learned" else HEADS[1:]  # rotary positions freeze the pairs of queries and keys
    signs = ["sign"] if norm == "rms" else []  # LayerNorm needs the mean
    stream = ["nonzero", "nonzero", *signs] if tied else [STREAM[norm], "fold", "fold", "fold"]
    assert groups_of_module(module, tokens()) == Counter([*heads, *stream])


def test_groups_of_gated_decoders():
    found = groups_of_module(SmallDecoder(1, 20, gated=True), tokens())
    assert found == Counter([*HEADS, "rotation", "fold", "fold", "fold", "nonzero"])


def test_groups_of_vision_transformers():
    found = groups_of_module(SmallViT(1, 10), images(8, 1))
    assert found == Counter([*HEADS, "mean-keeping rotation", "fold", "fold", "fold"])


FAMILY_GROUPS = {
    "GPT-2": {"invertible matrix": 4, "nonzero": 4},  # tied: no rotations, and the last gain stays
    "OPT": {"invertible matrix": 4, "nonzero": 4, "positive": 2},  # the same, with ReLU
    "Llama": {"rotation": 1, "fold": 5, "invertible matrix": 2, "nonzero": 2},  # rotary, gated
    "Qwen2": {"rotation": 1, "fold": 5, "invertible matrix": 2, "nonzero": 2},  # the same, with biases
    "ViT": {"mean-keeping rotation": 1, "fold": 5, "invertible matrix": 4},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of the packages
@pytest.mark.parametrize("name", FAMILY_GROUPS)
def test_groups_of_hugging_face_families(name):
    pytest.importorskip("torchax", reason="torchax is not installed", exc_type=Exception)
    pytest.importorskip("transformers", reason="transformers is not installed", exc_type=Exception)
    family = FAMILIES[name]
    apply, params = from_module(family.build())
    assert groups_of(apply, params, to_arrays(family.example())) == Counter(FAMILY_GROUPS[name])
