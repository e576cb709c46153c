import dataclasses
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import __main__ as listing
from experiments import linear, matchers, triangle, width
from experiments.landscape import LandscapeConfig
from experiments.report import ReportConfig
from mcomb.errors import UserError
from mcomb.lab import cli
from mcomb.lab.cache.store import Store
from mcomb.lab.flags import (
    Config,
    SweepConfig,
    command,
    convert_config,
    identity_flags,
    parse_flags,
    recipe,
    recipe_dict,
)
from mcomb.lab.runs.plan import list_jobs
from mcomb.lab.runs.reuse import flags_identity
from mcomb.lab.runs.run import run
from mcomb.lab.setups import SETUPS, residual_stream
from mcomb.symmetry.spec import PermutationSpec

CONFIGS = [SweepConfig]
CONFIGS += [module.EXPERIMENT.config for module in (linear, matchers, triangle, width)]


def parsed(kind, line):
    words = shlex.split(line)
    assert words[:3] == ["python", "-m", "experiments.name"]
    return parse_flags(kind, "", words[3:])


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
    "train_examples": st.none() | st.integers(1, 10**6),
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
    for module in listing.LISTED_EXPERIMENTS:
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
    later = {"algorithm", "stages"}  # only if they differ from the defaults
    assert often.keys() | {"checkpoint_every"} | later == {field.name for field in dataclasses.fields(recipe(Config()))}
    assert "algorithm" in recipe_dict(Config(setup="vit-digits"))
    assert "stages" in recipe_dict(Config(setup="tiny10-cifar10-short"))


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


def test_flags_accept_old_names_of_examples(capsys):
    found = cli.parse(Config, "", ["--setup", "mlp-digits", "--train-images", "50", "--test-images", "60"])
    assert (found.train_examples, found.test_examples) == (50, 60)
    assert found == cli.parse(Config, "", ["--setup", "mlp-digits", "--train-examples", "50", "--test-examples", "60"])
    with pytest.raises(SystemExit):
        cli.parse(Config, "", ["--help"])
    assert "images" not in capsys.readouterr().out


def test_all_examples_can_be_asked_for():
    few = parse_flags(Config, "", ["--setup", "decoder-text"])
    every = parse_flags(Config, "", ["--setup", "decoder-text", "--train-examples", "all"])
    assert (few.train_examples, every.train_examples) == (200, None)
    assert command("linear", every).endswith("--train-examples all")


def test_setup_flag_accepts_variants():
    found = parse_flags(Config, "", ["--setup", "decoder-text+rotary+tied"])
    assert found.setup == "decoder-text+rotary+tied"
    assert found.width == dict(SETUPS["decoder-text"].flags)["width"]
    with pytest.raises(UserError, match="invalid choice: 'decoder-text\\+round'"):
        parse_flags(Config, "", ["--setup", "decoder-text+round"])


@pytest.mark.parametrize("name", [name for name, setup in SETUPS.items() if setup.flags])
def test_setups_change_defaults_of_flags(name):
    own = dict(SETUPS[name].flags)
    assert SETUPS["mlp-digits"].flags == ()
    found = parse_flags(LandscapeConfig, "", ["--setup", name])
    changed = {flag: value for flag, value in own.items() if flag in cli.flags(LandscapeConfig)}
    assert {flag: getattr(found, flag) for flag in changed} == changed
    assert command("landscape", found) == f"python -m experiments.landscape --setup {name}"
    assert Store(found).folder("landscape").name == "landscape"
    usual = parse_flags(LandscapeConfig, "", ["--setup", name, "--width", "32"])
    assert command("landscape", usual) == f"python -m experiments.landscape --setup {name} --width 32"
    assert convert_config(found, SweepConfig).width == own["width"]
    assert convert_config(Config(setup="mlp-digits"), LandscapeConfig, setup=name, width=5).width == 5
    report_config = parse_flags(ReportConfig, "", ["--setup", name])
    assert report_config.width == (own["width"],)
    assert parse_flags(ReportConfig, "", ["--setup", name, "mlp-digits"]).width == (32,)


def test_frozen_permutations_are_part_of_every_identity():
    plain = parse_flags(SweepConfig, "", ["--setup", "decoder-text", "--width", "2"])
    kept = parse_flags(SweepConfig, "", ["--setup", "decoder-text", "--width", "2", "--frozen", "stream"])
    spec, without = (Store(config).spec for config in (plain, kept))
    assert {*spec.sizes} - {*without.sizes} == {residual_stream(spec)} == {"embedding"}
    folders = [Store(config).folder("uniform") for config in (plain, kept)]
    assert folders[1].name == "uniform,frozen=stream"
    assert "frozen" not in flags_identity("uniform", plain)["config"]
    assert flags_identity("uniform", kept)["config"]["frozen"] == ["stream"]
    files = [Store(c).folders.matching("a", "b", "weights") for c in (plain, kept)]
    assert files[0] != files[1]
    assert "--frozen stream" in command("uniform", kept)
    wrong = parse_flags(SweepConfig, "", ["--setup", "decoder-text", "--width", "2", "--frozen", "nothing"])
    with pytest.raises(UserError, match="There is no permutation nothing: use one of"):
        _ = Store(wrong).spec


def test_matcher_steps_are_part_of_every_identity():
    words = ["--setup", "mlp-digits", "--matcher", "ste"]
    usual = parse_flags(SweepConfig, "", words)
    more = parse_flags(SweepConfig, "", [*words, "--matcher-steps", "300"])
    assert [Store(config).folder("uniform").name for config in (usual, more)] == [
        "uniform,matcher=ste",
        "uniform,matcher=ste,matcher-steps=300",
    ]
    assert "matcher_steps" not in flags_identity("uniform", usual)["config"]
    assert flags_identity("uniform", more)["config"]["matcher_steps"] == 300
    files = [Store(config).folders.matching("a", "b", "ste").name for config in (usual, more)]
    assert files == ["b-to-a,matcher=ste.npz", "b-to-a,matcher=ste,steps=300.npz"]
    assert Store(more).folders.matching("a", "b", "weights").name == "b-to-a.npz"


def test_matcher_steps_need_a_matcher_that_learns():
    with pytest.raises(UserError, match=r"--matcher weights takes no --matcher-steps 5: use --matcher ste"):
        parse_flags(SweepConfig, "", ["--setup", "mlp-digits", "--matcher-steps", "5"])


def test_groups_are_part_of_every_identity():
    words = ["--setup", "decoder-text", "--width", "2"]
    plain = parse_flags(SweepConfig, "", words)
    every = parse_flags(SweepConfig, "", [*words, "--groups", "all"])
    folders = [Store(config).folder("uniform").name for config in (plain, every)]
    assert folders == ["uniform", "uniform,groups=all"]
    assert "groups" not in flags_identity("uniform", plain)["config"]
    assert flags_identity("uniform", every)["config"]["groups"] == "all"
    files = [Store(config).folders.matching("a", "b", "weights").name for config in (plain, every)]
    assert files == ["b-to-a.npz", "b-to-a,groups=all.npz"]
    assert "--groups all" in command("uniform", every)


def test_groups_leave_permutations_to_measures_of_units():
    store = Store(parse_flags(SweepConfig, "", ["--setup", "mlp-digits", "--width", "1", "--groups", "all"]))
    assert {own.values for own in store.symmetries.scalings.values()} == {"positive"}
    assert type(store.spec) is PermutationSpec
    assert store.spec == SETUPS["mlp-digits"].spec(1)
