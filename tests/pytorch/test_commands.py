"""`mcomb align` and `mcomb merge` on state dicts of PyTorch and on folders of Hugging Face."""

import json
import os
import shutil

os.environ["HF_HUB_OFFLINE"] = "1"

import jax
import numpy as np
import pytest

import mcomb
from benchmarks.pytorch_families import FAMILIES
from mcomb.__main__ import main
from mcomb.errors import UserError
from mcomb.pytorch import from_module, to_arrays, to_module
from mcomb.pytorch.files import example_inputs

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("torchax", reason="torchax is not installed", exc_type=Exception)
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the packages

MINE = """
import torch
from torch import nn
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(11, 8), nn.Linear(8, 10), nn.Linear(10, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.down(torch.tanh(self.up(x))))
def model():
    return Tied(), torch.arange(10).reshape(2, 5)
def nothing():
    return 3
def broken():
    raise KeyError("nope")
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine_in_torch.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    import mine_in_torch

    return mine_in_torch


def plant(module, inputs):
    """A network with random weights, and the same with its units in another order."""
    apply, params = from_module(module)
    spec = mcomb.derive_spec(apply, params, to_arrays(inputs))
    return to_module(spec.apply(spec.random(jax.random.key(1)), params), module)


def save(module, path):
    if path.suffix == ".safetensors":
        safetensors.save_model(module, path, {"note": "mine"})
    else:
        torch.save(module.state_dict(), path)


def read(path):
    return safetensors.load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


@pytest.mark.parametrize("endings", [(".safetensors",) * 3, (".pt",) * 3, (".pt", ".safetensors", ".pth")])
def test_align_writes_a_state_dict(mine, tmp_path, endings):
    module, inputs = mine.model()
    paths = [tmp_path / f"{name}{ending}" for name, ending in zip("abc", endings, strict=True)]
    save(module, paths[0])
    save(plant(module, inputs), paths[1])
    main(["align", *map(str, paths), "--torch", "mine_in_torch:model"])
    found, given = read(paths[2]), read(paths[1])
    assert list(found) == list(given)
    for name, tensor in found.items():
        assert torch.equal(tensor, module.state_dict()[name]), name
    if endings[2] == ".safetensors":
        with safetensors.safe_open(paths[2], "pt") as file:
            assert file.metadata() == {"note": "mine", "format": "pt", "head.weight": "embed.weight"}
    main(["merge", *map(str, (paths[0], paths[2], tmp_path / "m.pt")), "--torch", "mine_in_torch:model"])
    for name, tensor in read(tmp_path / "m.pt").items():
        assert torch.equal(tensor, module.state_dict()[name]), name


def test_align_of_state_dicts_finds_planted_rotations(mine, tmp_path):
    module, inputs = mine.model()
    apply, params = from_module(module)
    spec = mcomb.derive_spec(apply, params, to_arrays(inputs), groups="all")
    rotated = to_module(spec.apply(spec.random(jax.random.key(0)), params), module)
    paths = [str(tmp_path / name) for name in ("a.pt", "b.pt", "c.pt")]
    save(module, tmp_path / "a.pt")
    save(rotated, tmp_path / "b.pt")
    assert (rotated.embed.weight - module.embed.weight).abs().max() > 0.1
    main(["align", *paths, "--torch", "mine_in_torch:model", "--groups", "all"])
    for name, tensor in read(tmp_path / "c.pt").items():
        torch.testing.assert_close(tensor, module.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_flags_without_effect_are_rejected(mine, tmp_path):
    for name in ("a.pt", "b.pt"):
        save(mine.model()[0], tmp_path / name)
        (tmp_path / name).with_suffix(".safetensors").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    own = ["--torch", "mine_in_torch:model"]
    for words, told in {
        ("a.pt", "b.pt", "c.pt", *own, "--data", "data.npz"): "--data is for Hugging Face folders: return inputs",
        ("a.pt", "b.pt", "c.pt", *own, "--names", "pytorch"): "--names pytorch is not for PyTorch's state dicts",
        ("folder", "folder", "out", "--model", "mlp-digits:4"): "--model mlp-digits:4 is not for .* folders: drop it",
        ("folder", "folder", "out", *own): "folder is a Hugging Face folder, .*: drop --torch",
        ("a.npz", "b.npz", "c.npz", "--data", "data.npz"): "--data data.npz is for Hugging Face folders: drop it",
        ("a.safetensors", "b.safetensors", "c.safetensors"): "pass --model .*, or --torch MODULE:FUNCTION for PyTorch",
    }.items():
        with pytest.raises(UserError, match=told):
            main(["align", *words])
        if words[0] != "a.safetensors":
            with pytest.raises(UserError, match=told):
                main(["merge", *words])
    assert sorted(path.name for path in tmp_path.glob("[co]*.*")) == []


def test_state_dicts_that_are_wrong_are_named(mine, tmp_path):
    module = mine.model()[0]
    good, bad, out = (str(tmp_path / name) for name in ("a.pt", "b.pt", "c.pt"))
    torch.save(module.state_dict(), good)
    flag = ["--torch", "mine_in_torch:model"]

    def refuses(state, words):
        torch.save(state, bad)
        with pytest.raises(UserError, match=words):
            main(["align", good, bad, out, *flag])

    state = module.state_dict()
    refuses({name: tensor for name, tensor in state.items() if name != "up.bias"}, r"b\.pt lacks up\.bias: ")
    refuses({**state, "odd": state["up.bias"]}, r"Tied has no odd, but .*b\.pt does: ")
    refuses({**state, "up.bias": torch.zeros(3)}, r"up\.bias is \(3,\) in .*b\.pt and \(10,\) in Tied: ")
    refuses({"epoch": 3, "model": state}, r"b\.pt has entries that are not tensors \(epoch, model\): save")
    refuses([state], r"b\.pt contains a list, not a state dict: save")
    refuses(module, r"b\.pt contains more than tensors: save")
    torch.save(state, bad)
    whole = (tmp_path / "b.pt").read_bytes()
    (tmp_path / "b.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"b\.pt is damaged or not a file of torch\.save: save"):
        main(["align", good, bad, out, *flag])
    torch.save(state, bad)
    with pytest.raises(UserError, match=r"There is no file nowhere\.pt: check the path"):
        main(["align", good, "nowhere.pt", out, *flag])
    for function, words in {
        "nope": "does not name a function",
        "mine_in_torch:nothing": "does not return a module",
        "mine_in_torch:broken": r"fails \(KeyError: 'nope'\): correct the function",
        "mine_in_torch:missing": r"cannot be imported \(AttributeError: .*\): check the name",
    }.items():
        with pytest.raises(UserError, match=words):
            main(["align", good, bad, out, "--torch", function])
    with pytest.raises(UserError, match="already exists"):
        main(["align", good, bad, good, *flag])
    with pytest.raises(UserError, match=r"c\.pt\.txt has no known format: choose a name that ends in"):
        main(["align", good, bad, f"{out}.txt", *flag])


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_merging_files_refuses_wrong_numbers(ending, tmp_path):
    paths = [tmp_path / f"{name}{ending}" for name in "abc"]
    for path, value in zip(paths, (1.0, float("nan")), strict=False):
        state = {"weight": torch.full((2, 2), value)}
        torch.save(state, path) if ending == ".pt" else safetensors.save_file(state, path)
    with pytest.raises(UserError, match=r"4 of 4 entries of weight in .*b\.\w+ are not finite"):
        main(["merge", *map(str, paths)])
    assert not paths[2].exists()
    if ending == ".safetensors":
        paths[1].write_bytes(paths[0].read_bytes()[:-1])
        with pytest.raises(UserError, match=r"Cannot read checkpoint .*b\.safetensors"):
            main(["merge", *map(str, paths)])


@pytest.fixture
def folders(tmp_path):
    """A tiny GPT-2 and the same with its units in another order, as folders with a tokenizer's file."""
    pytest.importorskip("transformers", reason="transformers is not installed", exc_type=Exception)
    family = FAMILIES["GPT-2"]
    a = family.build().bfloat16()
    for name, module in {"a": a, "b": plant(a, family.example())}.items():
        module.save_pretrained(tmp_path / name, max_shard_size="20KB")
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"of": name}))
    return a, tmp_path


