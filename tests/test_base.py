import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError
from numerics import assert_equal

from mcomb.base import first_words, from_lists, list_some, name_error
from mcomb.objectives import classify


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("a  short\n one", "a short one"),
        ("word " * 30, "word " * 29 + "word"),
        ("word " * 31, "word " * 29 + "word…"),
        ("longer " * 30, "longer " * 20 + "longer…"),
        ("x" * 200, "x" * 150 + "…"),
        ("", "ValueError"),
    ],
)
def test_the_first_words_of_an_error_are_whole_and_on_one_line(said, words):
    assert first_words(ValueError(said)) == words


def test_an_error_of_few_words_is_named_by_its_type():
    assert name_error(KeyError("nope")) == "KeyError: 'nope'"
    assert name_error(AssertionError()) == "AssertionError"


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ([1, 2], np.array([1, 2])),
        ({"a": ((1, 2.5), [3, 4])}, {"a": np.array([[1, 2.5], [3, 4]])}),
        ([np.zeros(2), [1]], [np.zeros(2), np.array([1])]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ((), ()),
        (3, 3),
    ],
    ids=str,
)
def test_lists_of_numbers_become_arrays(tree, expected):
    assert_equal(from_lists(tree), expected)


def test_long_lists_of_names_are_cut_short():
    assert list_some("abcd") == "a, b, c, d"
    assert list_some("abcdefghijk") == "a, b, c, d and 7 more"
    assert len(list_some(["long " * 100] * 100)) < 400


def test_shapes_of_arrays_are_checked_under_pytest():
    with pytest.raises(TypeCheckError):
        classify(jnp.zeros((2, 3)), jnp.zeros(4, jnp.int32))
