import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mcomb.lab.data.splits import PARTITIONS, Subset

LABELS = np.random.default_rng(0).integers(0, 10, 1000).astype(np.int32)
SUBSETS = st.builds(
    Subset, st.sampled_from(PARTITIONS), st.floats(0.05, 1), st.integers(1, 900), st.integers(0, 99), st.just("A")
)


def rows(subset, who):
    return subset._replace(who=who).rows(LABELS).tolist()


@given(SUBSETS)
def test_splits_partition_examples(subset):
    a, b, withheld = (rows(subset, who) for who in ("A", "B", "withheld"))
    assert len(withheld) == subset.withheld
    assert sorted({*a, *b} | {*withheld}) == list(range(1000))
    assert not {*a, *b} & {*withheld}
    assert ({*a} == {*b}) if subset.split == "none" else not {*a} & {*b}
    assert len(a) == len({*a})


@given(SUBSETS)
def test_splits_depend_only_on_seed(subset):
    assert rows(subset, "A") == rows(subset, "A")
    assert rows(subset, "withheld") != rows(subset._replace(seed=subset.seed + 100), "withheld") or subset.withheld < 3


def test_biased_split_has_requested_fractions():
    subset = Subset("biased", 0.8, 200, 3, "A")
    a, b = (np.bincount(LABELS[rows(subset, who)], minlength=10) for who in "AB")
    parts = np.sort(a / (a + b))
    half_an_image = 0.5 / (a + b).min()
    assert np.allclose(parts, np.repeat([0.2, 0.8], 5), atol=half_an_image)
    assert subset.expected_count(1000) == 400


def test_dirichlet_split_spreads_with_concentration():
    def spread(concentration):
        subset = Subset("dirichlet", concentration, 200, 0, "A")
        a, b = (np.bincount(LABELS[rows(subset, who)], minlength=10) for who in "AB")
        return np.std(a / (a + b))

    assert spread(100.0) < 0.1  # 0.035 for the beta distribution
    assert spread(0.1) > 0.25  # 0.46
