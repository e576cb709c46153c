import threading
from threading import Event

import pytest

from mcomb.lab.side_by_side import run_side_by_side


def test_each_argument_is_worked_on_once_and_no_place_is_used_twice_at_a_time():
    busy, done, lock = set(), [], threading.Lock()

    def work(argument, place, stop):
        with lock:
            assert place not in busy
            busy.add(place)
        Event().wait(0.01)
        with lock:
            busy.remove(place)
            done.append(argument)

    run_side_by_side(work, range(9), "abc")
    assert sorted(done) == list(range(9))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_first_error_stops_the_others_and_is_raised(error):
    begun, ended = threading.Barrier(2, timeout=30), []

    def work(argument, place, stop):
        if argument > 1:
            ended.append("begun after the error")
        begun.wait()
        if argument == 0:
            raise error("the first")
        assert stop.wait(30)
        ended.append(argument)
        raise RuntimeError("of no interest")

    with pytest.raises(error, match="the first"):
        run_side_by_side(work, range(3), "ab")
    assert ended == [1]


def test_an_interrupt_of_the_main_thread_stops_all(monkeypatch):
    ended = []

    def work(argument, place, stop):
        assert stop.wait(30)
        ended.append(argument)

    def interrupt(futures):
        raise KeyboardInterrupt

    monkeypatch.setattr("mcomb.lab.side_by_side.wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_side_by_side(work, "xy", "ab")
    assert sorted(ended) == ["x", "y"]
