"""Merge two BatchNorm ResNets trained in PyTorch.

    python -m benchmarks.pytorch_merge    # five minutes on two CPU cores

The benchmark trains two small ResNets on scikit-learn's digits from different seeds, in PyTorch. It measures the
barrier on the line between them, naive and aligned, and merges them by several methods. It then measures the merged
modules in PyTorch, which must give the same numbers as JAX. Nothing is downloaded.
"""

import time
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from sklearn.datasets import load_digits

import mcomb
from mcomb.lab import cli
from mcomb.lab.cli import Flag
from mcomb.pytorch import align, from_module, merge, to_arrays, to_module

TRAIN, HELD_OUT = 1000, 300  # the remaining 497 images are test images
SHARES = np.linspace(0, 1, 11)
METHODS = ("average", "refit", "learned")


@dataclass(frozen=True)
class PytorchMergeConfig:
    """Flags of the benchmark."""

    width: Annotated[int, Flag("channels of the first stage", 1)] = 16
    epochs: Annotated[int, Flag("epochs of training", 1)] = 25
    seed: Annotated[int, Flag("seed of A; that of B is one more", 0)] = 0


def build(width: int) -> Any:
    """Return a ResNet with two stages of two blocks."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, channels: int, out: int, stride: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
            self.norm1 = nn.BatchNorm2d(out)
            self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
            self.norm2 = nn.BatchNorm2d(out)
            self.shortcut = nn.Sequential()
            if stride > 1:
                self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

        def forward(self, x: Any) -> Any:
            y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
            return torch.relu(y + self.shortcut(x))

    stem = (nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    blocks = (
        Block(width, width, 1),
        Block(width, width, 1),
        Block(width, 2 * width, 2),
        Block(2 * width, 2 * width, 1),
    )
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10))


def train(seed: int, width: int, epochs: int, x: Any, y: Any) -> Any:
    """Train a ResNet in PyTorch, without mcomb."""
    import torch

    torch.manual_seed(seed)
    module = build(width).train()
    steps = epochs * (len(x) // 50)
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.2, total_steps=steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(50):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(module(x[rows]), y[rows]).backward()
            optimiser.step()
            schedule.step()
    return module.eval()


def score_in_pytorch(module: Any, x: Any, y: Any) -> tuple[float, float]:
    """Return the loss and the accuracy, computed in PyTorch."""
    import torch

    with torch.no_grad():
        logits = module.eval()(x)
    return float(torch.nn.functional.cross_entropy(logits, y)), float((logits.argmax(1) == y).float().mean())


def main(flags: PytorchMergeConfig) -> None:
    """Train, align, measure and merge."""
    import torch

    pixels, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(pixels))
    x = torch.tensor(pixels[order] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    y = torch.tensor(digits[order])
    held_out, test = slice(TRAIN, TRAIN + HELD_OUT), slice(TRAIN + HELD_OUT, None)

    start = time.perf_counter()
    seeds = flags.seed, flags.seed + 1
    a, b = (train(seed, flags.width, flags.epochs, x[:TRAIN], y[:TRAIN]) for seed in seeds)
    print(f"trained two ResNets in PyTorch in {time.perf_counter() - start:.0f} s")
    start = time.perf_counter()
    aligned = align(a, b, x[:2])
    print(f"aligned them in {time.perf_counter() - start:.1f} s")

    apply, params = from_module(a)
    inputs, labels, train_inputs = (to_arrays(rows) for rows in (x[test], y[test], x[:TRAIN]))
    for name, other in (("naive", b), ("aligned", aligned)):
        networks = params, from_module(other)[1]
        sweep = mcomb.sweep(apply, networks, inputs, labels, mcomb.linear, points=SHARES, statistics_from=train_inputs)
        print(f"{name:8} barrier: loss {sweep.barrier.loss:.3f}, accuracy {sweep.barrier.accuracy:.3f}")

    rows = {"A": a, "B": b, "aligned B": aligned}
    rows["naive average"] = merge((a, b), x[held_out], y[held_out], method="average")
    rows |= {method: merge((a, aligned), x[held_out], y[held_out], method=method) for method in METHODS}
    print(f"{'':14} {'PyTorch: loss':>14} {'accuracy':>9} {'JAX: loss':>12} {'accuracy':>9}")
    for name, module in rows.items():
        loss, accuracy = score_in_pytorch(module, x[test], y[test])
        ours = mcomb.score(apply, from_module(module)[1], inputs, labels)
        print(f"{name:14} {loss:14.5f} {accuracy:9.4f} {ours.loss:12.5f} {ours.accuracy:9.4f}")
        assert abs(loss - ours.loss) < 1e-4 * max(1, loss), name
        assert accuracy == np.float32(ours.accuracy), name
    again = to_module(from_module(aligned)[1], b).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in aligned.state_dict().items())


if __name__ == "__main__":
    cli.run(lambda: main(cli.parse(PytorchMergeConfig, __doc__ or "")))
