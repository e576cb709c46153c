"""The flag --repair: the line through two trained networks, with and without REPAIR."""

import json

import jax
import numpy as np
import pytest
from numerics import assert_close, assert_equal

from experiments import linear as line
from experiments import robustness
from experiments.report_page import settings
from mcomb import PermutationSpec
from mcomb.lab import cli
from mcomb.lab.cache.store import Store
from mcomb.lab.flags import command
from mcomb.lab.runs.run import run


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    """Results of the line without and with REPAIR, each from its own folder."""
    out = tmp_path_factory.mktemp("runs")
    small = ["--setup", "mlp-digits", "--width", "8", "--epochs", "20", "--train-examples", "397", "--points", "3"]

    def run_line(*flags):
        config = cli.parse(line.EXPERIMENT.config, "", [*small, *flags, "--out", str(out)])
        run(line.EXPERIMENT, config)
        assert cli.parse(type(config), "", command("linear", config).split()[3:]) == config
        return Store(config).folder("linear")

    plain, fixed = run_line(), run_line("--repair")
    assert fixed.name == "linear,epochs=20,train-examples=397,repair,points=3"
    assert plain != fixed
    return [json.loads((folder / "results.json").read_text()) for folder in (plain, fixed)]


@pytest.mark.slow
def test_repair_removes_most_of_naive_barrier(curves):
    plain, fixed = (np.array(results["curves"]["naive"]["test"]["loss"])[:, 0] for results in curves)
    assert_close(fixed[[0, 2]], plain[[0, 2]], roundings=64)
    assert fixed[1] < 0.65 * plain[1]
    accuracy = [results["curves"]["naive"]["test"]["accuracy"][1][0] for results in curves]
    assert accuracy[1] > accuracy[0] + 0.1


@pytest.mark.slow
def test_repair_is_named_in_title(curves):
    assert [results["config"]["repair"] for results in curves] == [False, True]
    assert ["repair" in settings(results["config"]).split(", ") for results in curves] == [False, True]
    assert "--repair" in curves[1]["command"]
    assert curves[1]["title"].startswith("MLP on digits, width 8, repaired: ")


def test_repair_uses_ends_of_rematched_line():
    rng = np.random.default_rng(0)
    a, b = ({"w": rng.normal(size=(3, 4)), "v": rng.normal(size=(4, 2))} for _ in range(2))
    spec = PermutationSpec.from_axes(a, {"w": (None, "P"), "v": ("P", None)})
    draw, ends = robustness.lines(spec)
    perms = spec.random(jax.random.key(1))
    for share, end in enumerate(ends((0.0, perms), a, b)):
        assert_equal(draw(None, (float(share), perms), a, b), end)
