import numpy as np
import pytest

from experiments import functional


@pytest.mark.slow
def test_functional_counts_labels_of_five_sweeps(results, draws_pairs):
    found = results(functional, "--points", "3", "--samples", "2")
    assert draws_pairs(functional, found)
    assert list(found["sweeps"]) == ["bernoulli", "subcube", "hyperplane", "uniform", "linear"]
    for sweep in found["sweeps"].values():
        counts = np.array(sweep["counts"])
        assert counts.shape[2:] == (4, 2)
        assert (counts.sum((2, 3)) == 397).all()
    ends = np.array(found["sweeps"]["linear"]["counts"])
    a_only, b_only, both, neither = ends[0, 0].sum(1)
    assert b_only == neither == 0
    assert found["differing"] == a_only > 0
    assert found["labels"] == 397
    assert ends[2, 0].sum(1).tolist() == [0, a_only, both, 0]
    assert found["parts"].keys() == found["sweeps"].keys()
    assert f"{a_only} of 397 test examples" in found["finding"]
