"""PyTorch versions of the lab's networks with the same weights, as baselines; requires torch."""

import os
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.random_data import random_inputs
from mcomb.lab.data.datasets import ImageDataset
from mcomb.lab.models import MLP, Decoder, ResNet20, Tiny10, ViT
from mcomb.lab.setups import Setup
from mcomb.trees import Params, named_leaves


def to_torch(params: Params) -> dict[str, Tensor]:
    """Return the weights by name, with convolution kernels in PyTorch's order of axes."""
    weights = {name: torch.from_numpy(np.array(leaf)) for name, leaf in named_leaves(params).items()}
    return {name: _kernel(value) if value.ndim == 4 else value for name, value in weights.items()}


def _kernel(value: Tensor) -> Tensor:
    return value.permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last)


class TorchNetwork(torch.nn.Module):
    """A setup's network, from raw pixels to logits; the constructor compares its logits with ours."""

    def __init__(self, setup: Setup, width: int, params: Params) -> None:
        super().__init__()
        torch.set_num_threads(os.cpu_count() or 1)
        for name, value in to_torch(params).items():
            self.register_parameter(name, torch.nn.Parameter(value))
        bodies: Any = {
            MLP: self._mlp,
            Tiny10: self._tiny10,
            ResNet20: self._resnet20,
            Decoder: self._decoder,
            ViT: self._vit,
        }
        self.body, self.module = bodies[setup.model], setup.module(width)
        if isinstance(setup.dataset, ImageDataset):
            constants = (setup.dataset.mean, setup.dataset.std)
            self.mean, self.std = (torch.tensor(values).reshape(1, -1, 1, 1) for values in constants)
        inputs = random_inputs(setup, 10)
        ours = np.asarray(jax.jit(setup.apply(width))(params, inputs))
        difference = np.abs(self(torch.from_numpy(inputs)).detach().numpy() - ours).max()
        assert difference < 1e-3 * np.abs(ours).max(), f"PyTorch has another network: logits differ by {difference}"

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        if inputs.ndim == 4:
            images = inputs.permute(0, 3, 1, 2).to(memory_format=torch.channels_last).float()
            inputs = (images - self.mean) / self.std
        return self._dense(self.body(inputs), "logits")

    def _dense(self, x: Tensor, name: str) -> Tensor:
        kernel: Any = getattr(self, f"{name}/kernel")
        return functional.linear(x, kernel.flatten(1).T, self._bias(name))

    def _bias(self, name: str) -> Tensor | None:
        bias: Any = getattr(self, f"{name}/bias", None)
        return None if bias is None else bias.flatten()

    def _convolve(self, x: Tensor, name: str, stride: int = 1, padding: str = "SAME") -> Tensor:
        kernel: Any = getattr(self, f"{name}/kernel")
        if padding == "SAME" and kernel.shape[-1] > 1:  # like XLA, which pads only after the last pixel for stride 2
            before, after = (1, 1) if stride == 1 else (0, 1)
            x = functional.pad(x, (before, after, before, after))
        return functional.conv2d(x, kernel, stride=stride)

    def _normalise(self, x: Tensor, name: str) -> Tensor:
        scale, bias = (getattr(self, f"{name}/{part}") for part in ("scale", "bias"))
        return functional.layer_norm(x.permute(0, 2, 3, 1), scale.shape, scale, bias, 1e-6).permute(0, 3, 1, 2)

    def _normalise_last(self, x: Tensor, name: str) -> Tensor:
        scale: Any = getattr(self, f"{name}/scale")
        if self.module.norm == "rms":
            return functional.rms_norm(x, scale.shape, scale, 1e-6)
        return functional.layer_norm(x, scale.shape, scale, self._bias(name), 1e-6)

    def _blocks(self, x: Tensor, causal: bool) -> Tensor:
        positions: Any = self.positions
        x = x + positions
        for i in range(1, self.module.layers + 1):
            y = self._normalise_last(x, f"block{i}/norm1")
            out: Any = getattr(self, f"block{i}/attention/out/kernel")
            parts = (self._dense(y, f"block{i}/attention/{name}") for name in ("query", "key", "value"))
            query, key, value = (part.unflatten(-1, out.shape[:2]).transpose(1, 2) for part in parts)
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
            mixed = mixed.transpose(1, 2).flatten(2)
            x = x + functional.linear(mixed, out.flatten(0, 1).T, self._bias(f"block{i}/attention/out"))
            y = self._dense(self._normalise_last(x, f"block{i}/norm2"), f"block{i}/up")
            x = x + self._dense(functional.gelu(y, approximate="tanh"), f"block{i}/down")
        return self._normalise_last(x, "norm")

    def _decoder(self, tokens: Tensor) -> Tensor:
        table: Any = getattr(self, "embedding/embedding")
        return self._blocks(functional.embedding(tokens.long(), table), causal=True)

    def _vit(self, images: Tensor) -> Tensor:
        size = self.module.patch
        patches = images.unfold(2, size, size).unfold(3, size, size).permute(0, 2, 3, 4, 5, 1)
        x = self._dense(patches.flatten(3).flatten(1, 2), "patches")
        first: Any = self.class_token
        return self._blocks(torch.cat([first.expand(len(x), 1, -1), x], dim=1), causal=False)[:, 0]

    def _mlp(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1).flatten(1)
        for i in (1, 2, 3):
            x = functional.relu(self._dense(x, f"dense{i}"))
        return x

    def _tiny10(self, x: Tensor) -> Tensor:
        for i, (_, _, stride, padding) in enumerate(Tiny10.LAYERS, 1):
            x = functional.relu(self._normalise(self._convolve(x, f"conv{i}", stride, padding), f"norm{i}"))
        return x.mean((2, 3))

    def _resnet20(self, x: Tensor) -> Tensor:
        x = functional.relu(self._normalise(self._convolve(x, "conv0"), "norm0"))
        for group, block in ((g, b) for g in (1, 2, 3) for b in (1, 2, 3)):
            name, stride = f"block{group}_{block}", 2 if group > 1 and block == 1 else 1
            y = functional.relu(self._normalise(self._convolve(x, f"{name}/conv1", stride), f"{name}/norm1"))
            y = self._normalise(self._convolve(y, f"{name}/conv2"), f"{name}/norm2")
            if stride > 1:
                x = self._normalise(self._convolve(x, f"{name}/shortcut_conv", stride), f"{name}/shortcut_norm")
            x = functional.relu(x + y)
        return x.mean((2, 3))
