"""`python -m mcomb` inspects, aligns, combines and evaluates networks in files."""

import json
import re
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mcomb import combine, read_checkpoint, write_checkpoint
from mcomb.__main__ import main
from mcomb.errors import UserError
from mcomb.lab.setups import SETUPS
from mcomb.trees import named_leaves

SETUP = SETUPS["mlp-digits"]
MODEL = ["--model", "mlp-digits:2"]
HIDDEN = 16

MINE = """
import jax, jax.numpy as jnp
def model():
    x = jax.random.normal(jax.random.key(0), (40, 6))
    def apply(params, x):
        hidden = jnp.tanh(x @ params["fc1"]["kernel"] + params["fc1"]["bias"][None])
        return hidden @ params["fc2"]["kernel"]
    return apply, x, x[:, :3].argmax(1)
def without_labels():
    return model()[:2]
def regression():
    import mcomb
    return *model()[:2], jnp.zeros((40, 3)), mcomb.squared_error
def wrong():
    return 3
def alone():
    return model()[:1]
def broken():
    return {}["nope"]
def unhappy():
    def apply(params, x):
        return params["nope"]
    return apply, jnp.zeros((4, 6)), jnp.zeros(4, int)
def overflowing():
    apply, *rest = model()
    return lambda params, x: jnp.inf * apply(params, x), *rest
def normed():
    x = jax.random.normal(jax.random.key(0), (40, 6))
    def apply(variables, x):
        mean, var = (variables["batch_stats"][name][None] for name in ("mean", "var"))
        return (x @ variables["params"]["w"] - mean) * jax.lax.rsqrt(var + 1e-5)
    return apply, x, x[:, :3].argmax(1)
"""


@pytest.fixture(scope="module")
def networks(tmp_path_factory):
    """Return the files of two networks, and of one of them with permuted units."""
    folder = tmp_path_factory.mktemp("networks")
    paths = [folder / name for name in ("a.safetensors", "b.npz", "shuffled.msgpack")]
    a, b = (SETUP.init(2, seed) for seed in (0, 1))
    spec = SETUP.spec(2)
    for path, params in zip(paths, (a, b, spec.apply(spec.random(jax.random.key(3)), a)), strict=True):
        write_checkpoint(path, params)
    return paths


def said(capsys, *words):
    main([*map(str, words)])
    return capsys.readouterr().out


def test_command_inspect_shows_network(networks, capsys, tmp_path):
    out = said(capsys, "inspect", networks[0], *MODEL, "--graph", tmp_path / "graph.png")
    assert "dense2/kernel" in out
    assert "32 × 32" in out
    assert "permutation" in out
    assert (tmp_path / "graph.png").stat().st_size > 5_000
    assert "permutation" not in said(capsys, "inspect", networks[1])
    found = json.loads(said(capsys, "inspect", networks[0], *MODEL, "--json"))
    assert found["leaves"]["dense2/kernel"] == {"shape": [32, 32], "dtype": "float32"}
    assert [len(perm["acts on"]) for perm in found["permutations"].values()] == [3] * len(found["permutations"])


def test_command_align_recovers_permuted_network(networks, capsys, tmp_path):
    out = said(capsys, "align", networks[0], networks[2], tmp_path / "aligned.npz", *MODEL)
    assert str(tmp_path / "aligned.npz") in out
    jax.tree.map(np.testing.assert_array_equal, read_checkpoint(tmp_path / "aligned.npz"), read_checkpoint(networks[0]))
    assert said(capsys, "align", networks[0], networks[2], tmp_path / "quiet.npz", *MODEL, "--quiet") == ""
    found = json.loads(said(capsys, "align", networks[0], networks[2], tmp_path / "json.npz", *MODEL, "--json"))
    assert found["path"] == str(tmp_path / "json.npz")
    assert 0 < found["moved"] <= found["units"]
    assert found["inner_products"]["naive"] < found["inner_products"]["aligned"]


