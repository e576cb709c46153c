import re

import pytest

from experiments import report, schematic
from mcomb.lab import cli

FLAGS = ["--setup", "mlp-digits", "--width", "2"]


@pytest.fixture
def page(tmp_path, capsys):
    """Makes the report and returns what it printed, and the page."""

    def of(*flags):
        report.main([*FLAGS, *flags, "--out", str(tmp_path)])
        (path,) = tmp_path.rglob("report*.html")
        return capsys.readouterr().out, path.read_text()

    return of


def test_the_report_gathers_what_has_been_run(page, tmp_path):
    said, text = page()
    assert "0 experiments in" in said
    assert "17 not run yet (--run runs them)" in said
    assert "data:image" not in text
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".html"]
    schematic_config = cli.parse(schematic.EXPERIMENT.config, "", [*FLAGS, "--out", str(tmp_path)])
    report.run(schematic.EXPERIMENT, schematic_config)
    said, text = page()
    assert "1 experiments in" in said
    assert "hat combinations do to weights" in text
    assert text.count("data:image/png;base64,") == 1
    commands = re.findall(r"python -m experiments\.(\w+) ", re.sub("<[^>]+>", "", text))
    assert set(commands) == {experiment.name for experiment, _ in report.plan(cli.parse(report.ReportConfig, "", []))}


def test_the_report_runs_what_is_missing_if_asked(page, monkeypatch):
    plan = report.plan
    monkeypatch.setattr(report, "plan", lambda config: [job for job in plan(config) if job[0].name == "schematic"])
    assert "0 experiments in" in page()[0]
    said, text = page("--run")
    assert "1 experiments in" in said
    assert "0 not run yet" in said
    assert "every experiment has been run" in text


def test_the_report_plans_every_experiment_of_the_paper():
    jobs = report.plan(cli.parse(report.ReportConfig, "", ["--width", "8", "--points", "7"]))
    names = [experiment.name for experiment, _ in jobs]
    assert len(names) == 17
    assert len(set(names)) == 16
    assert all(config.width == 8 for _, config in jobs)
    assert all(type(config) is experiment.config for experiment, config in jobs)
    assert {config.points for _, config in jobs if hasattr(config, "points")} == {7}
    ranges = [config.range for experiment, config in jobs if experiment.name == "linear"]
    assert ranges == [(0, 1), (-1, 2)]


def test_the_reports_name_has_the_flags_it_was_given(page, tmp_path):
    page("--seed", "1", "--widths", "1", "2")
    (path,) = tmp_path.rglob("*.html")
    assert path == tmp_path / "mlp-digits" / "width-2" / "report,seed=1,widths=1..2.html"
