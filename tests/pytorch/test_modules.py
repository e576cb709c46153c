"""Modules of PyTorch become JAX functions and come back, aligned and merged."""

import copy
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import mcomb
from mcomb.pytorch import align, from_module, merge, sweep, to_arrays, to_module

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("torchax", reason="torchax is not installed", exc_type=Exception)
nn = torch.nn

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(0))
VECTORS = IMAGES.flatten(1)[:, :6]


class MLP(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))


class Block(nn.Module):
    def __init__(self, channels, out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential()
        if stride > 1:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.blocks = nn.Sequential(Block(4, 4, 1), Block(4, 6, 2))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Encoder(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embed, self.position = nn.Embedding(11, 8), nn.Parameter(torch.zeros(5, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        return self.head(self.encoder(self.embed(tokens) + self.position).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embed, self.cells, self.head = nn.Embedding(11, 6), kind(6, 7, 2, batch_first=True), nn.Linear(7, 3)

    def forward(self, tokens):
        return self.head(self.cells(self.embed(tokens))[0][:, -1])


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.up, self.mix, self.head = nn.ConvTranspose2d(6, 5, 2, 2), nn.Conv2d(9, 7, 3, padding=1), nn.Conv2d(7, 2, 1)

    def forward(self, x):
        fine = torch.relu(self.down1(x))
        coarse = torch.relu(self.norm(self.down2(nn.functional.max_pool2d(fine, 2))))
        return self.head(torch.relu(self.mix(torch.cat([fine, self.up(coarse)], 1))))


class Depthwise(nn.Sequential):
    def __init__(self):
        depthwise = nn.Conv2d(5, 5, 3, padding=1, groups=5)
        super().__init__(nn.Conv2d(3, 5, 1), depthwise, nn.SiLU(), nn.Conv2d(5, 6, 1), nn.Flatten(), nn.Linear(384, 3))


class VGG(nn.Sequential):
    def __init__(self):
        first = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        second = nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        super().__init__(*first, *second, nn.Flatten(), nn.Linear(24, 10), nn.ReLU(), nn.Linear(10, 3))


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.norm1, self.norm2 = nn.Conv2d(3, 8, 4, 4), nn.LayerNorm(8), nn.LayerNorm(8)
        self.tokens = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4))
        self.channels = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.patches(x).flatten(2).mT
        x = x + self.tokens(self.norm1(x).mT).mT
        return self.head((x + self.channels(self.norm2(x))).mean(1))


class Tied(nn.Module):
    """A language model whose output has the weights of its embedding; two Parameter objects share one memory."""

    def __init__(self, share_memory=False):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(11, 8), nn.Linear(8, 10), nn.Linear(10, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = nn.Parameter(self.embed.weight.data) if share_memory else self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.down(torch.tanh(self.up(x))))


@dataclasses.dataclass
class Answer:
    logits: torch.Tensor
    hidden: torch.Tensor


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 3)
        self.register_buffer("scale", torch.linspace(1, 2, 10))  # a constant: it does not move
        self.shift = torch.linspace(0, 1, 3)  # neither a parameter nor a buffer

    def forward(self, features, weight=None):
        hidden = torch.relu(self.up(features))
        return Answer(self.down(hidden) * weight[:, None] + self.shift, hidden * self.scale)


# By hand. Two heads of four dimensions: the heads, the dimensions of queries and keys, and those of values.
ATTENTION = [(2,), (2, 4), (2, 4)]
CASES = {
    "mlp": (MLP, VECTORS, [(16,), (12,)]),
    # The stream of each stage, and the inside of each block.
    "resnet": (ResNet, IMAGES, [(4,), (4,), (6,), (6,)]),
    # The residual stream; in each layer attention and the MLP.
    "encoder": (Encoder, TOKENS, [(8,), *(2 * [*ATTENTION, (12,)])]),
    "norm_first": (lambda: Encoder(norm_first=True), TOKENS, [(8,), *(2 * [*ATTENTION, (12,)])]),
    # The embedding, and the state of each layer.
    "lstm": (lambda: Recurrent(nn.LSTM), TOKENS, [(6,), (7,), (7,)]),
    "gru": (lambda: Recurrent(nn.GRU), TOKENS, [(6,), (7,), (7,)]),
    # The channels of each convolution; GroupNorm lets its two groups move, and the three channels of each.
    "unet": (UNet, IMAGES, [(4,), (2,), (2, 3), (5,), (7,)]),
    # A depthwise filter moves with its channel.
    "depthwise": (Depthwise, IMAGES, [(5,), (6,)]),
    # Each filter of the second convolution has four weights in the dense layer.
    "vgg": (VGG, IMAGES, [(4,), (6,), (10,)]),
    # The residual stream, and the hidden units of both MLPs. Patches keep their places.
    "mixer": (Mixer, IMAGES, [(8,), (5,), (12,)]),
    # The residual stream is the embedding's and the output's.
    "tied": (Tied, TOKENS, [(8,), (10,)]),
    "shared_memory": (lambda: Tied(share_memory=True), TOKENS, [(8,), (10,)]),
    "keywords": (Keywords, {"features": VECTORS, "weight": VECTORS[:, 0]}, [(10,)]),
}


def build(name, seed=0):
    """A module with random weights everywhere, so that no two units are alike."""
    torch.manual_seed(seed)
    module = CASES[name][0]()
    with torch.no_grad():
        for key, tensor in module.named_parameters():
            tensor.add_(torch.randn_like(tensor) * (0.3 if "norm" in key else 0.1))
        for key, tensor in module.named_buffers():
            if "running" in key:
                tensor.copy_(torch.rand_like(tensor) + 0.5)
    return module


def call(module, inputs):
    module = copy.deepcopy(module).eval()
    with torch.no_grad():
        found = module(**inputs) if isinstance(inputs, dict) else module(inputs)
    return found.logits if isinstance(found, Answer) else found


def assert_same_state(got, wanted):
    got, wanted = got.state_dict(), wanted.state_dict()
    assert list(got) == list(wanted)
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def plant(module, inputs):
    """The module with its units in a random order."""
    apply, params = from_module(module)
    spec = mcomb.derive_spec(apply, params, to_arrays(inputs))
    return to_module(spec.apply(spec.random(jax.random.key(1)), params), module)


@pytest.mark.parametrize("name", CASES)
def test_modules_compute_the_same_in_jax(name):
    _, inputs, free = CASES[name]
    module = build(name)
    apply, params = from_module(module)
    with jax.default_matmul_precision("highest"):
        found = jax.jit(apply)(params, to_arrays(inputs))
    wanted = call(module, inputs).numpy()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=100 * np.finfo(np.float32).eps * np.abs(wanted).max())
    assert set(params) <= set(module.state_dict())
    spec = mcomb.derive_spec(apply, params, to_arrays(inputs))
    assert sorted(spec.shape(perm) for perm in spec.sizes) == sorted(free)
    spec.check(apply, params, to_arrays(inputs))


@pytest.mark.parametrize("name", CASES)
def test_align_recovers_a_planted_permutation(name):
    _, inputs, _ = CASES[name]
    a = build(name)
    b = plant(a, inputs)
    before = copy.deepcopy((a, b))
    assert any(not torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    torch.testing.assert_close(call(a, inputs), call(b, inputs), rtol=1e-4, atol=1e-4)
    assert_same_state(align(a, b, inputs), a)
    for module, old in zip((a, b), before, strict=True):
        assert_same_state(module, old)
        assert module.training


def test_align_recovers_planted_scales_with_all_groups():
    a = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    x = torch.randn(16, 6)
    apply, params = from_module(a)
    spec = mcomb.derive_spec(apply, params, to_arrays(x), groups="all")
    b = to_module(spec.apply(spec.random(jax.random.key(0)), params), a)
    assert any((p / q).std() > 0.01 for p, q in zip(a.parameters(), b.parameters(), strict=True))
    aligned = align(a, b, x, groups="all")
    for one, other in zip(a.parameters(), aligned.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


def test_to_module_returns_an_exact_independent_copy():
    module = build("resnet").double()
    module.head.requires_grad_(False)
    again = to_module(from_module(module)[1], module)
    assert_same_state(again, module)
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in module.parameters()]
    assert not {p.data_ptr() for p in again.state_dict().values()} & {
        p.data_ptr() for p in module.state_dict().values()
    }


def test_align_shares_no_memory_with_its_source():
    a, b = build("unet"), build("unet", seed=1)
    aligned, before = align(a, b, IMAGES), copy.deepcopy(b)
    with torch.no_grad():
        for parameter in aligned.parameters():
            parameter.add_(1)
    assert_same_state(b, before)


def test_from_module_shares_the_memory_of_its_tensors():
    module = build("mlp")
    params = from_module(module)[1]
    assert np.shares_memory(params["0.weight"], module[0].weight.detach().numpy())


@pytest.mark.parametrize("share_memory", [False, True])
def test_tied_tensors_stay_tied(share_memory):
    module = Tied(share_memory)
    assert "head.weight" not in from_module(module)[1]
    other = align(module, Tied(share_memory), TOKENS)
    assert other.head.weight is other.embed.weight
    other = merge((module, other), TOKENS, method="average")
    assert other.head.weight is other.embed.weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_modules_keep_half_precision(dtype):
    a, x = build("mlp").to(dtype), VECTORS.to(dtype)
    b = plant(a, x)
    aligned = align(a, b, x)
    assert_same_state(aligned, a)
    merged = merge((a, aligned), x, method="average")
    assert_same_state(merged, a)
    found = from_module(a)[0](from_module(a)[1], to_arrays(x))
    assert str(found.dtype) == str(dtype).removeprefix("torch.")
    torch.testing.assert_close(torch.tensor(np.asarray(found, np.float32)), call(a, x).float(), rtol=0.02, atol=0.02)


def test_layer_norm_in_float16_equals_pytorch():
    """PyTorch normalises in float32. In float16, the gradient of a small variance overflows."""
    norm, x = nn.LayerNorm(64).half(), (0.01 * torch.randn(4, 64)).half()
    apply, params = from_module(norm)
    torch.testing.assert_close(torch.from_numpy(np.array(apply(params, to_arrays(x)))), norm(x), rtol=1e-3, atol=0)
    x.requires_grad_(True)
    norm(x)[:, 0].sum().backward()
    found = jax.grad(lambda inputs: apply(params, inputs)[:, 0].sum())(to_arrays(x))
    torch.testing.assert_close(torch.from_numpy(np.array(found)), x.grad, rtol=0.01, atol=0.1)


def test_constant_buffers_are_no_weights():
    apply, params = from_module(Keywords(), output="hidden")
    assert sorted(params) == ["down.bias", "down.weight", "up.bias", "up.weight"]
    spec = mcomb.derive_spec(apply, params, to_arrays(CASES["keywords"][1]))
    assert not spec.sizes


def test_running_statistics_of_a_frozen_norm_move():
    class FrozenNorm(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("weight", "bias", "running_mean", "running_var"):
                self.register_buffer(name, torch.rand(5) + 0.5)

        def forward(self, x):
            return (x - self.running_mean) * torch.rsqrt(self.running_var + 1e-5) * self.weight + self.bias

    module = nn.Sequential(nn.Linear(6, 5), FrozenNorm(), nn.ReLU(), nn.Linear(5, 3))
    assert_same_state(align(module, plant(module, VECTORS), VECTORS), module)


def test_merge_estimates_batch_norm_statistics():
    a = build("resnet")
    merged = merge((a, a), IMAGES, method="average")
    stem = a.eval().stem[0](IMAGES)
    assert torch.equal(merged.stem[0].weight, a.stem[0].weight)
    torch.testing.assert_close(merged.stem[1].running_mean, stem.mean((0, 2, 3)))
    torch.testing.assert_close(merged.stem[1].running_var, stem.var((0, 2, 3), correction=0))


def test_sweep_measures_modules_as_their_functions():
    a, b, labels = build("resnet"), build("resnet", seed=1), torch.tensor([0, 1, 2, 0])
    found = sweep((a, b), IMAGES, labels, mcomb.linear, points=3, statistics_from=IMAGES)
    apply, params = from_module(a)
    images, labels = to_arrays((IMAGES, labels))
    networks = params, from_module(b)[1]
    wanted = mcomb.sweep(apply, networks, images, labels, mcomb.linear, points=3, statistics_from=images)
    np.testing.assert_array_equal(found.loss, wanted.loss)
    assert found.ends == wanted.ends
    assert len(set(found.loss.ravel())) == 3
    with pytest.raises(mcomb.UserError, match="tuple of modules"):
        sweep((a,), IMAGES, labels, mcomb.linear)


@pytest.mark.parametrize("method", ["refit", "fisher", "learned"])
def test_merge_returns_a_module_for_each_method(method):
    a, b = build("mlp"), build("mlp", seed=1)
    method = mcomb.learned(steps=3, batch_size=2) if method == "learned" else method
    labels = torch.tensor([0, 1, 2, 0])
    merged = merge((a, align(a, b, VECTORS)), VECTORS, labels, method=method)
    apply, params = from_module(a)
    _, aligned = from_module(align(a, b, VECTORS))
    wanted = mcomb.merge(apply, (params, aligned), to_arrays(VECTORS), to_arrays(labels), method=method)
    assert_same_state(merged, to_module(wanted.params, a))


def test_merge_aligns_modules_by_all_groups():
    a = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    x = torch.randn(16, 6)
    apply, params = from_module(a)
    spec = mcomb.derive_spec(apply, params, to_arrays(x), groups="all")
    b = to_module(spec.apply(spec.random(jax.random.key(0)), params), a)
    merged = merge((a, b), x, method="average", groups="all")
    for one, other in zip(a.parameters(), merged.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


def test_partial_merges_are_refused():
    with pytest.raises(mcomb.UserError, match="architecture"):
        merge((build("mlp"), build("mlp", 1)), VECTORS, method=mcomb.partial(budget=1.5))


def test_from_module_takes_positional_inputs_and_chosen_outputs():
    module = build("keywords")
    inputs = (VECTORS, VECTORS[:, 0])
    apply, params = from_module(module, output=lambda answer: answer.logits[:, :1])
    np.testing.assert_allclose(apply(params, to_arrays(inputs)), call(module, CASES["keywords"][1])[:, :1], rtol=1e-5)
    apply, params = from_module(module, options={"weight": 1}, output="nonsense")
    with pytest.raises(mcomb.UserError, match=r"nonsense.*logits, hidden"):
        from_module(module, output="nonsense")[0](params, to_arrays(inputs))


def test_modules_that_differ_are_refused():
    with pytest.raises(mcomb.UserError, match=r"0\.bias is \(16,\) in A and missing in B"):
        align(build("mlp"), build("resnet"), VECTORS)
    other = nn.Sequential(*(nn.ReLU() if isinstance(part, nn.GELU) else part for part in MLP()))
    with pytest.raises(mcomb.UserError, match="compute different functions"):
        align(build("mlp"), other, VECTORS)
    constants = build("keywords")
    constants.scale += 1
    with pytest.raises(mcomb.UserError, match="compute different functions"):
        align(build("keywords"), constants, CASES["keywords"][1], output="hidden")
    with pytest.raises(mcomb.UserError, match="not a PyTorch module"):
        align({}, {}, VECTORS)


def test_modules_that_jax_cannot_run_are_named():
    class Branching(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x

    with pytest.raises(mcomb.UserError, match="Branching needs the values of tensors, which JAX cannot trace"):
        align(Branching(8, 8), Branching(8, 8), VECTORS)
    with pytest.raises(mcomb.UserError, match=r"MLP fails .*pass inputs that its `forward` takes"):
        align(build("mlp"), build("mlp"), VECTORS[:, :3])


def test_modules_name_missing_weights():
    module = build("mlp")
    params = from_module(module)[1]
    del params["3.bias"]
    with pytest.raises(mcomb.UserError, match=r"3\.bias is missing in the parameters"):
        to_module(params, module)


def test_modules_name_unknown_operations():
    class Odd(nn.Module):
        def forward(self, x):
            return torch.special.airy_ai(x)

    with pytest.raises(mcomb.UserError, match=r"Odd uses an operation that torchax lacks .*airy_ai"):
        from_module(Odd())[0]({}, to_arrays(VECTORS))


def test_pytorch_is_not_imported_by_mcomb():
    code = "import sys, mcomb, mcomb.pytorch; assert not {'torch', 'torchax', 'transformers'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pytorch_names_missing_packages():
    code = """
import sys
sys.modules["torchax"] = None
import mcomb, torch
try: mcomb.pytorch.from_module(torch.nn.Linear(2, 2))
except mcomb.UserError as error: print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "install mcomb[pytorch]" in done.stdout


def test_pytorch_page_examples_run(capsys):
    page = (Path(__file__).parents[2] / "docs" / "pytorch.md").read_text()
    first, second = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)[:2]
    scope = {}
    exec(first + second, scope)
    assert "Metrics(" in capsys.readouterr().out
    middle = (scope["model_a"][0].weight + scope["aligned"][0].weight) / 2
    torch.testing.assert_close(scope["middle"][0].weight, middle)
    assert scope["sweep"].loss.shape == (5, 1)
    torch.testing.assert_close(scope["aligned"](scope["x"]), scope["model_b"](scope["x"]))
    assert isinstance(scope["merged"], nn.Sequential)
