import json

import jax.numpy as jnp
import pytest

from mcomb.base import UserError
from mcomb.lab.results import Rows, atomic, barrier, barriers, fingerprint, environment, table, writable


def test_barriers_compare_the_worst_sample_with_the_mean_of_the_ends():
    assert barrier("loss", [[0.5, 0.9], [0.7, 0.6]], 0.2, 0.4) == pytest.approx(0.9 - 0.3)
    assert barrier("accuracy", [[0.5, 0.9], [0.7, 0.6]], 0.8, 1.0) == pytest.approx(0.9 - 0.5)


def results():
    models = {m: {s: {"loss": 0.1, "accuracy": 0.9} for s in ("train", "test")} for m in "AB"}
    curve = {s: {"loss": [[0.2], [0.3]], "accuracy": [[0.8], [0.7]]} for s in ("train", "test")}
    curves = {"naive": curve, "aligned": curve}
    return {"models": models, "curves": curves, "barriers": barriers(models, curves), "paper": None}


def test_every_curve_has_barriers():
    found = results()["barriers"]
    assert found.keys() == {"naive", "aligned"}
    assert found["naive"]["test"] == {"loss": pytest.approx(0.2), "accuracy": pytest.approx(0.2)}


def test_the_table_has_the_papers_numbers_where_there_are_some():
    assert "paper" not in table(results())
    text = table(results() | {"paper": {"loss": 0.044, "accuracy": 0.012}})
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
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write to .*file/runs .*: give another --out"):
        writable(tmp_path / "file" / "runs")


def row(name, loss=0.5):
    return {"of": name, "loss": loss}


def test_rows_outlive_the_process(tmp_path):
    Rows(tmp_path, {"seed": 0}).add([row("a"), row("b")])
    again = Rows(tmp_path, {"seed": 0})
    assert "a" in again
    assert again["b"]["loss"] == 0.5
    assert "c" not in again


def test_rows_of_another_run_are_dropped(tmp_path):
    Rows(tmp_path, {"seed": 0}).add([row("a")])
    assert "a" not in Rows(tmp_path, {"seed": 1})


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_a_torn_last_row_is_forgotten_and_the_file_stays_readable(tmp_path, cut):
    Rows(tmp_path, {}).add([row("a"), row("b")])
    path = tmp_path / "samples.jsonl"
    path.write_text(path.read_text()[:-cut])
    rows = Rows(tmp_path, {})
    assert "a" in rows
    if "b" not in rows:
        rows.add([row("b")])
    assert [json.loads(line).get("of") for line in path.read_text().splitlines()] == [None, "a", "b"]


def test_digests_tell_networks_apart():
    a = {"x": jnp.arange(4.0), "y": jnp.ones(2)}
    assert fingerprint(a) == fingerprint({"x": jnp.arange(4.0), "y": jnp.ones(2)})
    assert fingerprint(a) != fingerprint({"x": jnp.arange(4.0), "y": jnp.zeros(2)})
    assert fingerprint(a) != fingerprint({"x": jnp.arange(4.0), "z": jnp.ones(2)})


def test_the_environment_says_what_a_result_depends_on():
    found = environment()
    assert found["packages"]["jax"]
    assert found["devices"] == ["cpu:cpu", "cpu:cpu"]
    json.dumps(found)
