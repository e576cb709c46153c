import json
import math
from dataclasses import replace

import pytest

from experiments import merge, triangle, width
from mcomb.io.paths import write_json
from mcomb.lab.runs.pairs import pool
from mcomb.lab.runs.results import (
    Calibrated,
    Curves,
    LayoutError,
    Paper,
    Parameter,
    Results,
    SweepResults,
    read_results,
    table,
    write_results,
)
from mcomb.lab.runs.reuse import Finished, examine, read_finished
from mcomb.lab.tables import TABLE_WIDTH

LEVEL = {split: {"loss": 0.1, "accuracy": 0.9} for split in ("train", "test")}


def results(**changes):
    config = {"setup": "mlp-digits", "width": 32}
    networks, lost = {"A": LEVEL, "B": LEVEL}, {"naive": LEVEL, "aligned": LEVEL}
    return Curves(config=config | changes, models=networks, barriers=lost, ends=["A", "B"], curves={})


def test_table_has_numbers_of_paper_if_known():
    assert "paper" not in table(results())
    text = table(replace(results(), paper=Paper(loss=0.044, accuracy=0.012, width=32)))
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
    control = Calibrated(
        models={letter: {"test": {"loss": 0.25}} for letter in "AB"},
        curves={},
        barriers={variant: {"test": {"loss": 0.125}} for variant in ("naive", "aligned")},
    )
    found = replace(results(), at_best_temperature=control)
    lines = table(pool([found, found]) if pairs else found).splitlines()
    said = [line.split()[3:] for line in lines if line.startswith("  at best temperature")]
    own, lost = (["0.2500", "(0.2500–0.2500)"], ["0.1250", "(0.1250–0.1250)"]) if pairs else (["0.2500"], ["0.1250"])
    assert [line for line in said if line] == [own, own, lost, lost]
    assert max(map(len, lines)) <= TABLE_WIDTH


def test_table_has_perplexity_of_language_models():
    text = table(results(setup="decoder-text"))
    rows = {line[:15].strip(): line.split()[-1] for line in text.splitlines()}
    assert rows[""] == "perplexity"
    assert rows["network A"] == f"{math.exp(0.1):.4f}"
    assert "perplexity" not in table(results())


def test_read_results_renames_images(tmp_path):
    config = {"setup": "mlp-digits", "train_images": 5, "test_images": None}
    old = {"config": config, "guessing": {"test": {"loss": 1.0, "accuracy": 0.1, "images": 7}}, "unknown": 7}
    write_json(tmp_path / "results.json", old)
    found = read_results(tmp_path / "results.json", Results)
    assert found.config == {"setup": "mlp-digits", "train_examples": 5, "test_examples": None}
    assert found.guessing["test"] == {"loss": 1.0, "accuracy": 0.1, "examples": 7}


def test_results_survive_file(tmp_path):
    results = SweepResults(
        parameter=Parameter("s", "shares", [0.0, 0.5]),
        ends=["A", "B"],
        curves={"naive": {"test": {"loss": [[0.1], [0.2]]}}},
        barriers={"naive": LEVEL},
        models={"A": LEVEL},
        config={"setup": "mlp-digits", "width": 2},
        paper=Paper(0.1, 0.2),
        at_best_temperature=Calibrated({}, {}, {}),
    )
    write_results(tmp_path, results)
    assert read_results(tmp_path / "results.json", SweepResults) == results
    assert json.loads((tmp_path / "results.json").read_text())["parameter"]["values"] == [0.0, 0.5]


@pytest.mark.parametrize("kind", [SweepResults, *(module.EXPERIMENT.results for module in (merge, triangle, width))])
@pytest.mark.parametrize("values", [{}, {"models": 3}, {"barriers": {}, "best": 3, "methods": [1]}])
def test_read_results_rejects_other_layouts(tmp_path, kind, values):
    write_json(tmp_path / "results.json", values)
    with pytest.raises(LayoutError):
        read_results(tmp_path / "results.json", kind)
    assert examine(tmp_path, IDENTITY, kind).why_not.startswith("has an older layout (")


IDENTITY = {"experiment": "linear", "config": {"seed": 0}, "networks": {"A": "x"}, "version": 1}


def test_read_finished_requires_equal_identity(tmp_path, capsys):
    assert read_finished(tmp_path, IDENTITY, Results) is None
    stored = Results(**IDENTITY, seconds=3.5)
    write_results(tmp_path, stored)
    assert read_finished(tmp_path, IDENTITY, Results) == stored
    assert capsys.readouterr().err == ""
    other = IDENTITY | {"networks": {"A": "y"}, "version": 2}
    assert read_finished(tmp_path, other, Results, tell=False) is None
    assert capsys.readouterr().err == ""
    assert read_finished(tmp_path, other, Results) is None
    said = capsys.readouterr().err
    assert said == f"{tmp_path / 'results.json'} was made from other networks, version: measuring again\n"


def test_examine_says_why_results_are_not_reused(tmp_path):
    assert examine(tmp_path, IDENTITY, Results) == Finished("missing", None, "")
    stored = Results(**IDENTITY)
    write_results(tmp_path, stored)
    assert examine(tmp_path, IDENTITY, Results) == Finished("current", stored, "")
    why = "was made from other version"
    assert examine(tmp_path, IDENTITY | {"version": 2}, Results) == Finished("outdated", stored, why)
    (tmp_path / "results.json").write_text("{}")
    assert examine(tmp_path, IDENTITY, Results) == Finished("outdated", None, "is damaged or has no digest")


def flipped(content):
    """Yield the content with one byte changed, for each byte."""
    for at in range(len(content)):
        for change in (0x01, 0x04, 0x80):
            yield content[:at] + bytes([content[at] ^ change]) + content[at + 1 :]


def test_results_with_wrong_byte_are_never_misread(tmp_path, capsys):
    stored = Results(**IDENTITY, guessing={"test": {"loss": 0.125}}, seconds=3.5)
    write_results(tmp_path, stored)
    used, tried = 0, 0
    for content in flipped((tmp_path / "results.json").read_bytes()):
        (tmp_path / "results.json").write_bytes(content)
        found = read_finished(tmp_path, IDENTITY, Results)
        assert found in (None, stored)
        used, tried = used + (found is not None), tried + 1
    assert used < tried / 5  # whitespace may change without effect
    assert capsys.readouterr().err.count("is damaged or has no digest: measuring again\n") == tried - used