def test_commands_align_and_merge_by_all_groups(networks, capsys, tmp_path):
    a = read_checkpoint(networks[0])
    scaled = jax.tree.map(np.asarray, a)
    scaled["dense1"] = jax.tree.map(lambda x: 3 * x, scaled["dense1"])  # ReLU units, without any change of the function
    scaled["dense2"]["kernel"] = scaled["dense2"]["kernel"] / 3
    write_checkpoint(tmp_path / "scaled.npz", SETUP.spec(2).apply(SETUP.spec(2).random(jax.random.key(5)), scaled))
    said(capsys, "align", networks[0], tmp_path / "scaled.npz", tmp_path / "aligned.npz", *MODEL, "--groups", "all")
    merging = ["merge", networks[0], tmp_path / "scaled.npz", tmp_path / "merged.npz", "--groups", "all"]
    said(capsys, *merging, *MODEL)
    for name in ("aligned.npz", "merged.npz"):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), read_checkpoint(tmp_path / name), a)
    with pytest.raises(UserError, match="--groups all needs --model"):
        said(capsys, *merging[:3], tmp_path / "other.npz", *merging[4:])


def test_command_combine_draws_from_distributions(networks, capsys, tmp_path):
    a, b = map(read_checkpoint, networks[:2])
    said(capsys, "combine", *networks[:2], tmp_path / "middle.npz", "--share", 0.5)
    found = read_checkpoint(tmp_path / "middle.npz")
    jax.tree.map(np.testing.assert_array_equal, found, combine(a, b, 0.5))
    said(capsys, "combine", *networks[:2], tmp_path / "vertex.npz", "--distribution", "bernoulli", "--p", 0.5)
    vertex, a, b = map(named_leaves, (read_checkpoint(tmp_path / "vertex.npz"), a, b))
    for name in ("dense1/kernel", "dense2/kernel"):
        from_a = np.isclose(vertex[name], a[name]).mean()
        assert 0.4 < from_a < 0.6
        assert np.all(np.isclose(vertex[name], a[name]) | np.isclose(vertex[name], b[name]))


