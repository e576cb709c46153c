"""The lab's networks: an MLP, the paper's two convolutional networks, and two transformers."""

from mcomb.lab.models.base import Model, network_function
from mcomb.lab.models.convolutional import ResNet20, Tiny10
from mcomb.lab.models.mlp import MLP
from mcomb.lab.models.transformers import Decoder, ViT

__all__ = ["MLP", "Decoder", "Model", "ResNet20", "Tiny10", "ViT", "network_function"]
