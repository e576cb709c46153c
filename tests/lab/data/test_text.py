import hashlib
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import linear
from mcomb.errors import UserError
from mcomb.lab.data import text
from mcomb.lab.data.datasets import Windows
from mcomb.lab.data.download import DATA_VARIABLE
from mcomb.lab.data.splits import Subset
from mcomb.lab.data.text import CONTEXT, OTHER, PYDOC_TOPICS, SHAKESPEARE, SYMBOLS, decode, encode, load_shakespeare
from mcomb.lab.runs.command import main
from mcomb.lab.setups import load_data


@given(st.text())
def test_encode_keeps_ascii_and_replaces_the_rest(written):
    expected = "".join(symbol if symbol in SYMBOLS else OTHER for symbol in written)
    assert decode(encode(written)) == expected
    assert len(encode(written)) == len(written)


def test_vocabulary_is_fixed():
    assert len(SYMBOLS) == len(set(SYMBOLS)) == PYDOC_TOPICS.classes == 97
    assert encode("\n ~é\t").tolist() == [1, 2, 96, 0, 0]


def test_topics_labels_are_the_next_characters():
    splits = PYDOC_TOPICS.load(None)
    tokens = encode(text.read_topics())
    for split, start in zip(splits, (0, len(tokens) * 9 // 10), strict=True):
        flat, labels = split.inputs.ravel(), split.labels.ravel()
        np.testing.assert_array_equal(flat, tokens[start : start + len(flat)])
        np.testing.assert_array_equal(labels, tokens[start + 1 : start + 1 + len(flat)])
        assert split.inputs.shape[1:] == PYDOC_TOPICS.shape == (CONTEXT,)
    last_of_train = splits.train.inputs.size + 1
    assert last_of_train <= len(tokens) * 9 // 10  # no label of the train split is in the test split
    assert PYDOC_TOPICS.count() == tuple(len(split.labels) for split in splits)


@pytest.mark.parametrize("count", [1, 7, 200, 725, 726])
def test_subset_spreads_over_the_text(count):
    total = 726
    windows = Windows(np.arange(total)[:, None], -np.arange(total)[:, None])
    subset = windows.subset(count)
    rows = subset.inputs.ravel()
    gaps = np.diff([*rows, total])
    assert len(rows) == count
    assert gaps.min() >= total // count
    assert gaps.max() <= -(-total // count)
    np.testing.assert_array_equal(subset.labels.ravel(), -rows)
    np.testing.assert_array_equal(subset.subset(1).inputs, windows.inputs[:1])


def test_subset_of_few_windows_has_the_frequencies_of_the_text():
    test = PYDOC_TOPICS.load(None).test
    assert [len(test.subset(count).labels) for count in (None, 10**7, 200)] == [len(test.labels)] * 2 + [200]
    whole, spread, first = (
        np.bincount(split.labels.ravel(), minlength=len(SYMBOLS)) / split.labels.size
        for split in (test, test.subset(200), test.first(200))
    )
    assert abs(spread - whole).sum() < abs(first - whole).sum() / 2


def test_text_groups_are_consecutive_tenths():
    labels = PYDOC_TOPICS.load(None).train.labels
    groups = PYDOC_TOPICS.groups(labels)
    assert (np.diff(groups) >= 0).all()
    counts = np.bincount(groups)
    assert len(counts) == 10
    assert np.ptp(counts) <= 1


@pytest.mark.parametrize("length", [0, CONTEXT, 10 * CONTEXT])
def test_topics_error_names_short_text(monkeypatch, length):
    monkeypatch.setattr(text, "read_topics", lambda: "x" * length)
    with pytest.raises(UserError, match=f"has {length} characters, too few for the context of 64: install"):
        PYDOC_TOPICS.load(None)


def test_split_between_networks_follows_parts_of_text():
    labels = PYDOC_TOPICS.load(None).train.labels
    groups = PYDOC_TOPICS.groups(labels)
    a, b = (groups[Subset("biased", 1.0, 500, 0, who).rows(groups)] for who in "AB")
    assert len({*a}) == len({*b}) == 5
    assert not {*a} & {*b}


@pytest.fixture
def shakespeare(tmp_path, monkeypatch):
    """A text in the place of Tiny Shakespeare, and its folder."""
    content = b"To be, or not to be.\n" * 100
    monkeypatch.setattr(text, "SHAKESPEARE_SHA256", hashlib.sha256(content).hexdigest())
    (tmp_path / "tinyshakespeare.txt").write_bytes(content)
    return tmp_path


def test_shakespeare_is_read_from_file_folder_or_variable(shakespeare, monkeypatch):
    first = load_shakespeare(shakespeare)
    assert decode(first.train.inputs[0]).startswith("To be, or not to be.\nTo be")
    for given_place in (shakespeare / "tinyshakespeare.txt", None):
        monkeypatch.setenv(DATA_VARIABLE, str(shakespeare))
        np.testing.assert_array_equal(load_shakespeare(given_place).test.labels, first.test.labels)


BROKEN = pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        (b"", "has 0 characters, too few"),
        (b"x" * CONTEXT, "has 64 characters, too few"),
        (b"ab\xff" * 1000, r"not UTF-8 text \(byte 2\)"),
        (b"another text " * 1000, "is not Tiny Shakespeare"),
    ],
    ids=["missing", "empty", "short", "not UTF-8", "another"],
)


@BROKEN
def test_shakespeare_error_is_one_line_with_remedy(shakespeare, content, reason):
    path = shakespeare / "other.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=reason) as raised:
        load_shakespeare(path)
    assert "\n" not in str(raised.value)
    assert str(path) in str(raised.value)
    assert "--setup decoder-text" in str(raised.value)


@BROKEN
def test_command_ends_with_one_line_for_broken_text(shakespeare, content, reason, capsys):
    path = shakespeare / "other.txt"
    if content is not None:
        path.write_bytes(content)
    words = f"--setup decoder-shakespeare --width 1 --epochs 0 --data-dir {path} --out {shakespeare / 'runs'}"
    load_data.cache_clear()
    with pytest.raises(SystemExit) as stopped:
        main(linear.EXPERIMENT, "", words.split())
    assert stopped.value.code == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "error:" in line)
    assert re.search(reason, line)
    assert not [found for found in (shakespeare / "runs").rglob("*") if found.name == "results.json"]


def test_shakespeare_constants_equal_loaded_data(cifar_archive):
    if not (cifar_archive / "tinyshakespeare.txt").is_file():
        pytest.skip("Tiny Shakespeare is missing: put tinyshakespeare.txt into the folder of local data.")
    splits = SHAKESPEARE.load(cifar_archive)
    assert SHAKESPEARE.count() == tuple(len(split.labels) for split in splits)
    assert decode(splits.train.inputs[0]).startswith("First Citizen:\nBefore we proceed")
    assert (np.concatenate([split.inputs.ravel() for split in splits]) > 0).all()  # printable ASCII
