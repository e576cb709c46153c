import dataclasses
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import __main__ as listing
from experiments import linear, matchers, triangle, width
from mcomb.errors import UserError
from mcomb.lab import cli
from mcomb.lab.flags import Config, SweepConfig, command, convert_config, identity_flags, recipe, recipe_dict
from mcomb.lab.runs.plan import list_jobs
from mcomb.lab.runs.run import run
from mcomb.lab.setups import SETUPS

CONFIGS = [SweepConfig]
CONFIGS += [module.EXPERIMENT.config for module in (linear, matchers, triangle, width)]


def parsed(kind, line):
    words = shlex.split(line)
    assert words[:3] == ["python", "-m", "experiments.name"]
    return cli.parse(kind, "", words[3:])


def test_command_lists_only_changed_flags():
    words = "--setup mlp-digits --width 3 --learning-rate 0.05 --matcher ste --points 5 --range -1.0 2.0"
    config = cli.parse(linear.LinearConfig, "", words.split())
    assert config.learning_rate == 0.05
    assert command("linear", config) == f"python -m experiments.linear {words}"
    assert command("linear", linear.LinearConfig()) == "python -m experiments.linear"
    assert command("linear", dataclasses.replace(linear.LinearConfig(), repair=True)).endswith("linear --repair")


def test_config_has_every_flag_that_the_lab_reads():
    config = Config()
    plain = (config.repair, config.temperatures, config.samples, config.range, config.split)
    assert plain == (False, False, 1, None, None)
    assert not {"repair", "temperatures", "samples", "range", "split"} & {*cli.flags(Config)}
    line = linear.LinearConfig(range=(-1.0, 2.0), temperatures=True)
    assert (line.range, line.temperatures, line.samples) == ((-1.0, 2.0), True, 1)


VALUES = {
    "setup": st.sampled_from(list(SETUPS)),
    "matcher": st.sampled_from(["weights", "activations", "ste"]),
    "train_images": st.none() | st.integers(1, 10**6),
    "seed": st.integers(0, 10**9),
    "seed_b": st.none() | st.integers(0, 10**9),
    "checkpoint_a": st.none() | st.sampled_from([Path("a b/c"), Path("it's/x,y=1"), Path("ü")]),
    "epochs": st.none() | st.integers(0, 1000),
    "learning_rate": st.none() | st.floats(0, 1e3),
    "weight_decay": st.none() | st.floats(0, 1e3),
    "out": st.sampled_from([Path("runs"), Path("/tmp/my runs")]),
    "repair": st.booleans(),
    "points": st.integers(2, 99),
    "samples": st.integers(1, 99),
    "widths": st.lists(st.integers(1, 64), min_size=1).map(tuple),
    "beyond": st.floats(0, 10),
    "range": st.tuples(st.integers(-99, 0).map(lambda k: k / 8), st.floats(1, 10)),
}


@pytest.mark.parametrize("kind", CONFIGS)
@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_command_roundtrips_through_parse(kind, data):
    names = sorted(VALUES.keys() & {field.name for field in dataclasses.fields(kind)})
    config = kind(**{name: data.draw(VALUES[name], label=name) for name in names})
    assert parsed(kind, command("name", config)) == config


def every_flag():
    """Yield each flag once with an experiment that has it; the default tests use every third."""
    found = {}
    for module in listing.EXPERIMENTS:
        for name, flag in cli.flags(module.EXPERIMENT.config).items():
            found.setdefault((name, flag.help), (module.EXPERIMENT, name))
    return [
        pytest.param(*own, id=f"{own[0].name}-{own[1]}", marks=pytest.mark.slow if i % 3 else ())
        for i, own in enumerate(found.values())
    ]


