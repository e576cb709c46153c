"""Paths, and files that are written whole or not at all."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from mcomb.errors import UserError
from mcomb.io.paths import as_path, atomic, in_store, make_writable, read_json, write_json

ROOT = Path(__file__).parents[2]


def test_atomic_writes_whole_file_or_none(tmp_path):
    target = tmp_path / "x.json"
    target.write_text("old")

    def fail_half_way():
        with atomic(target) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
    with atomic(target) as temporary:
        temporary.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_write_json_keeps_old_file_on_error(tmp_path):
    target = tmp_path / "x.json"
    value = {"a": [1, 2.5, None, "é"], "b": {"c": 1e-300}}
    write_json(target, value)
    assert json.loads(target.read_text()).items() > value.items()
    with pytest.raises(TypeError):
        write_json(target, {"a": object()})
    assert read_json(target) == value
    assert list(tmp_path.iterdir()) == [target]


def test_read_json_detects_changes(tmp_path):
    target = tmp_path / "x.json"
    assert read_json(target) is None
    write_json(target, {"a": {2: [0.1, (1, 2)], 10: "x"}})  # keys that JSON makes strings of
    assert read_json(target) == {"a": {"2": [0.1, [1, 2]], "10": "x"}}
    text = target.read_text()
    for other in ("", "{}", "[]", "1", "null", "[" * 100_000, text[:-3], text.replace("0.1", "0.2"), text + "x"):
        target.write_text(other)
        assert read_json(target) is None


def test_make_writable_creates_empty_folder(tmp_path):
    assert make_writable(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert make_writable(tmp_path / "a" / "b").is_dir()
    assert not list((tmp_path / "a" / "b").iterdir())


def test_make_writable_names_read_only_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"Cannot write to .*file/runs .*: pass another --out"):
        make_writable(tmp_path / "file" / "runs")


def test_as_path_rejects_unknown_scheme():
    for text in ("runs", "/a/b", "a:b", "gs:/b", "."):
        assert as_path(text) == as_path(Path(text)) == Path(text)
        assert not in_store(as_path(text))
    with pytest.raises(UserError, match=r"^Cannot open ftp://host/runs: pass a folder, or gs://"):
        as_path("ftp://host/runs")


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("", "The path is empty: pass a file or a folder"),
        ("gs://", "gs:// has no bucket: pass gs://BUCKET/FOLDER"),
        ("gs:///runs", "gs:///runs has no bucket"),
        ("s3://", "s3:// has no bucket: pass s3://BUCKET/FOLDER"),
        ("runs/" + "x" * 256, "x… has more than 255 bytes: use a shorter one"),
        ("ä" * 128, "ä… has more than 255 bytes"),
    ],
)
def test_as_path_rejects_malformed_address(address, problem):
    with pytest.raises(UserError, match=problem):
        as_path(address)


def test_as_path_of_store_keeps_address_or_names_package():
    if find_spec("gcsfs") or find_spec("tensorflow"):
        path = as_path("gs://bucket/runs") / "x"
        assert in_store(path)
        assert str(path) == "gs://bucket/runs/x"
        assert as_path(path) == path
    else:
        with pytest.raises(UserError, match=r"^Cannot open gs://bucket/runs \(.*install gcsfs.*\): install mcomb"):
            as_path("gs://bucket/runs")
