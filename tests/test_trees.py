import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError
from numerics import assert_equal

from mcomb.combination import blend
from mcomb.errors import first_words, list_some, name_error
from mcomb.evaluation.objectives import predict
from mcomb.io.paths import as_path
from mcomb.keys import stream
from mcomb.lab.runs.temperatures import cross_fit
from mcomb.matching.assignment import solve_assignment
from mcomb.merging.merge import partial
from mcomb.runtime.devices import mesh_shape
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
def test_first_words_are_whole_and_on_one_line(said, words):
    assert first_words(ValueError(said)) == words


def test_name_error_shows_type_and_message():
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
def test_from_lists_converts_lists_of_numbers(tree, expected):
    assert_equal(from_lists(tree), expected)


def test_list_some_cuts_long_lists():
    assert list_some("abcd") == "a, b, c, d"
    assert list_some("abcdefghijk") == "a, b, c, d and 7 more"
    assert len(list_some(["long " * 100] * 100)) < 400


@pytest.mark.parametrize(
    "call",
    [
        lambda: blend(stream(0), jnp.zeros(3), {}, {}, {}),
        lambda: predict(jnp.zeros(())),
        lambda: as_path(3),
        lambda: stream("0"),
        lambda: cross_fit([np.zeros(())], [1]),
        lambda: solve_assignment(np.zeros(3)),
        lambda: partial(budget="2"),
        lambda: mesh_shape("1", 2),
    ],
)
def test_types_are_checked_under_pytest(call):
    with pytest.raises(TypeCheckError):
        call()


def test_types_of_numbers_accept_int_for_float():
    assert partial(budget=2).options["budget"] == 2