def test_align_and_merge_write_folders(folders):
    import transformers

    a, place = folders
    assert len(list((place / "b").glob("*.safetensors"))) > 1  # in shards
    main(["align", *(str(place / name) for name in ("a", "b", "c-1.5"))])
    main(["merge", *(str(place / name) for name in ("a", "c-1.5", "d")), "--method", "average"])
    for name, source in {"c-1.5": "b", "d": "a"}.items():
        found = transformers.AutoModelForCausalLM.from_pretrained(place / name, dtype="auto")
        for key, tensor in a.state_dict().items():
            assert found.state_dict()[key].dtype == torch.bfloat16
            assert torch.equal(found.state_dict()[key], tensor), key
        assert found.lm_head.weight is found.transformer.wte.weight
        for file in ("tokenizer.json", "config.json"):
            assert (place / name / file).read_text() == (place / source / file).read_text().replace('"c"', '"b"')
    assert not [path for path in place.iterdir() if path.name.startswith(".")]


def test_merge_of_folders_uses_data(folders):
    _, place = folders
    words = [str(place / name) for name in ("a", "b", "d")]
    with pytest.raises(UserError, match="by refit needs data"):
        main(["merge", *words, "--method", "refit"])
    with pytest.raises(UserError, match="by activations needs data"):
        main(["align", *words, "--matcher", "activations"])
    np.savez(place / "wrong.npz", tokens=np.zeros((4, 6), np.int32))
    with pytest.raises(UserError, match="has tokens, but GPT2LMHeadModel has no such input"):
        main(["align", *words, "--data", str(place / "wrong.npz")])
    np.savez(place / "data.npz", input_ids=np.random.default_rng(0).integers(0, 60, (4, 6)))
    main(["merge", *words, "--method", "refit", "--data", str(place / "data.npz")])
    assert (place / "d" / "model.safetensors").exists()


