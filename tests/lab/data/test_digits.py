import numpy as np
from pixels import statistics

from mcomb.lab.data.digits import DIGITS, load_digits


def test_digits_are_deterministic(digits):
    again = load_digits()
    assert digits.train.inputs.shape == (1400, 8, 8, 1)
    assert digits.test.inputs.shape == (397, 8, 8, 1)
    assert digits.train.inputs.dtype == np.uint8
    assert digits.train.inputs.max() == 16
    assert set(digits.test.labels) == set(range(10))
    np.testing.assert_array_equal(digits.test.inputs, again.test.inputs)


def test_digits_equal_scikit_learn(digits):
    from sklearn.datasets import load_digits

    theirs = load_digits()
    order = np.random.RandomState(0).permutation(len(theirs.target))
    for ours, expected in zip(zip(*digits, strict=True), (theirs.images[..., None], theirs.target), strict=True):
        np.testing.assert_array_equal(np.concatenate(ours), expected[order])


def test_digits_splits_are_disjoint(digits):
    rows = {row.tobytes() for row in digits.train.inputs}
    assert not any(row.tobytes() in rows for row in digits.test.inputs)


def test_digits_constants_equal_loaded_data(digits):
    assert DIGITS.shape == digits.train.inputs.shape[1:] == digits.test.inputs.shape[1:]
    assert DIGITS.classes == len(set(digits.train.labels)) == 1 + max(digits.train.labels)
    mean, std = statistics(digits.train.inputs)
    rounding = 8 * np.finfo(float).eps * (1 + float(mean[0] / std[0]) ** 2)  # the variance is a difference of squares
    np.testing.assert_allclose(DIGITS.mean, mean, rtol=rounding)
    np.testing.assert_allclose(DIGITS.std, std, rtol=rounding)


def test_first_returns_first_images_or_all(digits):
    np.testing.assert_array_equal(digits.test.first(5).inputs, digits.test.inputs[:5])
    np.testing.assert_array_equal(digits.test.first(5).labels, digits.test.labels[:5])
    assert len(digits.test.first(None).labels) == 397
