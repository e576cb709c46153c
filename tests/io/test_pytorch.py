"""Networks trained in PyTorch are aligned and combined, and PyTorch computes the same from the result."""

import importlib

import jax
import numpy as np
import pytest

from mcomb import read_checkpoint
from mcomb.__main__ import main
from mcomb.io.checkpoints import read_metadata
from mcomb.io.pytorch_names import TABLES
from mcomb.lab.setups import SETUPS

torch = pytest.importorskip("torch", reason="torch is not installed")
safetensors = pytest.importorskip("safetensors.torch")

MODEL = """
import numpy as np
from mcomb.lab.setups import SETUPS
def model():
    images = np.random.default_rng(0).integers(0, 256, (8, 32, 32, 3)).astype(np.uint8)
    return SETUPS["resnet20-cifar10"].apply(1), images
"""


class ChannelNorm(torch.nn.Module):
    """LayerNorm over channels."""

    def __init__(self, channels):
        super().__init__()
        self.weight, self.bias = (torch.nn.Parameter(value * torch.ones(channels)) for value in (1.0, 0.0))

    def forward(self, x):
        x = torch.nn.functional.layer_norm(x.permute(0, 2, 3, 1), self.weight.shape, self.weight, self.bias, 1e-6)
        return x.permute(0, 3, 1, 2)


class Convolution(torch.nn.Conv2d):
    """A 3×3 convolution that pads as XLA does."""

    def __init__(self, channels_in, channels_out, stride=1):
        super().__init__(channels_in, channels_out, 3, stride, bias=False)

    def forward(self, x):
        before = 1 if self.stride == (1, 1) else 0
        return super().forward(torch.nn.functional.pad(x, (before, 1, before, 1)))


class Block(torch.nn.Module):
    def __init__(self, channels_in, channels, stride):
        super().__init__()
        self.conv1, self.norm1 = Convolution(channels_in, channels, stride), ChannelNorm(channels)
        self.conv2, self.norm2 = Convolution(channels, channels), ChannelNorm(channels)
        if stride > 1:
            self.shortcut_conv, self.shortcut_norm = Convolution(channels_in, channels, stride), ChannelNorm(channels)

    def forward(self, x):
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(y + (self.shortcut_norm(self.shortcut_conv(x)) if hasattr(self, "shortcut_conv") else x))


class ResNet20(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv0, self.norm0 = Convolution(3, 16), ChannelNorm(16)
        channels_in = 16
        for group, channels in enumerate((16, 32, 64), 1):
            for block in (1, 2, 3):
                stride = 2 if group > 1 and block == 1 else 1
                self.add_module(f"block{group}_{block}", Block(channels_in, channels, stride))
                channels_in = channels
        self.logits = torch.nn.Linear(64, 10)

    def forward(self, x):
        x = torch.relu(self.norm0(self.conv0(x)))
        for name, child in self.named_children():
            x = child(x) if name.startswith("block") else x
        return self.logits(x.mean((2, 3)))


def trained(seed):
    """Train a network for a few steps on random images."""
    torch.manual_seed(seed)
    network = ResNet20()
    optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(torch.randn(16, 3, 32, 32)), torch.randint(10, (16,))).backward()
        optimizer.step()
    return network


def logits(network, images):
    dataset = SETUPS["resnet20-cifar10"].dataset
    pixels = (images.astype(np.float32) - np.float32(dataset.mean)) / np.float32(dataset.std)
    with torch.no_grad():
        return network(torch.from_numpy(pixels.transpose(0, 3, 1, 2))).numpy()


def test_pytorch_resnet_is_aligned_combined_and_read_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytorch_resnet_model.py").write_text(MODEL)
    names = ["--model", "pytorch_resnet_model:model", "--names", "pytorch"]
    networks = {name: trained(seed) for seed, name in enumerate(("a", "b"))}
    for name, network in networks.items():
        safetensors.save_file(network.state_dict(), f"{name}.safetensors")
    main(["align", "a.safetensors", "b.safetensors", "aligned.safetensors", *names])
    main(["combine", "a.safetensors", "aligned.safetensors", "middle.safetensors", "--share", "0.5"])

    images = np.random.default_rng(1).integers(0, 256, (8, 32, 32, 3)).astype(np.uint8)
    apply, shapes = jax.jit(SETUPS["resnet20-cifar10"].apply(1)), SETUPS["resnet20-cifar10"].shapes(1)
    back = ResNet20()
    found = {}
    for name in ("b", "aligned", "middle"):
        back.load_state_dict(safetensors.load_file(f"{name}.safetensors"))
        found[name] = logits(back, images)
        ours = apply(read_checkpoint(f"{name}.safetensors", shapes, names=TABLES["pytorch"]), images)
        np.testing.assert_allclose(found[name], ours, rtol=0, atol=1e-4 * np.abs(ours).max())
    np.testing.assert_allclose(found["aligned"], found["b"], rtol=0, atol=1e-4 * np.abs(found["b"]).max())
    before, after = (safetensors.load_file(f"{name}.safetensors")["conv0.weight"] for name in ("b", "aligned"))
    assert not torch.equal(before, after)
    assert read_metadata("aligned.safetensors") == {"format": "pt"}


