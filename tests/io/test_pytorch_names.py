"""Names and layouts of PyTorch and Git Re-Basin convert to ours and back."""

import jax
import numpy as np
import pytest

from mcomb import read_checkpoint
from mcomb.errors import UserError
from mcomb.io.checkpoints import write_checkpoint
from mcomb.io.pytorch_names import TABLES, Row, read_table, to_ours, to_theirs
from mcomb.lab.setups import SETUPS
from mcomb.trees import named_leaves


def theirs():
    rng = np.random.default_rng(0)
    shapes = {"body.0.weight": (5, 3), "body.0.bias": (5,), "stem.conv.weight": (4, 3, 2, 2), "norm.weight": (4,)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def test_names_convert_pytorch_layouts_to_flax_and_back():
    found = theirs()
    ours = to_ours(TABLES["pytorch"], found)
    assert {name: leaf.shape for name, leaf in ours.items()} == {
        "body/0/kernel": (3, 5),
        "body/0/bias": (5,),
        "stem/conv/kernel": (2, 2, 3, 4),
        "norm/scale": (4,),
    }
    np.testing.assert_array_equal(ours["stem/conv/kernel"][1, 0, 2, 3], found["stem.conv.weight"][3, 2, 1, 0])
    back = to_theirs(TABLES["pytorch"], ours, found)
    assert back.keys() == found.keys()
    for name in found:
        np.testing.assert_array_equal(back[name], found[name])


@pytest.mark.slow
def test_names_of_git_re_basin_cover_our_resnet(tmp_path):
    ours = named_leaves(SETUPS["resnet20-cifar10"].init(1, 0))

    def their_name(name):
        first, *rest = name.split("/")
        if first.startswith("block"):
            group, block = map(int, first.removeprefix("block").split("_"))
            short = {"shortcut_conv": "shortcut/layers_0", "shortcut_norm": "shortcut/layers_1"}
            return "/".join([f"blockgroup{group}/blocks_{block - 1}", short.get(rest[0], rest[0]), rest[1]])
        return "/".join([{"conv0": "conv1", "norm0": "norm1", "logits": "dense"}[first], *rest])

    tree = {}
    for name, leaf in ours.items():
        *modules, last = their_name(name).split("/")
        inner = tree
        for module in modules:
            inner = inner.setdefault(module, {})
        inner[last] = leaf
    write_checkpoint(tmp_path / "theirs.msgpack", {"params": tree})
    shapes = SETUPS["resnet20-cifar10"].shapes(1)
    found = named_leaves(read_checkpoint(tmp_path / "theirs.msgpack", shapes, names=TABLES["git-re-basin"]))
    assert found.keys() == ours.keys()
    for name in ours:
        np.testing.assert_array_equal(found[name], ours[name])


@pytest.mark.parametrize("ending", ["safetensors", "npz", "msgpack", "orbax"])
def test_names_round_trip_in_every_format(tmp_path, ending):
    tree = SETUPS["mlp-digits"].init(1, 0)
    write_checkpoint(tmp_path / f"network.{ending}", tree)
    found = read_checkpoint(tmp_path / f"network.{ending}")
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, found, tree)


@pytest.mark.parametrize("ending", ["npz", "msgpack"])
def test_names_reject_broken_file(tmp_path, ending):
    path = tmp_path / f"network.{ending}"
    with pytest.raises(UserError, match="There is no file"):
        read_checkpoint(path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(UserError, match="Cannot read"):
        read_checkpoint(path)


def test_names_reject_unknown_and_ambiguous_names():
    with pytest.raises(UserError, match=r"attention\.mixer"):
        to_ours(TABLES["pytorch"], {"attention.mixer": np.zeros((3, 3))})
    with pytest.raises(UserError, match="both become"):
        to_ours([Row(".*", "same")], {"one": np.zeros(2), "two": np.zeros(2)})


def test_names_table_is_read_from_file(tmp_path):
    path = tmp_path / "names.txt"
    path.write_text("# ours\nfc(\\d)\\.weight dense\\1/kernel 1,0\n\nfc(\\d)\\.bias dense\\1/bias\n")
    ours = to_ours(read_table(str(path)), {"fc2.weight": np.zeros((4, 3)), "fc2.bias": np.zeros(4)})
    assert {name: leaf.shape for name, leaf in ours.items()} == {"dense2/kernel": (3, 4), "dense2/bias": (4,)}
    for wrong in ("only-a-pattern", "a( b", "a b 1,x"):
        path.write_text(wrong)
        with pytest.raises(UserError, match="Line 1"):
            read_table(str(path))
    path.write_text("words\\.weight words/embedding\nunused -\npytorch\n")
    found = {"words.weight": np.zeros((7, 3)), "head.weight": np.zeros((7, 3)), "unused": np.zeros(2)}
    ours = to_ours(read_table(str(path)), found)
    assert {name: leaf.shape for name, leaf in ours.items()} == {"words/embedding": (7, 3), "head/kernel": (3, 7)}
    with pytest.raises(UserError, match="Unknown names nowhere"):
        read_table("nowhere")


def test_names_table_must_be_text(tmp_path):
    path = tmp_path / "names.bin"
    path.write_bytes(bytes(range(128, 256)))
    with pytest.raises(UserError, match=r"names\.bin is not a text file .*: pass a table of names"):
        read_table(str(path))


@pytest.mark.parametrize("name", [r"w\7", r"w\q", r"w\g<no>"])
def test_names_reject_pattern_without_inverse(name):
    with pytest.raises(UserError, match=r"Cannot expand the name w\\.* for layer1 \(.*\): fix the table"):
        to_ours([Row(r"layer(\d)", name)], {"layer1": np.zeros(2)})
