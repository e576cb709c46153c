import pytest

from experiments import transitivity


@pytest.mark.slow
def test_transitivity_connects_b_and_c_through_a(results, curve, is_score):
    found = results(transitivity, "--points", "3")
    assert found["curves"].keys() == {"naive", "through A", "direct"}
    assert found["models"].keys() == {"A", "B", "C"}
    assert found["ends"] == ["B", "C"]
    assert found["matchings"].keys() == {"B to A", "C to A", "C to B"}
    for variant in found["curves"]:
        for end, letter in ((0, "B"), (2, "C")):
            assert is_score(curve(found, variant)[end], found["models"][letter], "loss")
    middle = {variant: curve(found, variant)[1, 0] for variant in found["curves"]}
    assert middle["direct"] < middle["naive"]
    assert middle["through A"] < middle["naive"]
    assert middle["through A"] != middle["direct"]


@pytest.mark.slow
def test_transitivity_agreement_is_with_b_and_c(results, curve):
    agreement = curve(results(transitivity, "--points", "3"), "direct", "agreement")[:, 0].sum(-1)
    b_only, c_only, both, neither = agreement[0]
    assert b_only > 0
    assert c_only == neither == 0
    assert agreement[2].tolist() == [0, b_only, both, 0]
