import importlib.util
import json

import numpy as np
import pytest

import benchmarks.__main__ as together
from benchmarks import (
    derivation,
    evaluation,
    fuzz,
    growth,
    main_job,
    matching,
    memory,
    precision,
    recovery,
    training,
)
from mcomb.errors import UserError
from mcomb.matching.matching import Matching

pytestmark = pytest.mark.slow


def rows_in(path):
    return json.loads(path.read_text())["rows"]


def test_benchmark_matching_compares_matchers(capsys, tmp_path):
    path = tmp_path / "matching.json"
    matching.main(matching.MatchingConfig(setups=("mlp-digits",), widths=(1,), repeats=2, json=path))
    assert [(row["matcher"], len(row["seconds"])) for row in rows_in(path)] == [
        ("reference", 2),
        ("ours", 2),
        ("coarse", 2),
    ]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines[2:5]] == ["reference", "ours", "coarse"]
    assert lines[2].split()[-1] == lines[3].split()[-1]
    assert "3 of 3 permutations are the reference's" in lines[5]


def test_benchmark_training_compares_ways(capsys):
    training.main(training.TrainingSpeedConfig(setups=("mlp-digits",), widths=(1,), steps=2, rounds=1))
    _, head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["width", "way", "networks", "examples/s", "against", "before", "CPU", "s/step"]
    ways = ["before", "data-parallel", "side by side", *(["PyTorch"] if importlib.util.find_spec("torch") else [])]
    assert [way for line, way in zip(lines, ways, strict=True) if f" {way} " in line] == ways
    assert lines[0].split()[-2] == "1.00"


def test_benchmark_derivation_times_by_depth(capsys, monkeypatch):
    monkeypatch.setattr(derivation, "problems", lambda: [("ten steps", derivation.recurrence(10))])
    derivation.main(derivation.DerivationConfig(rounds=1))
    head, line = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["equations", "permutations"]
    assert line.split()[:4] == ["ten", "steps", "52", "1"]


def test_benchmark_recovery_counts_planted_permutations(capsys, monkeypatch):
    monkeypatch.setattr(recovery, "kinds", lambda: [("four steps", derivation.recurrence(4))])
    recovery.main(recovery.RecoveryConfig(networks=2, programs=1))
    networks, programs = (line.split() for line in capsys.readouterr().out.splitlines()[1:])
    assert networks == ["four", "steps", *"22222"]
    assert programs[:3] == ["random", "programs", "1"]
    assert programs[4:] == ["1", "1", "1"]  # this one may need a second descent
    monkeypatch.setattr(recovery, "match_weights", lambda spec, a, b, restarts: Matching(spec.identity(), 0.0, ()))
    recovery.main(recovery.RecoveryConfig(networks=2, programs=0))
    assert capsys.readouterr().out.splitlines()[1].split() == ["four", "steps", "2", "0", "0", "0", "2"]


def test_benchmark_fuzz_counts_programs_and_names_failures(capsys, monkeypatch):
    fuzz.main(fuzz.FuzzConfig(programs=2, first=1))
    assert "2  programs\n" in capsys.readouterr().out
    monkeypatch.setattr(fuzz, "FUZZ_TOLERANCE", -1.0)
    fuzz.main(fuzz.FuzzConfig(programs=2, first=1))
    out, err = capsys.readouterr()
    assert "2  unsound\n" in out
    assert "Program(1, 4): the function changes by" in out + err


def test_benchmark_evaluation_compares_ways(capsys, tmp_path):
    path = tmp_path / "evaluation.json"
    chosen = {"networks": ("mlp-digits:8",), "combinations": 2, "gigaflop": 1, "rounds": 1}
    evaluation.main(evaluation.EvaluationConfig(**chosen, json=path))
    rows = rows_in(path)
    ways = ["evaluate", "loop, batches of 200", "loop, batches of 1,000"]
    assert [row["way"] for row in rows][:3] == ways
    assert max(row["against the loop"] for row in rows[1:3]) == 1
    for row in rows:
        assert row["GFLOP/s"] / row["of the peak"] == pytest.approx(rows[0]["GFLOP/s"] / rows[0]["of the peak"])


