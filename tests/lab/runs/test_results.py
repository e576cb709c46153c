import pytest

from mcomb.io.paths import write_json
from mcomb.lab.runs.identity import examine, read_finished
from mcomb.lab.runs.results import table
from mcomb.lab.tables import TABLE_WIDTH


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


def test_examine_says_why_results_are_not_reused(tmp_path):
    assert examine(tmp_path, IDENTITY) == ("missing", None, "")
    write_json(tmp_path / "results.json", IDENTITY)
    assert examine(tmp_path, IDENTITY) == ("current", IDENTITY, "")
    assert examine(tmp_path, IDENTITY | {"version": 2}) == ("outdated", IDENTITY, "was made from other version")
    (tmp_path / "results.json").write_text("{}")
    assert examine(tmp_path, IDENTITY) == ("outdated", None, "is damaged or has no digest")


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