def test_command_evaluate_takes_own_function(capsys, tmp_path, monkeypatch):
    (tmp_path / "mine_in_a_test.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    key = jax.random.key(1)
    params = {"fc1": {"kernel": jax.random.normal(key, (6, HIDDEN)), "bias": jnp.zeros(HIDDEN)}}
    params["fc2"] = {"kernel": jax.random.normal(key, (HIDDEN, 3))}
    theirs = {"fc1.weight": params["fc1"]["kernel"].T, "fc1.bias": np.zeros(HIDDEN, np.float32)}
    theirs["fc2.weight"] = params["fc2"]["kernel"].T
    write_checkpoint(tmp_path / "a.npz", params)
    write_checkpoint(tmp_path / "theirs.safetensors", theirs)
    mine = ["--model", "mine_in_a_test:model"]
    ours = said(capsys, "evaluate", "a.npz", *mine).splitlines()[1].split()[1:]
    assert (
        ours == said(capsys, "evaluate", "theirs.safetensors", *mine, "--names", "pytorch").splitlines()[1].split()[1:]
    )
    scores = json.loads(said(capsys, "evaluate", "a.npz", *mine, "--json"))["networks"]["a.npz"]
    assert [f"{scores['loss']:.4f}", f"{scores['accuracy']:.2%}", str(scores["inputs"])] == ours
    said(capsys, "align", "theirs.safetensors", "theirs.safetensors", "back.safetensors", *mine, "--names", "pytorch")
    back = read_checkpoint("back.safetensors")
    assert back.keys() == theirs.keys()
    for name, leaf in theirs.items():
        np.testing.assert_array_equal(back[name], leaf)
    (header, row) = said(capsys, "evaluate", "a.npz", "--model", "mine_in_a_test:regression").splitlines()
    assert header.split() == ["loss", "inputs"]
    x = jax.random.normal(jax.random.key(0), (40, 6))
    squares = np.square(np.tanh(np.asarray(x) @ params["fc1"]["kernel"]) @ params["fc2"]["kernel"])
    assert float(row.split()[1]) == pytest.approx(squares.mean(), abs=1e-3)
    for model, problem in (
        ("without_labels", "no labels"),
        ("wrong", r"returns an object of type int: return \(apply, inputs\)"),
        ("alone", r"returns a tuple of 1: return \(apply, inputs\)"),
        ("none", "Cannot load --model"),
        ("broken", r"Cannot load --model .* \(KeyError: 'nope'\)"),
        ("unhappy", r"a\.npz does not fit the model \(KeyError: 'nope'\)"),
    ):
        with pytest.raises(UserError, match=problem):
            main(["evaluate", "a.npz", "--model", f"mine_in_a_test:{model}"])


@pytest.mark.parametrize("how", [[], ["--json"]])
def test_command_evaluate_names_diverged_network(capsys, tmp_path, monkeypatch, how):
    (tmp_path / "mine_overflowing.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    params = {"fc1": {"kernel": np.ones((6, 2), np.float32), "bias": np.ones(2, np.float32)}}
    write_checkpoint(tmp_path / "a.npz", params | {"fc2": {"kernel": np.ones((2, 3), np.float32)}})
    with pytest.raises(UserError, match=r"Cannot evaluate a\.npz: The loss of example 0 is nan") as problem:
        said(capsys, "evaluate", "a.npz", "--model", "mine_overflowing:overflowing", *how)
    assert problem.value.exit_code == 2
    assert capsys.readouterr().out == ""


def test_command_combine_estimates_statistics(capsys, tmp_path, monkeypatch):
    (tmp_path / "normed_in_a_test.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    a, b = (
        {
            "params": {"w": rng.normal(size=(6, 3)).astype(np.float32)},
            "batch_stats": {"mean": np.full(3, i, np.float32), "var": np.full(3, 9, np.float32)},
        }
        for i in range(2)
    )
    write_checkpoint("a.npz", a)
    write_checkpoint("b.npz", b)
    words = ["combine", "a.npz", "b.npz", "c.npz", "--share", "0.5"]
    with pytest.raises(UserError, match=r"a\.npz has running statistics such as batch_stats/mean"):
        main(words)
    assert not (tmp_path / "c.npz").exists()
    said(capsys, *words, "--model", "normed_in_a_test:normed")
    found = read_checkpoint("c.npz")
    w = (a["params"]["w"] + b["params"]["w"]) / 2
    outputs = np.asarray(jax.random.normal(jax.random.key(0), (40, 6))) @ w
    np.testing.assert_allclose(found["params"]["w"], w, rtol=1e-6)
    np.testing.assert_allclose(found["batch_stats"]["mean"], outputs.mean(0), rtol=1e-4)
    np.testing.assert_allclose(found["batch_stats"]["var"], outputs.var(0), rtol=1e-4)


def test_command_combine_keeps_names_of_first_file(capsys, tmp_path, monkeypatch):
    (tmp_path / "foreign_in_a_test.py").write_text(MINE)
    (tmp_path / "names.txt").write_text("norm.weight params/w 1,0\nnorm.running_(mean|var) batch_stats/\\1")
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name in "ab":
        statistics = {f"norm.running_{each}": np.ones(3, np.float32) for each in ("mean", "var")}
        write_checkpoint(f"{name}.npz", {"norm.weight": rng.normal(size=(3, 6)).astype(np.float32), **statistics})
    words = ["--share", 0.5, "--model", "foreign_in_a_test:normed", "--names", "names.txt"]
    said(capsys, "combine", "a.npz", "b.npz", "c.npz", *words)
    a, b, found = (read_checkpoint(f"{name}.npz") for name in "abc")
    assert found.keys() == a.keys()
    np.testing.assert_allclose(found["norm.weight"], (a["norm.weight"] + b["norm.weight"]) / 2, rtol=1e-6)
    outputs = np.asarray(jax.random.normal(jax.random.key(0), (40, 6))) @ found["norm.weight"].T
    np.testing.assert_allclose(found["norm.running_var"], outputs.var(0), rtol=1e-4)


def test_command_never_overwrites_its_inputs(networks, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, b = read_checkpoint(networks[0]), read_checkpoint(networks[1])
    write_checkpoint("a.npz", a)
    write_checkpoint("b.npz", b)
    before = [path.read_bytes() for path in (tmp_path / "a.npz", tmp_path / "b.npz")]
    for to in ("a.npz", "b.npz", tmp_path / "." / "b.npz"):
        for command in (["align", *MODEL], ["combine", "--share", "0.5"]):
            with pytest.raises(UserError, match="is one of the input networks: use another name"):
                main([command[0], "a.npz", "b.npz", str(to), *command[1:]])
    assert before == [path.read_bytes() for path in (tmp_path / "a.npz", tmp_path / "b.npz")]
    for share, network in ((0, a), (1, b)):
        said(capsys, "combine", "a.npz", "b.npz", "c.npz", "--share", share)
        jax.tree.map(np.testing.assert_array_equal, read_checkpoint("c.npz"), network)


def test_command_takes_folder_names_with_dots(networks, capsys, tmp_path):
    said(capsys, "combine", *networks[:2], tmp_path / "share-0.5", "--share", 0.5)
    assert (tmp_path / "share-0.5").is_dir()


@pytest.mark.parametrize("command", ["align", "evaluate"])
def test_command_help_requires_model(capsys, command):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "MODULE:FUNCTION; required" in text
    assert "(default: )" not in text


def test_command_runs_experiments(capsys):
    with pytest.raises(SystemExit) as end:
        main(["uniform", "--help"])
    assert end.value.code == 0
    assert "--samples" in capsys.readouterr().out
    main([])
    assert "uniform, width" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["blend"], "Unknown command blend"),
        (["pretrained"], "Unknown command pretrained"),  # it writes into a clone
        (["inspect"], "network"),
        (["inspect", "A", "--graph", "g.png"], "--model"),
        (["inspect", "A", *MODEL, "--graph", "g.txt"], r"g\.txt has an unknown ending: use one of \.png, \.pdf, \.svg"),
        (["inspect", "A", *MODEL, "--graph", "nowhere/g.png"], "there is no folder nowhere: create it first"),
        (["inspect", "A.safetensor"], r"does not end in \.safetensors, \.npz or \.msgpack"),
        (["inspect", "nowhere.npz"], "no file nowhere.npz"),
        (["align", "A", "B", "C"], "align needs the model of the networks: pass --model"),
        (["align", "A", "B", "nowhere/c.npz", *MODEL], "there is no folder nowhere: create it first"),
        (["align", "A", "B", "c.safetensor", *MODEL], r"c\.safetensor does not end in \.safetensors, \.npz or"),
        (["evaluate", "A"], "evaluate needs the model"),
        (["align", "A", "B", "C", "--model", "mlp-digits"], "is not a model"),
        (["align", "A", "B", "C", "--model", "mlp-digits:x"], "has no width"),
        (["align", "A", "B", "C", "--model", "mlp-digits:²"], "has no width"),
        (["align", "A", "B", "C", "--model", "mlp-digits:100001"], "Width 100001 exceeds 100000: use a smaller width"),
        (["align", "A", "B", "C", "--model", "mlp-digits:3"], "does not fit"),
        (["combine", "A", "B", "C"], "--share"),
        (["combine", "A", "B", "C", "--share", "0.5", "--p", "0.5"], "--share"),
        (
            ["combine", "A", "B", "C", "--distribution", "bernoulli", "--p", "1.5"],
            "--p 1.5 .* from 0 to 1",
        ),
        (["combine", "A", "B", "C", "--distribution", "subcube", "--share", "2"], "--share 2 .* from 0 to 1"),
        (["combine", "A", "B", "C", "--distribution", "hyperplane", "--share", "-1"], "--share -1 .* from 0 to 1"),
        (["combine", "A", "B", "C", "--distribution", "uniform", "--s", "-0.5"], "--s -0.5 .* pass 0 or more"),
        (["combine", "A", "B", "C", "--distribution", "centered", "--s", "-0.5"], "--s -0.5 .* pass 0 or more"),
        (
            ["combine", "A", "WIDE", "C", "--share", "0.5"],
            "where .*a.safetensors has .* pass two networks of",
        ),
        (["evaluate", "A", "--model", "nowhere_at_all:model"], "Cannot load --model"),
        (["unifrom"], r"Unknown command unifrom: did you mean uniform\?$"),
        (["evalute"], r"Unknown command evalute: did you mean evaluate\?$"),
        (["xyzzyx"], "Unknown command xyzzyx: choose from inspect, align,"),
        (["align", "A", "nowhere/", "C"], r"There is no file or folder .*nowhere: check the path"),
        (["merge", "A", "C"], r"Cannot merge .*a\.safetensors alone: pass two or more"),
        (["merge", "A", "B", "C", "--shares", "2"], r"shares has 2\.0: pass the share of B from 0 to 1"),
        (["merge", "A", "B", "C", "--shares", "dense1=x"], "--shares dense1=x is not understood: pass 0.3, or"),
        (
            ["merge", "A", "B", "C", "--shares", "dense9=0.5"],
            "No weight belongs to the layers 'dense9': use parts of names",
        ),
        (["merge", "A", "B", "C", "--scale", "2"], "The method average has no scale: drop --scale"),
        (["merge", "A", "B", "C", "--method", "dare"], "The method dare needs the networks' common base: pass --base"),
        (["merge", "A", "B", "C", "--method", "refit"], "Merging by refit needs data: pass --model"),
        (["merge", "A", "WIDE", "C"], "where .*a.safetensors has .* pass networks of one model"),
        (["merge", "A", "B", "c.safetensor"], r"c\.safetensor does not end in \.safetensors, \.npz or"),
        (["combine", "A", "B", "C", "--share", "1e300"], "--share 1e[+]300 .* not finite: pass a --share nearer"),
        (["combine", "A", "B", "C", "--share", "-1e39"], "--share -1e[+]39 .* not finite: pass a --share nearer"),
        (["combine", "A", "B", "C", "--distribution", "uniform", "--s", "3e38"], "--s 3e[+]38 .* not finite: pass a"),
        (["combine", "A", "B", "C", "--distribution", "centered", "--s", "1e39"], "--s 1e[+]39 .* not finite: pass a"),
    ],
)
def test_command_names_misuse_and_writes_nothing(networks, tmp_path, words, problem, capsys):
    write_checkpoint(tmp_path / "wide.npz", SETUP.init(3, 0))
    names = {"A": networks[0], "B": networks[1], "C": tmp_path / "c.npz", "WIDE": tmp_path / "wide.npz"}
    with pytest.raises(UserError, match=problem):
        main([str(names.get(word, word)) for word in words])
    assert [path.name for path in tmp_path.iterdir()] == ["wide.npz"]
    assert capsys.readouterr().out == ""


