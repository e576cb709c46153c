import numpy as np

from experiments import schematic


def test_schematic_shows_shares_of_distributions(results):
    found = results(schematic)
    panels = found["panels"]
    shares = {name: np.concatenate([np.ravel(v) for v in panel["shares"].values()]) for name, panel in panels.items()}
    assert (shares["blue network"] == 0).all()
    assert (shares["orange network"] == 1).all()
    assert set(shares["Bernoulli"]) == {0, 1}
    assert 0.1 < shares["uniform"].std() < 0.4
    assert [np.mean(layer) for layer in panels["stitching"]["shares"].values()] == [1, 0, 0]
    assert "networks" not in found
    assert found["agrees"] is None
