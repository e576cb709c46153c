import numpy as np
import pytest
from results import results_of

from experiments import gauge
from mcomb import UserError
from mcomb.lab import cli
from mcomb.lab.runs.run import run

FLAGS = ["--setup", "vit-digits", "--width", "1", "--epochs", "1", "--train-examples", "20", "--test-examples", "20"]
SWEEP = ["--points", "3", "--samples", "1", "--bases", "1", "--basis-steps", "2"]
BASES = ["as trained", "balanced", "learned", "random 1"]


def distance(losses, others):
    return np.abs(losses / others - 1)


@pytest.mark.slow
def test_gauge_keeps_the_line_and_changes_the_cube(tmp_path):
    found = run(gauge.EXPERIMENT, cli.parse(gauge.GaugeConfig, "", [*FLAGS, *SWEEP, "--out", str(tmp_path)]))
    losses = {name: np.array(curve["test"]["loss"])[:, 0] for name, curve in found.curves.items()}
    assert list(losses) == [f"{sweep}, {basis}" for sweep in ("linear", "uniform", "bernoulli") for basis in BASES]
    for basis in BASES[1:]:
        # Rounding changes the losses in float32; another basis changes a mixture by far more.
        rounding = distance(losses[f"linear, {basis}"], losses["linear, as trained"]).max()
        assert rounding < 1e-4
        for sweep, ends, mixture in (("uniform", [0], 2), ("bernoulli", [0, -1], 1)):
            apart = distance(losses[f"{sweep}, {basis}"], losses[f"{sweep}, as trained"])
            assert apart[ends].max() < 1e-4
            assert apart[mixture] > 10 * rounding
    [picture] = tmp_path.rglob("gauge.png")
    assert picture.stat().st_size > 5_000


@pytest.mark.parametrize(("trained", "answer"), [(0.1, True), (0.3, False)])
def test_gauge_answer_compares_random_bases(trained, answer):
    values = {"as trained": trained, "balanced": 0.05, "learned": 0.04, "random 1": 0.2, "random 2": 0.4}
    barriers = {
        f"{sweep}, {basis}": {"test": {"loss": value, "accuracy": value}}
        for sweep in gauge.GAUGE_SWEEPS
        for basis, value in values.items()
    }
    agrees, finding = gauge.judge(results_of(gauge.EXPERIMENT.results, {"barriers": barriers}))
    assert agrees is answer
    assert (
        finding.count(f"{trained:.3f} as trained, 0.050 balanced, 0.040 learned, and 0.200 to 0.400 in random bases")
        == 3
    )


def test_gauge_refuses_networks_without_rotations():
    with pytest.raises(UserError, match=r"--setup mlp-digits has no rotations: use a transformer such as decoder-text"):
        cli.parse(gauge.GaugeConfig, "", ["--setup", "mlp-digits"])
