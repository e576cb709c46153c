"""Hugging Face folders are aligned and merged tensor by tensor, as modules are in memory."""

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
from mcomb.io.safetensors_shards import INDEX, list_shards
from mcomb.pytorch import files, from_module, to_arrays, to_module

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("torchax", reason="torchax is not installed", exc_type=Exception)
transformers = pytest.importorskip("transformers", reason="transformers is not installed", exc_type=Exception)
safetensors = pytest.importorskip("safetensors.torch")

from mcomb.pytorch.hugging_face import build_skeleton  # noqa: E402 (needs torch)

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the packages
TOKENIZER = {"model": {"vocab": {"a": 0, "b": 1}}}


def plant(module, inputs, seed=1):
    """The module with its units in another order."""
    apply, params = from_module(module)
    spec = mcomb.derive_spec(apply, params, to_arrays(inputs))
    return to_module(spec.apply(spec.random(jax.random.key(seed)), params), module)


def save(module, folder, **options):
    module.save_pretrained(folder, **options)
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))


def state_of(folder):
    return {name: tensor.read() for shard in list_shards(folder) for name, tensor in shard.tensors.items()}


def assert_same_files(folder, wanted):
    found, wanted = state_of(folder), state_of(wanted)
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Folders of a tiny Llama, of another one, and of a base, in several shards and in bfloat16."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("a", "b", "base")):
        save(FAMILIES["Llama"].build(seed).bfloat16(), tmp_path / name, max_shard_size="20KB")
    assert len(list_shards(tmp_path / "a")) > 1
    return tmp_path


def in_memory(monkeypatch):
    """Let commands load whole modules."""
    monkeypatch.setattr(files, "align_folders", lambda *args: None)
    monkeypatch.setattr(files, "merge_folders", lambda *args: None)


def streamed(monkeypatch):
    """Let commands fail if they load whole modules."""
    monkeypatch.setattr(files, "read_folders", lambda *args: pytest.fail("whole modules are loaded"))