@pytest.mark.parametrize(("experiment", "name"), every_flag())
def test_flags_are_accepted_or_rejected_in_one_sentence(experiment, name, tmp_path):
    problems = []
    for value in ("1e300", "1" + "0" * 30, "1e-320", "", "text", "²", "nan"):
        flag = f"--{name.replace('_', '-')}"
        try:
            words = ["--setup", "mlp-digits", "--width", "1", "--out", str(tmp_path), f"{flag}={value}"]
            list(list_jobs(experiment, cli.parse(experiment.config, "", words)))
        except UserError as error:
            problems.append(str(error))
    assert all(20 < len(problem) < 600 and "\n" not in problem for problem in problems)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("experiment", "flags", "problem"),
    [
        (linear, "--width 100001", r"--width: 100001 is more than 100000"),
        (width, "--widths 1 100001", r"--widths: 100001 is more than 100000"),
        (linear, "--points 10000000", r"20,000,000 combinations exceed the limit of 10,000,000: reduce .*points"),
        (matchers, "--points 9000 --samples 9000", r"combinations exceed .*: reduce .*--points, --samples"),
        (triangle, "--beyond 999 --grid 20", r"combinations exceed .*: reduce .*--grid, --beyond"),
        (linear, "--seed 4294967296", r"--seed: 4294967296 is more than 1431655764"),
        (linear, "--seed-a 4294967296", r"--seed-a: 4294967296 is more than 4294967295"),
        (linear, "--pairs 1001", r"--pairs: 1001 is more than 1000"),
    ],
)
def test_flags_too_large_are_rejected_before_any_output(experiment, flags, problem, tmp_path):
    words = ["--setup", "mlp-digits", "--out", str(tmp_path), *flags.split()]
    for work in (run, lambda *job: list(list_jobs(*job))):
        with pytest.raises(UserError, match=problem):
            work(experiment.EXPERIMENT, cli.parse(experiment.EXPERIMENT.config, "", words))
    assert not any(tmp_path.iterdir())


def test_convert_config_keeps_common_flags():
    config = width.WidthConfig(setup="mlp-digits", width=3, points=7, samples=2, widths=(1, 2), out=Path("x"))
    line = convert_config(config, linear.LinearConfig, range=(-1.0, 2.0))
    assert line == linear.LinearConfig(setup="mlp-digits", width=3, points=7, out=Path("x"), range=(-1.0, 2.0))
    assert convert_config(line, SweepConfig, width=5).width == 5


def test_matchers_has_no_matcher_flag():
    with pytest.raises(UserError, match="--matcher"):
        cli.parse(matchers.EXPERIMENT.config, "", ["--matcher", "ste"])
    assert "matcher" not in identity_flags(matchers.MatchersConfig())


@pytest.mark.parametrize("kind", CONFIGS)
def test_identity_flags_omit_only_flags_without_effect(kind):
    left_out = {field.name for field in dataclasses.fields(kind)} - set(identity_flags(kind()))
    how = {"checkpoint_every", "data_dir", "out", "steps_per_call", "vmap_size", "plan"}
    assert left_out == how | {"distributed", "coordinator", "processes", "process", "quiet", "json"}


def test_recipe_is_setup_recipe_with_changed_flags():
    usual = SETUPS["mlp-digits"].recipe
    assert recipe(Config(setup="mlp-digits")) == usual
    changed = recipe(Config(setup="mlp-digits", epochs=0, learning_rate=0.0, checkpoint_every=3))
    assert changed == dataclasses.replace(usual, epochs=0, learning_rate=0.0, checkpoint_every=3)


def test_recipe_dict_omits_checkpoint_interval():
    often, seldom = (recipe_dict(Config(setup="mlp-digits", checkpoint_every=epochs)) for epochs in (1, 50))
    assert often == seldom
    assert often != recipe_dict(Config(setup="mlp-digits", epochs=3))
    assert often.keys() | {"checkpoint_every"} == {field.name for field in dataclasses.fields(recipe(Config()))}


@pytest.mark.parametrize("ends", ["0.25 1", "0 0.5", "0.25 0.5"])
def test_linear_range_must_contain_ends(ends):
    with pytest.raises(UserError, match=rf"--range {ends} must contain \[0, 1\]"):
        cli.parse(linear.LinearConfig, "", ["--range", *ends.split()])


def test_parse_accepts_negative_numbers_with_exponent():
    config = linear.LinearConfig(range=(-1e-05, 1.0))
    assert parsed(linear.LinearConfig, command("name", config)) == config


def test_command_omits_output_flags():
    assert command("uniform", Config(width=2, quiet=True, json=True)) == "python -m experiments.uniform --width 2"


def test_command_omits_process_flags():
    by_hand = Config(width=2, coordinator="localhost:9911", processes=2, process=0)
    for config in (by_hand, Config(width=2, distributed=True)):
        assert command("uniform", config) == "python -m experiments.uniform --width 2"
