"""Solve assignment problems: pair units so that the sum of their scores is largest."""

import numpy as np
import scipy  # imports `scipy.optimize`, which is slow, on first use
from jaxtyping import Float, Int

from mcomb.errors import UserError


def solve_assignment(
    scores: Float[np.ndarray, "*batch n n"], prices: Float[np.ndarray, "n"] | float = 0.0
) -> Int[np.ndarray, "*batch n"]:
    """Assign a column to each row so that the sum of the assigned scores is largest, for each entry of the batch.

    solve_assignment(np.array([[1, 5], [4, 9]])) is [0, 1], because 1 + 9 is more than 5 + 4.

    `prices` of the columns are subtracted from their scores. This lowers all assignments equally, so it does not change
    the best one. With prices from `fair_prices`, the solver is faster if the scores have changed little since.
    """
    flat = scores.reshape(-1, *scores.shape[-2:])
    if not np.isfinite(flat).all():
        raise UserError("Cannot compare units with non-finite inner products: scale weights or inputs down.")
    costs = (np.subtract(prices, one, dtype=np.float64) for one in flat)  # the dtype that scipy needs no copy of
    return np.stack([scipy.optimize.linear_sum_assignment(one)[1] for one in costs]).reshape(scores.shape[:-1])


def fair_prices(
    scores: Float[np.ndarray, "n n"], assigned: Int[np.ndarray, "n"], prices: Float[np.ndarray, "n"] | float = 0.0
) -> Float[np.ndarray, "n"]:
    """Return prices of the columns at which few rows would prefer another column to their assigned one.

    Starting from `prices`, each pass raises the price of a column to its value for the row that would gain most from
    it. Repeated until convergence, this would solve the dual problem. Two passes are enough for `solve_assignment`.
    """
    own, fair = scores[np.arange(len(scores)), assigned], np.broadcast_to(np.float64(prices), len(scores))
    for _ in range(2):
        fair = (scores + (fair[assigned] - own)[:, None]).max(axis=0)
    return fair