def test_folders_that_are_wrong_are_named(folders):
    _, place = folders
    a, b, out = (place / name for name in ("a", "b", "out"))
    config = json.loads((b / "config.json").read_text())

    def refuses(words, **changes):
        (b / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(UserError, match=words):
            main(["align", str(a), str(b), str(out)])
        assert not out.exists()

    refuses(r"differ in n_head \(4 and 2\): use models of one configuration", n_head=2)
    refuses(r"needs code for OwnModel, which mcomb never runs", architectures=["OwnModel"])
    (b / "config.json").write_text(json.dumps(config))
    for path in [path for path in b.iterdir() if "safetensors" in path.name]:
        path.unlink()
    state = safetensors.load_file(next(iter(sorted(a.glob("*.safetensors")))))
    safetensors.save_file(state, b / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"b lacks transformer\."):
        main(["align", str(a), str(b), str(out)])
    shutil.rmtree(b)
    with pytest.raises(UserError, match=r"There is no folder .*b: check the path"):
        main(["align", str(a), str(b), str(out)])


def test_merge_without_networks_is_the_experiment(capsys):
    with pytest.raises(SystemExit):
        main(["merge", "--split", "nothing"])
    assert "biased" in capsys.readouterr().err


def test_merge_help_is_about_files(capsys):
    with pytest.raises(SystemExit):
        main(["merge", "--help"])
    assert "Hugging Face folders" in capsys.readouterr().out


@pytest.mark.parametrize("name", FAMILIES)
def test_example_inputs_fit_the_model(name):
    pytest.importorskip("transformers", reason="transformers is not installed", exc_type=Exception)
    family = FAMILIES[name]
    module = family.build()
    found = example_inputs(module)
    assert found.keys() == family.example().keys() - {"attention_mask"}
    with torch.no_grad():
        module(**found)
