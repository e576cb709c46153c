"""The recipes of the documentation run as they stand; pages, changelog and citation fit the repository."""

import ast
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import yaml

from mcomb import match
from mcomb.lab import cli
from mcomb.lab.experiment import run
from mcomb.lab.setups import SETUPS
from mcomb.matching import MATCHERS
from mcomb.symmetry.rules import RULES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
KINDS = ("setup", "dataset", "distribution", "experiment", "matcher", "rule")


def blocks(page, language="python"):
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.S | re.M)


@pytest.fixture(scope="module")
def recipes():
    """What each recipe leaves, after all before it: they are one program."""
    tables = (SETUPS, MATCHERS, RULES)
    kept = [dict(table) for table in tables]
    scope, left = {"__name__": "recipes"}, {}
    for kind, code in zip(KINDS, blocks("extending.md"), strict=True):
        exec(code, scope)
        left[kind] = dict(scope)
    yield left
    for table, before in zip(tables, kept, strict=True):
        table.clear()
        table.update(before)


@pytest.mark.slow
def test_an_experiment_of_ones_own_runs_on_ones_own_model_and_dataset(recipes, tmp_path, capsys):
    experiment = recipes["experiment"]["EXPERIMENT"]
    sizes = ["--width", "1", "--epochs", "0", "--points", "2", "--samples", "1", "--matcher", "luck"]
    config = cli.parse(experiment.config, "", ["--setup", "shallow-parity", *sizes, "--out", str(tmp_path)])
    results = run(experiment, config)
    assert set(results["curves"]) == {"naive", "aligned"}
    assert results["guessing"]["test"]["images"] == 397
    assert results["guessing"]["test"]["accuracy"] < 0.6  # of two classes
    assert [path.parent.parent for path in tmp_path.rglob("units.png")] == [tmp_path / "shallow-parity" / "width-1"]


def test_a_distribution_of_ones_own_gives_all_weights_of_a_unit_one_share(recipes):
    shares = np.asarray(recipes["distribution"]["mixed"]["kernel"])
    assert (shares == shares[:1]).all()
    assert len(np.unique(shares)) == 4


def test_a_matcher_of_ones_own_is_one_of_match(recipes):
    scope = recipes["matcher"]
    found = match(scope["spec"], scope["a"], scope["b"], matcher="luck")
    best = match(scope["spec"], scope["a"], scope["b"]).objective  # with one permutation, the very best
    assert found.trace[0] < found.objective <= best * (1 + np.finfo(np.float32).eps)


def test_a_rule_of_ones_own_frees_what_was_frozen(recipes):
    scope = recipes["rule"]
    assert not scope["before"].sizes
    assert list(scope["after"].sizes.values()) == [8]
    assert {frozen.reason for frozen in scope["before"].frozen if frozen.leaf == "out" and frozen.axis == 0}


def test_the_derivation_is_explained_with_what_is_printed(capsys):
    exec("\n".join(blocks("derivation.md")), {})
    assert capsys.readouterr().out.split() == "\n".join(blocks("derivation.md", "text")).split()


def programs():
    paths = (path for path in (ROOT / "experiments").glob("*.py") if path.stem != "__main__")
    return sorted(path.stem for path in paths if 'if __name__ == "__main__":' in path.read_text())


@pytest.mark.parametrize("name", programs())
def test_an_experiment_has_its_page_and_figure(name):
    page = (DOCS / "experiments" / f"{name}.md").read_text()
    assert f"::: experiments.{name}\n" in page
    assert f"experiments/{name}.md" in (ROOT / "mkdocs.yml").read_text()
    assert f"]({name}.md)" in (DOCS / "experiments" / "index.md").read_text()
    draws = "EXPERIMENT = " in (ROOT / "experiments" / f"{name}.py").read_text()
    if draws or name == "report":
        assert f"]({name}.png)" in page
        assert (DOCS / "experiments" / f"{name}.png").is_file()


def test_there_is_no_page_of_an_experiment_that_is_not_there():
    assert {path.stem for path in (DOCS / "experiments").glob("*.md")} == {*programs(), "index"}


def test_every_public_name_is_in_the_reference():
    (names,) = (
        ast.literal_eval(node.value)
        for node in ast.parse((ROOT / "mcomb" / "__init__.py").read_text()).body
        if isinstance(node, ast.Assign)
    )
    assert sorted(re.findall(r"^::: mcomb\.(\w+)$", (DOCS / "api.md").read_text(), re.M)) == sorted(names)


def test_the_citation_names_the_paper_and_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "version", "license", "preferred-citation"} <= citation.keys()
    assert citation["version"] == VERSION
    paper = citation["preferred-citation"]
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert paper["title"] in readme
    assert all(author["family-names"] in readme for author in paper["authors"])
    assert {"type": "other", "value": "arXiv:2308.11511"}.items() <= paper["identifiers"][0].items()


def test_the_changelog_has_this_version_first():
    first = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    assert first.split()[1] == VERSION