def test_align_by_tensors_equals_align_in_memory(place, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        streamed(patch)
        main(["align", "a", "b", "streamed"])
    in_memory(monkeypatch)
    main(["align", "a", "b", "whole"])
    first, *_, second, _ = capsys.readouterr().out.splitlines()
    assert "units moved" in first
    assert first == second
    whole = {name: tensor for shard in list_shards(place / "whole") for name, tensor in shard.tensors.items()}
    for name, tensor in state_of(place / "streamed").items():
        np.testing.assert_array_equal(tensor, whole[name].read(), err_msg=name)
    assert sorted(path.name for path in (place / "streamed").iterdir()) == sorted(
        p.name for p in (place / "b").iterdir()
    )
    for name in (INDEX, "config.json", "tokenizer.json"):
        assert (place / "streamed" / name).read_text() == (place / "b" / name).read_text()


@pytest.mark.parametrize("method", ["average", "slerp", "task_arithmetic", "ties", "dare"])
def test_merge_by_tensors_equals_merge_of_modules(place, monkeypatch, method, capsys):
    streamed(monkeypatch)
    shares = ["--shares", "layers.0-0=0.25", "lm_head=1"]
    base = ["--base", "base"] if method in ("task_arithmetic", "ties", "dare") else []
    main(["merge", "a", "b", "merged", "--method", method, *base, *shares])
    said = capsys.readouterr().out
    assert ("share the ancestor base" in said) != ("neither related nor aligned" in said)
    assert str(place / "merged") in said
    modules = [FAMILIES["Llama"].build(seed).bfloat16() for seed in range(3)]
    options = {"shares": {"layers.0-0": 0.25, "lm_head": 1}}
    configured = getattr(mcomb, method)(*modules[2:] if base else (), **options)
    wanted = mcomb.pytorch.merge(modules[:2], FAMILIES["Llama"].example(), method=configured)
    found = transformers.AutoModelForCausalLM.from_pretrained(place / "merged", dtype="auto")
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    assert torch.equal(found.lm_head.weight, modules[1].lm_head.weight) or base


def test_merge_takes_more_than_two_folders(place):
    main(["merge", "a", "b", "base", "merged", "--shares", "0.5,0.25,0.25"])
    a, b, base = (state_of(place / name) for name in ("a", "b", "base"))
    for name, tensor in state_of(place / "merged").items():
        exact = 0.5 * a[name].astype("f8") + 0.25 * b[name].astype("f8") + 0.25 * base[name].astype("f8")
        np.testing.assert_array_equal(tensor, exact.astype("f4").astype(tensor.dtype), err_msg=name)


def test_align_leaves_fine_tuned_networks_alone(place, capsys):
    module = FAMILIES["Llama"].build(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * parameter.std(correction=0) * torch.randn_like(parameter))
    save(module.bfloat16(), place / "tuned", max_shard_size="20KB")
    main(["align", "a", "tuned", "out"])
    assert "share an ancestor, so that no alignment is needed" in capsys.readouterr().out
    assert_same_files(place / "out", place / "tuned")
    found = json.loads(main(["align", "a", "tuned", "forced", "--force", "--json"]) or capsys.readouterr().out)
    assert not found["skipped"]
    assert_same_files(place / "forced", place / "tuned")
    main(["merge", "a", "tuned", "merged"])
    assert "share an ancestor" in capsys.readouterr().out


@pytest.mark.parametrize("name", FAMILIES)
def test_skeleton_has_the_freedom_of_the_family(name, tmp_path):
    family = FAMILIES[name]
    module = family.build()
    module.config.architectures = [family.model]
    module.config.save_pretrained(tmp_path)
    skeleton = build_skeleton(tmp_path)
    assert all(parameter.device.type == "meta" for parameter in skeleton.parameters())
    apply, shapes = from_module(skeleton)
    assert {name: leaf.shape for name, leaf in shapes.items()} == {
        name: leaf.shape for name, leaf in from_module(module)[1].items()
    }
    spec = mcomb.derive_spec(apply, shapes, to_arrays(family.example()))
    assert sorted(spec.shape(perm) for perm in spec.sizes) == sorted(family.free)


def test_align_finds_names_without_the_prefix_of_the_base_model(tmp_path, monkeypatch):
    """Files of GPT-2 name `wte.weight` what the model names `transformer.wte.weight`."""
    family = FAMILIES["GPT-2"]
    a = family.build()
    for name, module in {"a": a, "b": plant(a, family.example())}.items():
        save(module, tmp_path / name)
        path = tmp_path / name / "model.safetensors"
        state = safetensors.load_file(path)
        safetensors.save_file(
            {key.removeprefix("transformer."): own for key, own in state.items()}, path, {"format": "pt"}
        )
    streamed(monkeypatch)
    main(["align", *(str(tmp_path / name) for name in ("a", "b", "c"))])
    assert_same_files(tmp_path / "c", tmp_path / "a")


def test_align_loads_modules_if_names_are_converted(tmp_path, monkeypatch):
    """Files of Mixtral have one matrix for each expert, and modules have one for all."""
    family = FAMILIES["Mixtral"]
    a = family.build()
    for name, module in {"a": a, "b": plant(a, family.example())}.items():
        save(module, tmp_path / name)
    names = state_of(tmp_path / "a").keys()
    assert not {*names} <= {*a.state_dict()}
    main(["align", *(str(tmp_path / name) for name in ("a", "b", "c"))])
    assert_same_files(tmp_path / "c", tmp_path / "a")


def change_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("change", "command", "words"),
    [
        (lambda b: change_json(b / "config.json", rope_theta=5.0), "merge", r"differ in rope_\w+ .*one configuration"),
        (
            lambda b: (b / "tokenizer.json").write_text('{"model": {"vocab": {"b": 0, "a": 1}}}'),
            "both",
            r"different vocabularies \(token 'a' is number 0 and 1\): use models with one tokenizer",
        ),
        (lambda b: (b / "config.json").write_text("{"), "both", r"config\.json is damaged"),
        (lambda b: next(b.glob("model-00002-of*")).unlink(), "both", "lacks the file model-00002-of"),
        (lambda b: next(b.glob("model-00002-of*")).write_bytes(b"no"), "both", "is not a safetensors file"),
        (
            lambda b: change_json(b / "config.json", model_type="opt"),
            "merge",
            r"differ in model_type \(llama and opt\)",
        ),
        (lambda b: change_json(b / "config.json", model_type="odd"), "align", "not know the model type odd of b, and"),
        (
            lambda b: change_json(b / "config.json", num_attention_heads=2),
            "align",
            r"_proj\.weight is \(32, 32\) in b and \(32, 16\) by its config\.json: download the folder again",
        ),
        (lambda b: (b / "config.json").unlink(), "both", "b is not a Hugging Face folder: pass one with a config.json"),
        (shutil.rmtree, "both", "There is no folder b: check the path"),
    ],
)
def test_folders_that_are_wrong_are_named_and_none_is_written(place, change, command, words):
    change(place / "b")
    before = sorted(place.iterdir())
    for name in ("align", "merge") if command == "both" else (command,):
        with pytest.raises(UserError, match=words) as problem:
            main([name, "a", "b", "out"])
        assert problem.value.exit_code == 2
        assert sorted(place.iterdir()) == before


