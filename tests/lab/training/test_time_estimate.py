from mcomb.lab.training import time_estimate
from mcomb.runtime.devices import device_mesh


def test_time_estimate_announces_a_long_training(monkeypatch, capsys):
    mesh = device_mesh()
    monkeypatch.setattr(time_estimate, "matrix_rate", lambda mesh: 1e12)
    time_estimate.say_if_long(3e15, mesh, "training seed-0")
    assert capsys.readouterr().err == ""
    time_estimate.say_if_long(1e18, mesh, "training seed-0")
    assert "training seed-0 takes 12 days or more on" in capsys.readouterr().err
