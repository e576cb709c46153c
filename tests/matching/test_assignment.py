import itertools

import numpy as np
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import EPS

from mcomb.matching.assignment import fair_prices, solve_assignment


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3))
def test_solve_assignment_solves_each_of_batch(seed, batch):
    scores = np.random.default_rng(seed).standard_normal((batch, 2, 4, 4))
    found = solve_assignment(scores)
    for index in np.ndindex(batch, 2):
        best = max(
            itertools.permutations(range(4)), key=lambda order, index=index: scores[index][range(4), order].sum()
        )
        assert found[index].tolist() == list(best)


def random_scores(rng, kind, n):
    """Return scores that are random, tied, equal, hard for solvers, or of very different sizes."""
    normal = rng.standard_normal((n, n))
    scores = {
        "normal": normal,
        "ties": rng.integers(0, 3, (n, n)),
        "equal": np.ones((n, n)),
        "products": np.outer(np.arange(n), np.arange(n)),
        "range": normal * 10.0 ** rng.integers(-6, 6, (n, 1)),
    }
    return scores[kind].astype(np.float32)


KINDS = st.sampled_from(["normal", "ties", "equal", "products", "range"])


@settings(max_examples=50, deadline=None)
@given(st.lists(KINDS, min_size=1, max_size=5), st.integers(1, 40), st.integers(0, 2**32), st.floats(0, 100))
def test_solve_assignment_prices_change_no_optimum(kinds, n, seed, first_price):
    """Problems that start from the previous prices have the optima that scipy finds without prices."""
    rng = np.random.default_rng(seed)
    prices = first_price * rng.standard_normal(n)
    for kind in kinds:
        scores = random_scores(rng, kind, n)
        found, rows = solve_assignment(scores, prices), np.arange(n)
        assert sorted(found) == list(rows)
        best = scores[scipy.optimize.linear_sum_assignment(scores, maximize=True)].sum(dtype=np.float64)
        largest = max(np.abs(scores).max(), np.abs(prices).max())
        roundings = 8 * n * np.finfo(np.float64).eps * n * largest
        assert abs(scores[rows, found].sum(dtype=np.float64) - best) <= roundings
        prices = fair_prices(scores, found, prices)
        assert np.isfinite(prices).all()


def test_fair_prices_leave_fewer_rows_dissatisfied():
    scores = np.random.default_rng(0).standard_normal((60, 60)).astype(np.float32)
    assigned = solve_assignment(scores)

    def envious(prices):
        gains = scores - prices
        return (gains.max(1) > gains[np.arange(60), assigned] + EPS).sum()

    assert 0 < envious(fair_prices(scores, assigned)) < envious(0.0)
    fair = np.zeros(60)
    for _ in range(30):  # no path from one column to another by way of the rows is longer than 60
        fair = fair_prices(scores, assigned, fair)
    assert envious(fair) == 0  # they are the solution of the dual problem
