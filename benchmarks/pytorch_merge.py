"""Merge two networks trained in PyTorch, and measure the results in PyTorch and in JAX.

    python -m benchmarks.pytorch_merge                     # BatchNorm ResNets on digits: five minutes on two CPU cores
    python -m benchmarks.pytorch_merge --network gpt2      # GPT-2s on Python's documentation: five minutes

The benchmark trains two networks from different seeds, in PyTorch. It measures the barrier on the line between them,
naive and aligned, and merges them by several methods. It then measures the merged modules in PyTorch, which must give
the same numbers as JAX. Nothing is downloaded.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from sklearn.datasets import load_digits

import mcomb
from mcomb.lab import cli
from mcomb.lab.cli import Flag
from mcomb.lab.data.text import CONTEXT, SYMBOLS, encode, read_topics
from mcomb.pytorch import align, from_module, merge, to_arrays, to_module

SHARES = np.linspace(0, 1, 5)
MEASURED_METHODS: tuple[str | mcomb.Method, ...] = ("average", "slerp", "refit", mcomb.learned(per="unit", steps=100))
NETWORK_MATCHERS = {
    "resnet": {"weights": mcomb.weights()},
    "gpt2": {"weights": mcomb.weights(restarts=8), "activations": mcomb.activations()},
}


@dataclass(frozen=True)
class PytorchMergeConfig:
    """Flags of the benchmark."""

    network: Annotated[str, Flag("which networks", choices=tuple(NETWORK_MATCHERS))] = "resnet"
    width: Annotated[int | None, Flag("channels or dimensions; by default 16 for ResNets and 64 for GPT-2", 1)] = None
    steps: Annotated[int | None, Flag("training steps; by default 500 for ResNets and 800 for GPT-2", 1)] = None
    seed: Annotated[int, Flag("seed of A; that of B is one more", 0)] = 0


@dataclass(frozen=True)
class Data:
    """Inputs and labels for training, for matching and merging, and for tests."""

    train: tuple[Any, Any]
    held_out: tuple[Any, Any]
    test: tuple[Any, Any]


def digits() -> Data:
    """Return scikit-learn's digits: 1,000 for training, 300 for merging and 497 for tests."""
    import torch

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(pixels))
    x = torch.tensor(pixels[order] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    y = torch.tensor(labels[order])
    parts = slice(1000), slice(1000, 1300), slice(1300, None)
    return Data(*((x[part], y[part]) for part in parts))


def text() -> Data:
    """Return windows of characters and the next characters: 400 for merging, 100 for tests, the others for training."""
    import torch

    symbols = torch.tensor(encode(read_topics()).astype(np.int64))
    windows = symbols.unfold(0, CONTEXT + 1, CONTEXT)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    x, y = windows[order, :-1], windows[order, 1:]
    parts = slice(500, None), slice(400), slice(400, 500)
    return Data(*((x[part], y[part]) for part in parts))


def build_resnet(width: int) -> Any:
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


def build_gpt2(width: int) -> Any:
    """Return a GPT-2 with two layers and four heads, which reads characters."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": len(SYMBOLS),
        "n_positions": CONTEXT,
        "n_embd": width,
        "n_layer": 2,
        "n_head": 4,
    }
    dropout: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0))


def train(flags: PytorchMergeConfig, seed: int, data: Data) -> Any:
    """Train a network in PyTorch, without mcomb."""
    import torch

    torch.manual_seed(seed)
    if flags.network == "resnet":
        module, steps, batch = build_resnet(flags.width or 16), flags.steps or 500, 50
        optimiser: Any = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
        rate = 0.2
    else:
        module, steps, batch = build_gpt2(flags.width or 64), flags.steps or 800, 32
        optimiser, rate = torch.optim.AdamW(module.parameters(), lr=0.003, weight_decay=0.1), 0.003
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps)
    module.train()
    for rows in _batches(len(data.train[0]), batch, steps):
        optimiser.zero_grad()
        _cross_entropy(_logits(module, data.train[0][rows]), data.train[1][rows]).backward()
        optimiser.step()
        schedule.step()
    return module.eval()


def _batches(count: int, size: int, steps: int) -> Iterator[Any]:
    """Yield the rows of `steps` random minibatches."""
    import torch

    epochs = -(-steps // (count // size))
    yield from [rows for _ in range(epochs) for rows in torch.randperm(count).split(size) if len(rows) == size][:steps]


def _logits(module: Any, x: Any) -> Any:
    found = module(x)
    return getattr(found, "logits", found)


def _cross_entropy(logits: Any, y: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten())


def score_in_pytorch(module: Any, x: Any, y: Any) -> tuple[float, float]:
    """Return the loss and the accuracy, computed in PyTorch."""
    import torch

    with torch.no_grad():
        logits = _logits(module.eval(), x)
    return float(_cross_entropy(logits, y)), float((logits.argmax(-1) == y).double().mean())


def measure_barriers(flags: PytorchMergeConfig, modules: dict[str, Any], data: Data) -> None:
    """Print the barriers between A and each other module, with and without REPAIR."""
    apply, params = from_module(modules["A"])
    inputs, labels, others = (to_arrays(part) for part in (*data.test, data.held_out[0]))
    # REPAIR serves networks without running statistics; ResNets get new statistics instead.
    ways: dict[str, dict[str, Any]] = {"": {}, ", REPAIR": {"repair": True}}
    if flags.network == "resnet":
        ways = {"": {"statistics_from": others}}
    for name, module in modules.items():
        for way, options in ways.items() if name != "A" else ():
            networks = params, from_module(module)[1]
            found = mcomb.sweep(apply, networks, inputs, labels, mcomb.linear, points=SHARES, **options).barrier
            print(f"barrier {name + way:20} loss {found.loss:.3f}, accuracy {found.accuracy:.3f}", flush=True)


def main(flags: PytorchMergeConfig) -> None:
    """Train, align, measure and merge."""
    import torch

    os.environ["HF_HUB_OFFLINE"] = "1"
    data = digits() if flags.network == "resnet" else text()
    start = time.perf_counter()
    a, b = (train(flags, seed, data) for seed in (flags.seed, flags.seed + 1))
    print(f"trained two networks in PyTorch in {time.perf_counter() - start:.0f} s", flush=True)

    modules = {"A": a, "naive": b}
    for name, matcher in NETWORK_MATCHERS[flags.network].items():
        start = time.perf_counter()
        modules[name] = align(a, b, *data.held_out, matcher=matcher)
        print(f"aligned by {name} in {time.perf_counter() - start:.1f} s", flush=True)
    measure_barriers(flags, modules, data)

    best = modules[list(NETWORK_MATCHERS[flags.network])[-1]]
    rows = {"A": a, "B": b, "aligned B": best, "naive average": merge((a, b), *data.held_out, method="average")}
    for method in MEASURED_METHODS:
        name = method if isinstance(method, str) else method.name
        rows[name] = merge((a, best), *data.held_out, method=method)
    apply = from_module(a)[0]
    inputs, labels = to_arrays(data.test)
    print(f"{'':14} {'PyTorch: loss':>14} {'accuracy':>9} {'JAX: loss':>12} {'accuracy':>9}")
    for name, module in rows.items():
        loss, accuracy = score_in_pytorch(module, *data.test)
        ours = mcomb.score(apply, from_module(module)[1], inputs, labels)
        print(f"{name:14} {loss:14.5f} {accuracy:9.4f} {ours.loss:12.5f} {ours.accuracy:9.4f}", flush=True)
        assert abs(loss - ours.loss) < 1e-4 * max(1, loss), name
        assert abs(accuracy - ours.accuracy) < 1e-3, name  # logits may tie up to rounding
    again = to_module(from_module(best)[1], b).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in best.state_dict().items())


if __name__ == "__main__":
    cli.run(lambda: main(cli.parse(PytorchMergeConfig, __doc__ or "")))
