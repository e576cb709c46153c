import json

import jax
import pytest

from mcomb.errors import UserError
from mcomb.io.paths import seal, write_json
from mcomb.lab.environment import environment
from mcomb.lab.runs.identity import read_finished
from mcomb.lab.runs.results import table
from mcomb.lab.runs.rows import Rows
from mcomb.lab.tables import TABLE_WIDTH, columns


def results():
    level = {split: {"loss": 0.1, "accuracy": 0.9} for split in ("train", "test")}
    return {"models": {"A": level, "B": level}, "barriers": {"naive": level, "aligned": level}, "paper": None}


def test_table_has_numbers_of_paper_if_known():
    assert "paper" not in table(results())
    text = table(results() | {"paper": {"loss": 0.044, "accuracy": 0.012, "width": 32}})
    assert "0.044" in text
    assert "0.012" in text
    lines = text.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [line.split("  ")[0] for line in lines[1:]] == [
        "network A",
        "network B",
        "naive barrier",
        "aligned barrier",
        "paper, width 32",
    ]


def test_columns_align_words_left_and_numbers_right():
    assert columns([("", "a"), ("long", "1.5"), ("x", "22.25")]) == "          a\nlong    1.5\nx     22.25"


def test_columns_splits_wide_tables_evenly():
    rows = [("", *(f"column {i}".rjust(30) for i in range(4))), ("label", *(f"{i}.5" for i in range(4)))]
    text = columns(rows)
    assert max(map(len, text.splitlines())) <= TABLE_WIDTH
    parts = [[line.split() for line in part.splitlines()] for part in text.split("\n\n")]
    assert parts == [
        [["column", "0", "column", "1"], ["label", "0.5", "1.5"]],
        [["column", "2", "column", "3"], ["label", "2.5", "3.5"]],
    ]
    both = columns([(row[0], "x", *row[1:]) for row in rows], labels=2)
    assert [line.split()[:2] for line in both.splitlines()[1::3]] == [["label", "x"]] * 2


def test_columns_keeps_table_with_one_wide_cell():
    assert columns([("x" * 200, "1", "2")]) == "x" * 200 + "  1  2"


@pytest.mark.parametrize("pairs", [False, True])
def test_table_has_best_temperatures_below_rows(pairs):
    control = {
        "models": {letter: {"test": {"loss": 0.25}} for letter in "AB"},
        "barriers": {variant: {"test": {"loss": 0.125}} for variant in ("naive", "aligned")},
    }
    found = results() | {"at_best_temperature": control}
    lines = table(found | ({"least": found, "largest": found} if pairs else {})).splitlines()
    said = [line.split()[3:] for line in lines if line.startswith("  at best temperature")]
    own, lost = (["0.2500", "(0.2500–0.2500)"], ["0.1250", "(0.1250–0.1250)"]) if pairs else (["0.2500"], ["0.1250"])
    assert [line for line in said if line] == [own, own, lost, lost]
    assert max(map(len, lines)) <= TABLE_WIDTH


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
    assert "has 1 damaged rows" in capsys.readouterr().err


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


IDENTITY = {"experiment": "linear", "config": {"seed": 0}, "networks": {"A": "x"}, "version": 1}


def test_read_finished_requires_equal_identity(tmp_path, capsys):
    assert read_finished(tmp_path, IDENTITY) is None
    stored = IDENTITY | {"seconds": 3.5}
    write_json(tmp_path / "results.json", stored)
    assert read_finished(tmp_path, IDENTITY) == stored
    assert capsys.readouterr().err == ""
    other = IDENTITY | {"networks": {"A": "y"}, "version": 2}
    assert read_finished(tmp_path, other, tell=False) is None
    assert capsys.readouterr().err == ""
    assert read_finished(tmp_path, other) is None
    said = capsys.readouterr().err
    assert said == f"{tmp_path / 'results.json'} was made from other networks, version: measuring again\n"


def flipped(content):
    """Yield the content with one byte changed, for each byte."""
    for at in range(len(content)):
        for change in (0x01, 0x04, 0x80):
            yield content[:at] + bytes([content[at] ^ change]) + content[at + 1 :]


def test_results_with_wrong_byte_are_never_misread(tmp_path, capsys):
    stored = IDENTITY | {"loss": 0.125, "seconds": 3.5}
    write_json(tmp_path / "results.json", stored)
    used, tried = 0, 0
    for content in flipped((tmp_path / "results.json").read_bytes()):
        (tmp_path / "results.json").write_bytes(content)
        found = read_finished(tmp_path, IDENTITY)
        assert found in (None, stored)
        used, tried = used + (found is not None), tried + 1
    assert used < tried / 5  # whitespace may change without effect
    assert capsys.readouterr().err.count("is damaged or has no digest: measuring again\n") == tried - used


def test_rows_with_wrong_byte_are_never_misread(tmp_path, capsys):
    Rows(tmp_path, {"seed": 0}).add([row("a", 0.125), row("b", 0.25)])
    path = tmp_path / "samples.jsonl"
    for content in flipped(path.read_bytes()):
        path.write_bytes(content)
        rows = Rows(tmp_path, {"seed": 0})
        assert rows.rows.items() <= {"a": row("a", 0.125), "b": row("b", 0.25)}.items()
    assert "damaged rows: measuring them again" in capsys.readouterr().err


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_results_with_nonfinite_number_are_rejected(value, tmp_path):
    rows = Rows(tmp_path, {})
    with pytest.raises(UserError, match=f"naive/test/3, loss is {value}"):
        rows.add([row("naive/test/2"), row("naive/test/3", value)])
    assert "naive/test/2" not in Rows(tmp_path, {})
    with pytest.raises(UserError, match=rf"results\.json, barriers, naive, 1 is {value}"):
        write_json(tmp_path / "results.json", {"barriers": {"naive": [0.5, value]}})
    assert not (tmp_path / "results.json").exists()


def test_environment_has_versions_and_devices():
    found = environment()
    assert found["packages"]["jax"] == jax.__version__
    assert found["devices"] == ["cpu:cpu"] * len(jax.devices())
    assert json.loads(json.dumps(found)) == found
