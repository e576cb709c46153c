import numpy as np
import pytest

from experiments import decay, linear
from mcomb.errors import UserError
from mcomb.lab import cli
from mcomb.lab.runs.results import to_json
from mcomb.lab.runs.run import run

FLAGS = ("--setup", "mlp-digits", "--width", "2", "--train-examples", "397", "--points", "3")
RECIPES = ("--decays", "0.002", "--lengths", "6", "3")


@pytest.mark.slow
def test_decay_runs_one_line_per_recipe(out, draws_pairs):
    found = run(decay.EXPERIMENT, cli.parse(decay.DecayConfig, "", [*FLAGS, *RECIPES, "--out", out]))
    assert (found.decays, found.lengths) == ([0.002], [3, 6])
    one = ("--epochs", "6", "--weight-decay", "0.002", "--out", out)
    line = run(linear.EXPERIMENT, cli.parse(linear.LinearConfig, "", [*FLAGS, *one]))
    assert found.level[0][1] == pytest.approx(np.mean([line.models[x]["test"]["accuracy"] for x in "AB"]))
    for variant in ("naive", "aligned"):
        for metric in ("loss", "accuracy"):
            assert found.lost[variant][metric][0][1] == line.barriers[variant]["test"][metric]
    assert found.title.startswith("MLP on digits, width 2: ")
    assert found.agrees is None
    above, below = decay.table(found).split("\n\n")  # too wide for one table
    assert [part.count("\n") for part in (above, below)] == [2, 2]
    assert draws_pairs(decay, to_json(found))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--epochs", "3"), "decay does not accept --epochs 3: use --lengths"),
        (("--weight-decay", "0.1"), r"decay does not accept --weight-decay 0\.1: use --decays"),
        (("--pretrained",), "decay trains its own networks: remove --pretrained"),
    ],
)
def test_decay_rejects_flags_of_one_recipe(flags, words):
    with pytest.raises(UserError, match=words):
        cli.parse(decay.DecayConfig, "", list(flags))
