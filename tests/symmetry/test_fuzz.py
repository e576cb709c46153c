"""Random programs: a short run of `benchmarks.fuzz`."""

import pytest
from programs import Program

from benchmarks.fuzz import DecidedByRoundings, check_matching_and_repair, check_program, distance, steps_of

INFINITE, NO_NUMBER = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("found", "wanted", "expected"),
    [
        *(([1.0, -2.0], [1.0, -2.0], 0), ([1.0, -2.5], [1.0, -2.0], 0.25), ([0.0], [0.0], 0), ([0.1], [0.0], INFINITE)),
        *(([NO_NUMBER, 1.0], [NO_NUMBER, 2.0], 0.5), ([NO_NUMBER, 1.0], [1.0, 1.0], INFINITE), ([1e-17], [-2e-17], 0)),
        *(([1.0, 1.0], [NO_NUMBER, 1.0], INFINITE), ([INFINITE], [INFINITE], 0), ([INFINITE], [-INFINITE], INFINITE)),
    ],
)
def test_fuzz_rejects_outputs_that_are_not_finite(found, wanted, expected):
    assert distance(found, wanted) == expected


@pytest.mark.parametrize("seed", range(6))
def test_fuzz_permutations_keep_random_programs(seed):
    check_program(Program(seed, steps_of(seed)))


@pytest.mark.parametrize("seed", [6])
def test_fuzz_matching_and_repair_of_random_programs(seed):
    program = Program(seed, steps_of(seed))
    check_matching_and_repair(program, check_program(program))


@pytest.mark.slow
def test_program_decided_by_roundings_is_told_from_unsound_ones():
    """Rounding errors of the parameters alone lead to the same results as its permutations."""
    with pytest.raises(DecidedByRoundings):
        check_program(Program(4831, steps_of(4831)))
