import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError
from numerics import assert_equal

from mcomb.errors import first_words, list_some, name_error
from mcomb.evaluation.objectives import classify
from mcomb.trees import from_lists


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


def test_every_name_of_many_has_a_key_of_its_own():
    names = ["b", "plumless", "a", "buckeroo"]
    key = jax.random.key(0)
    keys = fold_names(key, names)
    assert {*keys} == {*names}
    data = {name: tuple(jax.random.key_data(own).tolist()) for name, own in keys.items()}
    assert len({*data.values()}) == len(names)
    alone = {name: tuple(jax.random.key_data(fold_name(key, name)).tolist()) for name in names}
    assert alone["buckeroo"] == alone["plumless"]
    assert {name for name in names if data[name] != alone[name]} == {"plumless"}
    assert fold_names(key, names[::-1]).keys() == keys.keys()
    assert fold_names(key, names[::-1])["plumless"] == keys["plumless"]


@pytest.mark.parametrize("name", SETUPS)
def test_no_two_weights_of_a_setup_share_a_hash(name):
    """Experiments fold keys by the name of a weight alone."""
    weights, perms = named_leaves(SETUPS[name].shapes(1)), SETUPS[name].spec(1).sizes
    for names in (weights, perms):
        assert len({zlib.crc32(own.encode()) for own in names}) == len(names)
