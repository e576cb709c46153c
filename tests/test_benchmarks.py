import importlib.util

import pytest

from benchmarks import derivation, fuzz, matching, recovery, training
from mcomb.matching.core import Matching


@pytest.mark.slow
def test_the_matchers_are_measured_side_by_side_and_reach_one_objective(capsys):
    matching.main(matching.MatchingConfig(setups=("mlp-digits",), widths=(1,), repeats=2))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines[2:5]] == ["reference", "ours", "coarse"]
    assert lines[2].split()[-1] == lines[3].split()[-1]
    assert "3 of 3 permutations are the reference's" in lines[5]


def test_ways_to_train_are_measured_side_by_side(capsys):
    training.main(training.TrainingConfig(setups=("mlp-digits",), widths=(1,), steps=2, rounds=1))
    _, head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["width", "way", "networks", "images/s", "against", "before"]
    ways = ["before", "data-parallel", "side by side", *(["PyTorch"] if importlib.util.find_spec("torch") else [])]
    assert [way for line, way in zip(lines, ways, strict=True) if f" {way} " in line] == ways
    assert lines[0].split()[-1] == "1.00"


def test_derivations_are_timed_by_depth(capsys, monkeypatch):
    monkeypatch.setattr(derivation, "problems", lambda: [("ten steps", derivation.recurrence(10))])
    derivation.main(derivation.DerivationConfig(rounds=1))
    head, line = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["equations", "permutations"]
    assert line.split()[:4] == ["ten", "steps", "52", "1"]


def test_planted_permutations_are_counted(capsys, monkeypatch):
    monkeypatch.setattr(recovery, "kinds", lambda: [("four steps", derivation.recurrence(4))])
    recovery.main(recovery.RecoveryConfig(networks=2, programs=1))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:]] == [["four", "steps", *"22222"], ["random", "programs", *"11111"]]
    monkeypatch.setattr(recovery, "match_weights", lambda spec, a, b, restarts: Matching(spec.identity(), 0.0, ()))
    recovery.main(recovery.RecoveryConfig(networks=2, programs=0))
    assert capsys.readouterr().out.splitlines()[1].split() == ["four", "steps", "2", "0", "0", "0", "2"]


def test_random_programs_are_counted_and_failures_named(capsys, monkeypatch):
    fuzz.main(fuzz.FuzzConfig(programs=2, first=1))
    assert "2  programs\n" in capsys.readouterr().out
    monkeypatch.setattr(fuzz, "TOLERANCE", -1.0)
    fuzz.main(fuzz.FuzzConfig(programs=2, first=1))
    out, err = capsys.readouterr()
    assert "2  unsound\n" in out
    assert "Program(1, 4): the function changes by" in out + err
