import json

import pytest

from mcomb.errors import UserError
from mcomb.io.paths import seal, write_json
from mcomb.lab.runs.rows import Rows


def row(name, loss=0.5):
    return {"name": name, "loss": loss}


def test_rows_persist_between_processes(tmp_path):
    Rows(tmp_path, {"seed": 0}).add([row("a"), row("b")])
    again = Rows(tmp_path, {"seed": 0})
    assert "a" in again
    assert again["b"]["loss"] == 0.5
    assert "c" not in again


def test_rows_of_another_run_are_dropped(tmp_path):
    Rows(tmp_path, {"seed": 0}).add([row("a")])
    assert "a" not in Rows(tmp_path, {"seed": 1})
    assert "a" not in Rows(tmp_path, {"seed": 0})  # permanently: the file no longer contains them


def test_rows_added_again_replace_previous(tmp_path):
    Rows(tmp_path, {}).add([row("a"), row("a", 0.25)])
    Rows(tmp_path, {}).add([row("a", 0.75)])
    assert Rows(tmp_path, {})["a"]["loss"] == 0.75


def test_rows_without_name_are_damaged(tmp_path, capsys):
    Rows(tmp_path, {}).add([row("a")])
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write(json.dumps(seal({"loss": 0.5}, "x")) + "\n")
    assert Rows(tmp_path, {}).rows.keys() == {"a"}
    assert "has damaged rows (1)" in capsys.readouterr().err


LAST = len(json.dumps(seal(row("b"), "b"))) + 1


@pytest.mark.parametrize("cut", range(1, LAST + 1))
def test_rows_drop_torn_last_row(tmp_path, cut):
    Rows(tmp_path, {}).add([row("a"), row("b")])
    path = tmp_path / "samples.jsonl"
    path.write_text(path.read_text()[:-cut])
    rows = Rows(tmp_path, {})
    assert "a" in rows
    assert ("b" in rows) == (cut == 1)  # only the newline is missing
    if "b" not in rows:
        rows.add([row("b")])
    assert [json.loads(line).get("name") for line in path.read_text().splitlines()] == [None, "a", "b"]


@pytest.mark.parametrize("content", ["", "\n", "no JSON", '{"seed": 0', "\n".join(['{"seed": 1}', '{"name": "a"}'])])
def test_rows_replace_file_of_other_content(tmp_path, content):
    (tmp_path / "samples.jsonl").write_text(content)
    rows = Rows(tmp_path, {"seed": 0})
    assert "a" not in rows
    rows.add([row("a")])
    assert "a" in Rows(tmp_path, {"seed": 0})


def flipped(content):
    """Yield the content with one byte changed, for each byte."""
    for at in range(len(content)):
        for change in (0x01, 0x04, 0x80):
            yield content[:at] + bytes([content[at] ^ change]) + content[at + 1 :]


def test_rows_with_wrong_byte_are_never_misread(tmp_path, capsys):
    Rows(tmp_path, {"seed": 0}).add([row("a", 0.125), row("b", 0.25)])
    path = tmp_path / "samples.jsonl"
    for content in flipped(path.read_bytes()):
        path.write_bytes(content)
        rows = Rows(tmp_path, {"seed": 0})
        assert rows.rows.items() <= {"a": row("a", 0.125), "b": row("b", 0.25)}.items()
    assert "measuring them again" in capsys.readouterr().err


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_results_with_nonfinite_number_are_rejected(value, tmp_path):
    rows = Rows(tmp_path, {})
    with pytest.raises(UserError, match=f"naive/test/3, loss is {value}"):
        rows.add([row("naive/test/2"), row("naive/test/3", value)])
    assert "naive/test/2" not in Rows(tmp_path, {})
    with pytest.raises(UserError, match=rf"results\.json, barriers, naive, 1 is {value}"):
        write_json(tmp_path / "results.json", {"barriers": {"naive": [0.5, value]}})
    assert not (tmp_path / "results.json").exists()
