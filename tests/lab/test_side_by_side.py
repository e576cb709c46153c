import threading

import pytest

from mcomb.lab.side_by_side import run_side_by_side


def test_all_arguments_are_worked_on_at_once():
    together, done = threading.Barrier(4, timeout=30), []

    def work(argument, stop):
        together.wait()
        done.append(argument)

    run_side_by_side(work, range(4))
    assert sorted(done) == list(range(4))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_first_error_stops_the_others_and_is_raised(error):
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


def test_an_interrupt_of_the_main_thread_stops_all(monkeypatch):
    ended = []

    def work(argument, stop):
        assert stop.wait(30)
        ended.append(argument)

    def interrupt(futures):
        raise KeyboardInterrupt

    monkeypatch.setattr("mcomb.lab.side_by_side.wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_side_by_side(work, "xy")
    assert sorted(ended) == ["x", "y"]
