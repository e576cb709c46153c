from benchmarks import matching


def test_the_matchers_are_measured_side_by_side_and_reach_one_objective(capsys):
    matching.main(matching.MatchingConfig(setups=("mlp-digits",), widths=(1,), repeats=2))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines[2:5]] == ["reference", "ours", "coarse"]
    assert lines[2].split()[-1] == lines[3].split()[-1]
    assert "3 of 3 permutations are the reference's" in lines[5]