NORMED = """
import flax.linen as nn
import jax.numpy as jnp
import numpy as np

class Net(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(11, 6, name="token_embedding")(tokens)
        x = nn.Conv(8, (3,), padding="VALID", name="conv")(x)
        x = nn.relu(nn.BatchNorm(use_running_average=True, name="norm")(x))
        return nn.Dense(3, name="head")(x.mean(1))

def model():
    rng = np.random.default_rng(0)
    return Net().apply, rng.integers(0, 11, (32, 9)), rng.integers(0, 3, 32)
"""


class Normed(torch.nn.Module):
    """An embedding, a convolution along positions and a BatchNorm."""

    def __init__(self):
        super().__init__()
        self.token_embedding, self.conv = torch.nn.Embedding(11, 6), torch.nn.Conv1d(6, 8, 3)
        self.norm, self.head = torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)

    def forward(self, tokens):
        x = torch.relu(self.norm(self.conv(self.token_embedding(tokens).transpose(1, 2))))
        return self.head(x.mean(2))


def test_pytorch_embeddings_and_batch_norms_round_trip(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytorch_normed_model.py").write_text(NORMED)
    how = ["--model", "pytorch_normed_model:model", "--names", "pytorch"]
    monkeypatch.syspath_prepend(tmp_path)
    apply, inputs, _ = importlib.import_module("pytorch_normed_model").model()
    for seed, name in enumerate(("a", "b")):
        torch.manual_seed(seed)
        network = Normed()
        network(torch.randint(11, (64, 9)))  # so that the running statistics are not those of a new network
        about = {"format": "pt", "who": name} if name == "b" else None
        safetensors.save_file(network.state_dict(), f"{name}.safetensors", about)
    main(["align", "a.safetensors", "b.safetensors", "aligned.safetensors", *how])
    main(["combine", "a.safetensors", "aligned.safetensors", "middle.safetensors", "--share", "0.5", *how])

    back = Normed().eval()
    found = {}
    for name in ("b", "aligned", "middle"):
        back.load_state_dict(safetensors.load_file(f"{name}.safetensors"))
        with torch.no_grad():
            found[name] = back(torch.from_numpy(inputs)).numpy()
        ours = apply(read_checkpoint(f"{name}.safetensors", names=TABLES["pytorch"]), inputs)
        np.testing.assert_allclose(found[name], ours, rtol=0, atol=1e-5 * np.abs(ours).max())
    np.testing.assert_allclose(found["aligned"], found["b"], rtol=0, atol=1e-5 * np.abs(found["b"]).max())
    assert not np.allclose(found["middle"], found["b"], atol=1e-3)
    states = {name: safetensors.load_file(f"{name}.safetensors") for name in ("b", "aligned", "middle")}
    assert not torch.equal(states["b"]["norm.running_mean"], states["aligned"]["norm.running_mean"])
    assert all(state["norm.num_batches_tracked"] == 1 for state in states.values())
    # Loaders refuse files that do not say what they are for.
    assert read_metadata("aligned.safetensors") == {"format": "pt", "who": "b"}
    assert read_metadata("middle.safetensors") == {"format": "pt"}


def test_pytorch_names_transposed_convolutions_and_attention(tmp_path):
    """Transposed convolutions are Flax's with `transpose_kernel`; attention has one kernel for all projections."""
    import flax.linen as nn

    torch.manual_seed(0)
    up, attention = torch.nn.ConvTranspose2d(4, 6, 3, stride=2), torch.nn.MultiheadAttention(8, 2, batch_first=True)
    state = {f"up.{name}": tensor for name, tensor in up.state_dict().items()}
    state |= {f"attention.{name}": tensor for name, tensor in attention.state_dict().items()}
    safetensors.save_file(state, tmp_path / "a.safetensors")
    params = read_checkpoint(tmp_path / "a.safetensors", names=TABLES["pytorch"])

    images = torch.randn(2, 4, 5, 5)
    flax_up = nn.ConvTranspose(6, (3, 3), (2, 2), padding="VALID", transpose_kernel=True)
    found = flax_up.apply({"params": params["up"]}, images.permute(0, 2, 3, 1).numpy())
    wanted = up(images).detach().permute(0, 2, 3, 1).numpy()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())

    x = torch.randn(3, 5, 8)
    fused = x.numpy() @ params["attention"]["in_proj"]["kernel"] + params["attention"]["in_proj"]["bias"]
    query, key, value = (part.reshape(3, 5, 2, 4) for part in np.split(fused, 3, -1))
    mixed = nn.dot_product_attention(query, key, value).reshape(3, 5, 8)
    found = np.asarray(mixed) @ params["attention"]["out_proj"]["kernel"] + params["attention"]["out_proj"]["bias"]
    wanted = attention(x, x, x)[0].detach().numpy()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