def test_command_merge_takes_networks_of_any_format(networks, capsys, tmp_path):
    a, b = map(read_checkpoint, networks[:2])
    words = [*networks[:2], tmp_path / "merged.npz"]
    said(capsys, "merge", *words, "--shares", "dense1=0.25", "*=1")
    found, a, b = (named_leaves(own) for own in (read_checkpoint(tmp_path / "merged.npz"), a, b))
    for name, leaf in found.items():
        share = 0.25 if name.startswith("dense1") else 1.0
        np.testing.assert_allclose(leaf, (1 - share) * a[name] + share * b[name], rtol=1e-6, atol=1e-7)
    words[2] = tmp_path / "task.safetensors"
    said(capsys, "merge", *words, "--method", "task_arithmetic", "--base", networks[2], "--scale", 0.25)
    found, base = (named_leaves(read_checkpoint(path)) for path in (words[2], networks[2]))
    for name, leaf in found.items():
        wanted = base[name] + 0.25 * (a[name] + b[name] - 2 * base[name])
        np.testing.assert_allclose(leaf, wanted, rtol=1e-5, atol=1e-6)
    words[2] = tmp_path / "refit.npz"
    said(capsys, "merge", *words, "--method", "refit", *MODEL)
    assert named_leaves(read_checkpoint(words[2])).keys() == found.keys()


