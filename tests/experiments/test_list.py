"""The list of experiments, `python -m experiments`, and the flags --quiet and --json."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import experiments
from experiments import __main__ as everything
from experiments import functional, schematic
from mcomb.lab.runs.command import main
from mcomb.lab.runs.experiment import idle_flags

FLAGS = ["--setup", "mlp-digits", "--width", "2"]


@pytest.fixture
def listed(tmp_path, capsys):
    """Return the entries of the list by name."""

    def of(*flags):
        everything.main([*FLAGS, *flags, "--out", str(tmp_path), "--json"])
        found = json.loads(capsys.readouterr().out)
        return {entry["name"]: entry for entry in found["experiments"]} | {it["name"]: it for it in found["programs"]}

    return of


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("unifrom", "did you mean python -m experiments.uniform?"), ("xyzzyx", "list them with python -m experiments.")],
)
def test_unknown_experiment_suggests_nearest_name(name, remedy):
    root = Path(experiments.__path__[0]).parent
    command = [sys.executable, "-m", f"experiments.{name}", "--setup", "mlp-digits"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: Unknown experiment {name}: {remedy}\n"


def test_list_has_every_experiment_and_program(listed, tmp_path):
    found = listed()
    modules = {path.stem for path in Path(experiments.__path__[0]).glob("*.py")}
    assert found.keys() == modules - {"__init__", "__main__", "report_page"}
    assert all(20 < len(entry["about"]) <= 120 for entry in found.values())
    assert {entry.get("kind", "program") for entry in found.values()} == {"not run", "program", "impossible"}
    assert [name for name, entry in found.items() if entry.get("kind") == "impossible"] == ["gauge"]
    assert found["uniform"]["command"] == f"python -m experiments.uniform {' '.join(FLAGS)} --out {tmp_path}"
    assert not list(tmp_path.iterdir())


def test_list_shows_done_after_quiet_and_json_runs(listed, tmp_path, capsys):
    flags = [*FLAGS, "--out", str(tmp_path)]
    main(schematic.EXPERIMENT, "", [*flags, "--quiet"])
    assert capsys.readouterr() == ("", "")
    main(schematic.EXPERIMENT, "", [*flags, "--json", "--quiet"])
    results = json.loads(capsys.readouterr().out)
    folder = tmp_path / "mlp-digits" / "width-2" / "schematic"
    assert results["finding"] == "This figure is an illustration without measurements."
    assert results["command"] == f"python -m experiments.schematic {' '.join(flags)}"
    assert results["folder"] == str(folder)
    assert results["figures"] == [str(folder / f"schematic.{kind}") for kind in ("png", "pdf")]
    stored = json.loads((folder / "results.json").read_text())
    assert {name: results[name] for name in stored.keys() - {"digest"}} == {
        name: value for name, value in stored.items() if name != "digest"
    }
    found = listed()
    assert [name for name, entry in found.items() if entry.get("kind") == "done"] == ["schematic"]
    assert found["schematic"]["agrees"] is None
    everything.main(flags)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if " no verdict, 20" in line] == ["schematic"]
    assert f"run one:    {found['uniform']['command']}" in lines


def test_list_names_rejected_flags(listed):
    found = listed("--epochs", "3")["decay"]
    assert (found["kind"], found["command"]) == ("impossible", None)
    assert "--lengths" in found["said"]


def test_list_fits_100_columns(tmp_path, capsys):
    everything.main([*FLAGS, "--epochs", "3", "--out", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert sum("rejects these flags: decay does not accept --epochs 3" in line for line in lines) == 1
    assert max(len(line) for line in lines if str(tmp_path) not in line) <= 100


def test_list_is_printed_if_all_reject_flags(tmp_path, capsys):
    (tmp_path / "text").write_text("no network")
    everything.main([*FLAGS, *(f"--checkpoint-{x}={tmp_path / 'text'}" for x in "abc"), "--out", str(tmp_path)])
    assert capsys.readouterr().out.count("rejects these flags") == len(everything.LISTED_EXPERIMENTS)


def test_list_omits_flags_without_effect_from_commands(listed):
    found = {
        name: listed("--seed-c", "9", "--test-examples", "500")[name]["command"] for name in ("uniform", "triangle")
    }
    assert ["--seed-c 9" in found[name] for name in ("uniform", "triangle")] == [False, True]
    assert not any("--test-examples" in line for line in found.values())


def test_idle_flags_include_temperatures_without_curves(listed):
    found = {name: entry["command"] for name, entry in listed("--temperatures").items() if entry.get("command")}
    flagged = {name for name, line in found.items() if "--temperatures" in line.split()}
    assert flagged == {
        *("uniform", "subcube", "hyperplane", "bernoulli", "stitching", "linear", "centered", "minmax"),
        *("transitivity", "matchers"),
    }
    config = functional.EXPERIMENT.config(setup="mlp-digits", temperatures=True)
    assert "functional measures no curves" in idle_flags(functional.EXPERIMENT, config)["temperatures"]


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lambda text: text.replace("MLP", "mlp"), "outdated"),
        (lambda text: "", "outdated"),
    ],
)
def test_list_ignores_results_that_runs_would_not_use(listed, tmp_path, damage, kind):
    main(schematic.EXPERIMENT, "", [*FLAGS, "--out", str(tmp_path), "--quiet"])
    path = tmp_path / "mlp-digits" / "width-2" / "schematic" / "results.json"
    path.write_text(damage(path.read_text()))
    assert listed()["schematic"]["kind"] == kind


@pytest.mark.parametrize(
    ("made", "asked", "said"),
    [
        (["--seed", "3"], [], ["--seed 3"]),
        ([], ["--seed", "3"], ["--seed 0"]),
        (["--epochs", "4", "--batch-size", "50"], ["--batch-size", "50"], ["--epochs 4"]),
        (["--pretrained"], [], ["--pretrained"]),
        ([], ["--pretrained"], ["no --pretrained"]),
        (["--seed", "3"], ["--seed", "3"], []),
        (["--width", "3"], [], []),
    ],
)
def test_list_names_runs_with_other_flags(listed, tmp_path, capsys, made, asked, said):
    main(schematic.EXPERIMENT, "", [*FLAGS, *made, "--out", str(tmp_path), "--quiet"])
    found = listed(*asked)
    assert found["schematic"]["others"] == said
    assert found["uniform"]["others"] == []
    everything.main([*FLAGS, *asked, "--out", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("  schematic: ")] == [f"  schematic: {flags}" for flags in said]
    (line,) = (line for line in lines if line.startswith("schematic "))
    assert line.endswith("  not run with these flags") is bool(said)
    assert max(map(len, lines[1 : lines.index("") + 2 + len(everything.LISTED_EXPERIMENTS)])) <= 100


def test_list_orders_other_runs_by_similarity(listed, tmp_path):
    for flags in (["--seed", "3", "--epochs", "4"], ["--seed", "2"]):
        main(schematic.EXPERIMENT, "", [*FLAGS, *flags, "--out", str(tmp_path), "--quiet"])
    assert listed()["schematic"]["others"] == ["--seed 2", "--epochs 4 --seed 3"]


def test_list_ignores_damaged_results_of_other_flags(listed, tmp_path):
    main(schematic.EXPERIMENT, "", [*FLAGS, "--seed", "3", "--out", str(tmp_path), "--quiet"])
    (path,) = tmp_path.rglob("results.json")
    path.write_text(path.read_text().replace("MLP", "mlp"))
    assert listed()["schematic"]["others"] == []


def test_list_names_other_setups_with_results(tmp_path, capsys):
    main(schematic.EXPERIMENT, "", [*FLAGS, "--out", str(tmp_path), "--quiet"])
    everything.main(["--out", str(tmp_path)])
    assert capsys.readouterr().out.splitlines()[-1] == "other results: --setup mlp-digits --width 2"
