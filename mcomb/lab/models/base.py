"""The base class of the lab's networks, and the function that runs one on raw inputs.

Parameters are float32. With the dtype bfloat16, products, activations and outputs of norms are bfloat16. Flax computes
the statistics of norms in float32, and `network_function` converts logits to float32.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, cast

import flax.linen as nn
import jax.numpy as jnp

from mcomb.lab.data.datasets import Dataset
from mcomb.trees import Apply, Array, Params


class Model(nn.Module):
    """Base class of networks that return logits. Every submodule has an explicit name."""

    width: int  # multiplier: the first layer has 16·width units
    classes: int  # number of logits
    dtype: str = "float32"  # of computations
    depth: ClassVar[int]  # number of layers
    variants: ClassVar[Mapping[str, tuple[str, Any]]] = {}  # a field and its value for each word in a setup's name

    @staticmethod
    def layer_of(leaf: str) -> int:
        """Return the layer of a leaf, counted from 1."""
        raise NotImplementedError


def numbered_layer(leaf: str) -> int:
    """Return the number in the first component of a leaf's name."""
    return int("".join(filter(str.isdigit, leaf.partition("/")[0])))


@cache  # equal models share one function, so that all experiments reuse its compiled code
def network_function(model: nn.Module, dataset: Dataset) -> Apply:
    """Return the function from parameters and raw inputs to logits."""

    def apply(params: Params, inputs: Array) -> Array:
        return cast(Array, model.apply({"params": params}, dataset.prepare(inputs))).astype(jnp.float32)

    return apply
