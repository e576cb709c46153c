"""Files are whole or not there."""

import json
from pathlib import Path

import pytest

from mcomb.base import UserError
from mcomb.files import atomic, make_writable, write_json

ROOT = Path(__file__).parent.parent


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
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


def test_json_that_cannot_be_written_leaves_the_old_file(tmp_path):
    target = tmp_path / "x.json"
    write_json(target, {"a": [1, 2.5, None, "é"]})
    assert json.loads(target.read_text()) == {"a": [1, 2.5, None, "é"]}
    with pytest.raises(TypeError):
        write_json(target, {"a": object()})
    assert json.loads(target.read_text()) == {"a": [1, 2.5, None, "é"]}
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_is_made_with_those_above_it_and_nothing_in_it(tmp_path):
    assert make_writable(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert make_writable(tmp_path / "a" / "b").is_dir()
    assert not list((tmp_path / "a" / "b").iterdir())


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write to .*file/runs .*: give another --out"):
        make_writable(tmp_path / "file" / "runs")
