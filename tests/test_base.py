import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from mcomb.base import first_words, name_error
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
