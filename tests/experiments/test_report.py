import json
import re
from dataclasses import replace

import pytest

from experiments import report, schematic
from mcomb.lab import cli
from mcomb.lab.runs.reuse import OtherRun

FLAGS = ["--setup", "mlp-digits", "--width", "2"]


@pytest.fixture
def page(tmp_path, capsys):
    """Write the report, and return its output and the page."""

    def of(*flags):
        report.main([*FLAGS, *flags, "--out", str(tmp_path)])
        (path,) = tmp_path.rglob("report*.html")
        return capsys.readouterr().out, path.read_text()

    return of


def test_report_collects_existing_results(page, tmp_path):
    said, text = page()
    assert "0 experiments in the report" in said
    assert said.splitlines()[-1] == f"report: {tmp_path / 'mlp-digits' / 'width-2' / 'report.html'}"
    assert "19 not run yet (--run runs them)" in said
    assert "data:image" not in text
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".html"]
    schematic_config = cli.parse(schematic.EXPERIMENT.config, "", [*FLAGS, "--out", str(tmp_path)])
    report.run(schematic.EXPERIMENT, schematic_config)
    said, text = page()
    assert "1 experiments in" in said
    assert "ow combinations mix weights" in text
    assert text.count("data:image/png;base64,") == 1
    commands = re.findall(r"python -m experiments\.(\w+) ", re.sub("<[^>]+>", "", text))
    assert {*commands} == {job.experiment.name for job in report.plan(cli.parse(report.ReportConfig, "", []))}


def test_report_shows_runs_with_other_flags(page, tmp_path, capsys):
    config = cli.parse(schematic.EXPERIMENT.config, "", [*FLAGS, "--seed", "3", "--out", str(tmp_path)])
    report.run(schematic.EXPERIMENT, config)
    said, text = page()
    assert "1 experiments in the report; 18 not run yet" in said
    assert "schematic was run with other flags: --seed 3" in said.splitlines()
    assert "This run used other flags than the page: --seed 3." in text
    assert "1 was run with other flags, which are listed" in text
    report.run(schematic.EXPERIMENT, replace(config, seed=0))
    said, text = page()
    assert "other flags" not in said + text


def test_report_separates_lines_of_different_range(monkeypatch):
    config = cli.parse(report.ReportConfig, "", FLAGS)
    between, beyond = (job for job in report.plan(config) if job.experiment.name == "linear")
    kept = replace(beyond.config, points=5)
    monkeypatch.setattr(report, "find_other_runs", lambda *args: [OtherRun(kept, "--points 5")])
    monkeypatch.setattr(report, "read_results", lambda experiment, own: {"of": own} if own == kept else None)
    assert report.read_nearest(beyond) == (kept, "--points 5", {"of": kept})
    assert report.read_nearest(between) == (between.config, "", None)


def test_report_runs_missing_experiments_on_request(page, monkeypatch):
    plan = report.plan
    monkeypatch.setattr(report, "plan", lambda config: [job for job in plan(config) if job.name == "schematic"])
    assert "0 experiments in" in page()[0]
    said, text = page("--run")
    assert "1 experiments in" in said
    assert "0 not run yet" in said
    assert "All experiments of this page have results" in text


def test_report_plans_every_experiment_of_paper():
    jobs = report.plan(cli.parse(report.ReportConfig, "", ["--width", "8", "--points", "7"]))
    names = [job.experiment.name for job in jobs]
    assert len(names) == len({job.name for job in jobs}) == 19
    assert len(set(names)) == 18
    assert all(job.config.width == 8 for job in jobs)
    assert all(type(job.config) is job.experiment.config for job in jobs)
    assert {job.config.points for job in jobs if hasattr(job.config, "points")} == {7}
    ranges = {job.name: job.config.range for job in jobs if job.experiment.name == "linear"}
    assert ranges == {"linear": (0, 1), "linear, beyond": (-1, 2)}


def test_report_of_several_setups_repeats_nothing(tmp_path, capsys):
    flags = ["--setup", "mlp-digits", "mlp-cifar10", "--width", "2", "4", "2", "--out", str(tmp_path), "--json"]
    jobs = report.plan(cli.parse(report.ReportConfig, "", flags))
    assert len({(job.experiment.name, job.config) for job in jobs}) == len(jobs) == 4 * 17 + 2 + 1
    places = [f"MLP on {data}, width {width}" for data in ("digits", "CIFAR-10") for width in (2, 4)]
    assert list(dict.fromkeys(job.place for job in jobs)) == places
    report.main(flags)
    said = json.loads(capsys.readouterr().out)
    assert said["page"] == str(tmp_path / "report,setup=mlp-digits..mlp-cifar10,width=2..4.html")
    assert [left["of"] for left in said["missing"]] == [job.place for job in jobs]
    assert "<h1>MLP on digits; MLP on CIFAR-10, widths 2 and 4</h1>" in (tmp_path / said["page"]).read_text()


def test_report_name_has_given_flags(page, tmp_path):
    page("--seed", "1", "--widths", "1", "2")
    (path,) = tmp_path.rglob("*.html")
    assert path == tmp_path / "mlp-digits" / "width-2" / "report,seed=1,widths=1..2.html"
