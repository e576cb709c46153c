import threading

import pytest

from mcomb.lab.training.side_by_side import Budget, run_side_by_side


def test_side_by_side_runs_all_arguments_at_once():
    together, done = threading.Barrier(4, timeout=30), []

    def work(argument, stop):
        together.wait()
        done.append(argument)

    run_side_by_side(work, range(4))
    assert sorted(done) == list(range(4))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_side_by_side_raises_first_error_and_stops_others(error):
    begun, ended = threading.Barrier(2, timeout=30), []

    def work(argument, stop):
        begun.wait()
        if argument == 0:
            raise error("the first")
        assert stop.wait(30)
        ended.append(argument)
        raise RuntimeError("of no interest")

    with pytest.raises(error, match="the first"):
        run_side_by_side(work, range(2))
    assert ended == [1]


def test_side_by_side_stops_all_after_interrupt(monkeypatch):
    ended = []

    def work(argument, stop):
        assert stop.wait(30)
        ended.append(argument)

    def interrupt(futures):
        raise KeyboardInterrupt

    monkeypatch.setattr("mcomb.lab.training.side_by_side.wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_side_by_side(work, "xy")
    assert sorted(ended) == ["x", "y"]


@pytest.mark.parametrize(("size", "most"), [(10.0, 1), (13.0, 2), (24.0, 4)])
def test_budget_holds_as_many_as_fit(size, most):
    """Four threads need 6 each: as many as fit meet at a barrier, and the others wait."""
    budget, here, counts, waits = Budget(size), [], [], []
    together = threading.Barrier(most, timeout=30)

    def work(argument, stop):
        with budget.reserve(6.0, stop, lambda: waits.append(argument)):
            here.append(argument)
            together.wait()
            counts.append(len(here))
            together.wait()
            here.remove(argument)

    run_side_by_side(work, range(4))
    assert counts == [most] * 4
    assert len(waits) <= 4 - most


def test_budget_stops_waiting_once_all_stop():
    budget, held = Budget(10.0), threading.Event()

    def work(argument, stop):
        if argument == 0:
            with budget.reserve(10.0, stop, held.set):
                assert held.wait(30)
                raise ValueError("the first")
        with budget.reserve(10.0, stop, held.set):
            pass

    with pytest.raises(ValueError, match="the first"):
        run_side_by_side(work, range(2))
