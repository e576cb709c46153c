"""Random programs: a short run of `benchmarks.fuzz`."""

import pytest
from programs import Program

from benchmarks.fuzz import check_matching_and_repair, check_program, distance, steps_of

INFINITE, NO_NUMBER = float("inf"), float("nan")


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


@pytest.mark.parametrize("seed", [6])
def test_random_programs_are_matched_and_repaired_as_they_should_be(seed):
    program = Program(seed, steps_of(seed))
    check_matching_and_repair(program, check_program(program))
