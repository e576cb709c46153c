"""PyTorch versions of the lab's networks with the same weights, as baselines; requires torch."""

import os
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from mcomb.lab.models import MLP, ResNet20, Tiny10
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
        self.body = {MLP: self._mlp, Tiny10: self._tiny10, ResNet20: self._resnet20}[setup.model]
        channels = len(setup.dataset.mean)
        constants = (setup.dataset.mean, setup.dataset.std)
        self.mean, self.std = (torch.tensor(values).reshape(1, channels, 1, 1) for values in constants)
        images = np.random.default_rng(0).integers(0, 256, (10, *setup.dataset.image)).astype(np.uint8)
        ours = np.asarray(jax.jit(setup.apply(width))(params, images))
        difference = np.abs(self(torch.from_numpy(images)).detach().numpy() - ours).max()
        assert difference < 1e-3 * np.abs(ours).max(), f"PyTorch has another network: logits differ by {difference}"

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        x = images.permute(0, 3, 1, 2).to(memory_format=torch.channels_last).float()
        return self._dense(self.body((x - self.mean) / self.std), "logits")

    def _dense(self, x: Tensor, name: str) -> Tensor:
        return x @ getattr(self, f"{name}/kernel") + getattr(self, f"{name}/bias")

    def _convolve(self, x: Tensor, name: str, stride: int = 1, padding: str = "SAME") -> Tensor:
        kernel: Any = getattr(self, f"{name}/kernel")
        if padding == "SAME" and kernel.shape[-1] > 1:  # like XLA, which pads only after the last pixel for stride 2
            before, after = (1, 1) if stride == 1 else (0, 1)
            x = functional.pad(x, (before, after, before, after))
        return functional.conv2d(x, kernel, stride=stride)

    def _normalise(self, x: Tensor, name: str) -> Tensor:
        scale, bias = (getattr(self, f"{name}/{part}") for part in ("scale", "bias"))
        return functional.layer_norm(x.permute(0, 2, 3, 1), scale.shape, scale, bias, 1e-6).permute(0, 3, 1, 2)

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
