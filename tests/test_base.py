import zlib

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from mcomb.base import first_words, fold_name, fold_names, name_error, named_leaves
from mcomb.lab.setups import SETUPS
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