def test_code_in_folders_is_never_run(place):
    for folder in ("a", "b"):
        own = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
        change_json(place / folder / "config.json", model_type="own", architectures=["Model"], auto_map=own)
        (place / folder / "code.py").write_text(f"open({str(place / 'executed')!r}, 'w')")
    with pytest.raises(UserError, match="not know the model type own of a, and mcomb never runs code from a folder"):
        main(["align", "a", "b", "out"])
    for folder in ("a", "b"):
        change_json(place / folder / "config.json", model_type="llama")
    with pytest.raises(UserError, match="a needs code for Model, which mcomb never runs"):
        main(["align", "a", "b", "out"])
    assert not (place / "executed").exists()
    assert not (place / "out").exists()


def test_align_of_folders_finds_planted_rotations(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    family = FAMILIES["Llama"]
    module = family.build()
    apply, params = from_module(module)
    spec = mcomb.derive_spec(apply, params, to_arrays(family.example()), groups="all")
    save(module, tmp_path / "a")
    save(to_module(spec.apply(spec.random(jax.random.key(0)), params), module), tmp_path / "b")
    main(["align", "a", "b", "out", "--groups", "all"])
    a, b, out = (state_of(tmp_path / name) for name in ("a", "b", "out"))
    assert max(np.abs(b[name] - a[name]).max() for name in a) > 0.1
    for name, tensor in a.items():
        np.testing.assert_allclose(out[name], tensor, rtol=1e-3, atol=1e-5, err_msg=name)


def test_merge_with_a_wrong_base_is_named(place):
    other = FAMILIES["Llama"]
    wide = type(other)(other.model, {**other.config, "intermediate_size": 40}, other.free).build()
    save(wide, place / "wide")
    with pytest.raises(UserError, match=r"a and wide differ in intermediate_size \(48 and 40\)"):
        main(["merge", "a", "b", "out", "--method", "ties", "--base", "wide"])
    with pytest.raises(UserError, match="The method ties needs the networks' common base: pass --base"):
        main(["merge", "a", "b", "out", "--method", "ties"])
    with pytest.raises(UserError, match="The method average has no base: drop --base"):
        main(["merge", "a", "b", "out", "--base", "base"])
    assert not (place / "out").exists()


def test_align_compares_outputs_before_it_writes(place, monkeypatch):
    """A wrong spec would change the function."""
    derive = mcomb.pytorch.hugging_face.derive_spec

    def wrong(apply, params, inputs):
        spec = derive(apply, params, inputs)
        layers = {name: axes if "up_proj" not in name else (None, None) for name, axes in spec.axes.items()}
        return mcomb.PermutationSpec(layers, spec.sizes, spec.batched_over, spec.fixed)

    monkeypatch.setattr(mcomb.pytorch.hugging_face, "derive_spec", wrong)
    with pytest.raises(UserError, match=r"The aligned network differs from .*b by"):
        main(["align", "a", "b", "out"])
    assert sorted(path.name for path in place.iterdir()) == ["a", "b", "base"]


def test_state_dicts_in_pickles_merge_without_their_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = torch.Generator().manual_seed(0)
    states = [{"w": torch.randn(4, 3, generator=rng).bfloat16(), "n": torch.tensor(3)} for _ in range(3)]
    for name, state in zip(("a", "b", "base"), states, strict=True):
        torch.save(state, f"{name}.pt")
    main(["merge", "a.pt", "b.pt", "c.pt", "--method", "task_arithmetic", "--base", "base.pt", "--scale", "0.5"])
    found = torch.load("c.pt", weights_only=True)
    a, b, base = (state["w"].float() for state in states)
    torch.testing.assert_close(found["w"], (base + 0.5 * (a - base + b - base)).bfloat16(), rtol=0, atol=0.02)
    assert torch.equal(found["n"], states[0]["n"])
    with pytest.raises(UserError, match="Merging by refit needs the module: pass --torch"):
        main(["merge", "a.pt", "b.pt", "d.pt", "--method", "refit"])
    with pytest.raises(UserError, match=r"a\.pt is a state dict: pass --torch MODULE:FUNCTION"):
        main(["align", "a.pt", "b.pt", "d.pt"])
    torch.save({**states[1], "w": torch.zeros(2)}, "b.pt")
    with pytest.raises(UserError, match=r"w is \(4, 3\) in a.pt and \(2,\) in b.pt"):
        main(["merge", "a.pt", "b.pt", "d.pt"])
    torch.save({"running_mean": torch.zeros(2)}, "a.pt")
    torch.save({"running_mean": torch.zeros(2)}, "b.pt")
    with pytest.raises(UserError, match="has running statistics such as running_mean: pass --torch"):
        main(["merge", "a.pt", "b.pt", "d.pt"])
    assert not (tmp_path / "d.pt").exists()
