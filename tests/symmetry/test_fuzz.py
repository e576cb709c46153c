"""Random programs: a short run of `benchmarks.fuzz`, and that the programs exercise every rule."""

import pytest

from benchmarks.fuzz import check_matching_and_repair, check_program, distance, steps_of
from benchmarks.programs import Program
from mcomb import derive_spec
from mcomb.symmetry import rules

INFINITE, NO_NUMBER = float("inf"), float("nan")
# Seeds of programs that need all rules between them.
COVERING = (4, 11, 12, 103, 110, 142, 188, 245, 304, 335, 591, 644, 695, 745)


@pytest.mark.parametrize(
    ("found", "wanted", "expected"),
    [
        *(([1.0, -2.0], [1.0, -2.0], 0), ([1.0, -2.5], [1.0, -2.0], 0.25), ([0.0], [0.0], 0), ([0.1], [0.0], INFINITE)),
        *(([NO_NUMBER, 1.0], [NO_NUMBER, 2.0], 0.5), ([NO_NUMBER, 1.0], [1.0, 1.0], INFINITE), ([1e-17], [-2e-17], 0)),
        *(([1.0, 1.0], [NO_NUMBER, 1.0], INFINITE), ([INFINITE], [INFINITE], 0), ([INFINITE], [-INFINITE], INFINITE)),
    ],
)
def test_what_is_not_finite_is_no_reason_to_find_outputs_equal(found, wanted, expected):
    assert distance(found, wanted) == expected


@pytest.mark.parametrize("seed", range(6))
def test_no_permutation_changes_a_random_program(seed):
    check_program(Program(seed, steps_of(seed)))


@pytest.mark.parametrize("seed", [5])
def test_random_programs_are_matched_and_repaired_as_they_should_be(seed):
    program = Program(seed, steps_of(seed))
    check_matching_and_repair(program, check_program(program))


def test_random_programs_exercise_every_rule(monkeypatch):
    tables = {"any array": rules.RULES} | {kind.__name__: table for kind, table in rules.SPECIAL_RULES.items()}
    unused = {(kind, rule) for kind, table in tables.items() for rule in table.values()}

    def spy(kind, rule):
        def run(*args):
            unused.discard((kind, rule))
            return rule(*args)

        return run

    for kind, table in tables.items():
        for name, rule in table.items():
            monkeypatch.setitem(table, name, spy(kind, rule))
    for seed in COVERING:
        program = Program(seed, steps_of(seed))
        derive_spec(program, program.params(), program.input)
    assert not unused, "find programs that need these, or write an operation that does"
