import time

from mcomb.lab.cache.durations import Durations


def test_durations_of_one_kind_add_up():
    durations = Durations()
    for _ in range(2):
        with durations.timed("sleeping"):
            time.sleep(0.01)
    first = durations.seconds["sleeping"]
    assert first >= 0.02
    with durations.timed("sleeping"):
        pass
    assert durations.seconds["sleeping"] >= first