def test_command_align_skips_related_networks(networks, capsys, tmp_path):
    a = read_checkpoint(networks[0])
    rng = np.random.default_rng(0)
    near = jax.tree.map(lambda leaf: leaf + 0.1 * np.std(leaf) * rng.normal(size=leaf.shape).astype(np.float32), a)
    write_checkpoint(tmp_path / "near.npz", near)
    words = [networks[0], tmp_path / "near.npz"]
    assert "no alignment is needed" in said(capsys, "align", *words, tmp_path / "b.npz", *MODEL)
    jax.tree.map(np.testing.assert_array_equal, read_checkpoint(tmp_path / "b.npz"), near)
    assert "units moved" in said(capsys, "align", *words, tmp_path / "c.npz", *MODEL, "--force")


def test_commands_name_missing_pytorch(tmp_path):
    for name in ("a.pt", "b.pt"):
        (tmp_path / name).touch()
    code = "import sys; sys.modules['torch'] = None; from mcomb.__main__ import console; console()"
    for words in (["merge", "a.pt", "b.pt", "c.pt"], ["align", "a.pt", "b.pt", "c.pt", "--torch", "mine:model"]):
        program = [sys.executable, "-c", code, *words]
        done = subprocess.run(program, check=False, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 2
        assert re.fullmatch(r"error: .*need PyTorch and torchax .*: install mcomb\[pytorch\]\.\n", done.stderr)