@pytest.mark.parametrize("name", ["mlp-digits", "mlp-digits:²", "mlp-digits:0", "mlp-digits:100001", "other:1"])
def test_benchmark_evaluation_rejects_unknown_network(name):
    with pytest.raises(UserError, match=r"is not a setup with a width: pass|Width 100001 exceeds"):
        evaluation.main(evaluation.EvaluationConfig(networks=(name,)))


def test_benchmark_growth_has_points_and_slopes(capsys, tmp_path):
    few = {"combinations": (8,), "images": (400,), "devices": (1,)}
    growth.main(growth.GrowthConfig("mlp-digits", widths=(1, 4), **few, out=tmp_path))
    rows = rows_in(tmp_path / "growth.json")
    assert [row["series"] for row in rows] == ["width", "width", "combinations", "images", "devices"]
    assert [row["parameters"] for row in rows[:2]] == [64 * n + 2 * n**2 + 3 * n + 10 * (n + 1) for n in (16, 64)]
    assert all(row["seconds"] > 0 for row in rows)
    assert "megabytes grow as parameters^" in capsys.readouterr().out
    assert (tmp_path / "growth.png").is_file()
    sizes = np.array([1.0, 2, 5])
    assert growth.slope(sizes, 3 * sizes**1.5) == pytest.approx(1.5)


def test_benchmark_memory_measures_first_and_all_calls(capsys, tmp_path):
    path = tmp_path / "memory.json"
    few = {"devices": (1,), "combinations": 2, "images": 20}
    memory.main(memory.MemoryConfig(("evaluation",), "mlp-digits", widths=(64,), **few, json=path))
    rows = rows_in(path)
    assert [row["task"] for row in rows] == ["two networks", "evaluation, 1 of 2", "evaluation, 2 of 2"]
    # The peak never falls, and two networks are there all the time. Linux counts pages with a small error.
    peaks = [row["× parameters"] for row in rows]
    assert 2 <= peaks[0] <= 1.01 * peaks[1] <= 1.01**2 * peaks[2]


def test_benchmark_precision_measures_both_dtypes(capsys, tmp_path):
    path = tmp_path / "precision.json"
    few = {"width": 1, "epochs": 1, "points": 3, "samples": 2, "images": 100}
    precision.main(precision.PrecisionConfig(**few, out=tmp_path, json=path))
    rows = rows_in(path)
    assert len(rows) == 8
    for row in rows:
        assert row["barrier, bfloat16"] - row["barrier, float32"] == pytest.approx(row["change"])
        assert abs(row["change"]) <= row["of any combination"] + row["of A and B"] + 1e-9
    assert 0 < max(row["of any combination"] for row in rows if row["metric"] == "loss") < 0.1


def test_benchmark_main_job_times_each_part(capsys, tmp_path):
    path = tmp_path / "main_job.json"
    main_job.main(main_job.MainJobConfig(width=1, epochs=1, json=path))
    seconds = {row[""]: row["seconds"] for row in rows_in(path)}
    assert list(seconds)[:3] == ["training", "matching", "evaluation"]
    assert sum(list(seconds.values())[:4]) == pytest.approx(seconds["in all"])
    assert 0 < seconds["to the first bar"] < seconds["in all"]
    assert 0 < seconds["to the first bar, CPU"] < seconds["in all, CPU"]


def test_benchmarks_write_tables_to_one_folder(capsys, monkeypatch, tmp_path):
    left = []
    for module in (evaluation, growth, main_job, matching, memory, precision):
        monkeypatch.setattr(module, "main", left.append)  # together they take ten minutes
    together.main(together.AllConfig(out=tmp_path / "new"))
    assert len(left) == len(together.BENCHMARKS) + 1  # matching has two tables
    assert {config.json.parent for config in left if hasattr(config, "json")} == {tmp_path / "new"}
    assert [config.out for config in left if isinstance(config, growth.GrowthConfig)] == [tmp_path / "new"]
