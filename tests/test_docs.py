"""Run the recipes of the documentation, and compare pages, changelog and citation with the repository."""

import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from numerics import assert_equal

import mcomb
from mcomb.lab import cli
from mcomb.lab.runs.run import run
from mcomb.lab.setups import SETUPS
from mcomb.matching.matchers import MATCHERS
from mcomb.symmetry.rules import RULES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
VERSION = mcomb.__version__
KINDS = ("setup", "dataset", "distribution", "experiment", "matcher", "rule")


def blocks(page, language="python"):
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.S | re.M)


@pytest.fixture(scope="module")
def recipes():
    """Return the variables after each recipe, run in order as one program."""
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
def test_experiment_recipe_runs_on_model_and_dataset_recipes(recipes, tmp_path, capsys):
    experiment = recipes["experiment"]["EXPERIMENT"]
    sizes = ["--width", "1", "--epochs", "0", "--points", "2", "--samples", "1", "--matcher", "luck"]
    config = cli.parse(experiment.config, "", ["--setup", "shallow-parity", *sizes, "--out", str(tmp_path)])
    results = run(experiment, config)
    assert set(results.curves) == {"naive", "aligned"}
    assert results.guessing["test"]["examples"] == 397
    assert results.guessing["test"]["accuracy"] < 0.6  # of two classes
    assert [path.parent.parent for path in tmp_path.rglob("units.png")] == [tmp_path / "shallow-parity" / "width-1"]


def test_nnx_page_aligns_measures_and_merges(capsys, tmp_path):
    scope = {"__name__": "page"}
    for code in blocks("nnx.md"):
        exec(code, scope)
    assert {"first", "second"} == set(scope["aligned"].spec.sizes)
    naive, aligned = scope["naive"].barrier, scope["sweep"].barrier
    assert aligned.accuracy < 0.05
    assert naive.accuracy > 0.1
    assert aligned.loss < naive.loss / 2
    (accuracy,) = [float(line) for line in capsys.readouterr().out.splitlines() if re.fullmatch(r"[\d.]+", line)]
    assert accuracy > 0.9
    path, target = tmp_path / "a.safetensors", scope["aligned"].params
    mcomb.write_checkpoint(path, target)
    assert_equal(mcomb.read_checkpoint(path, target=target), target)


def test_distribution_recipe_draws_one_share_for_each_unit(recipes):
    shares = np.asarray(recipes["distribution"]["mixture"]["kernel"])
    assert (shares == shares[:1]).all()
    assert len(np.unique(shares)) == 4


def test_matcher_recipe_is_a_matcher_of_align(recipes):
    scope = recipes["matcher"]
    given = [scope[name] for name in ("apply", "a", "b", "x")]
    found = mcomb.align(*given, matcher="luck").matching
    best = mcomb.align(*given).matching.objective  # with a single permutation, weight matching is exact
    assert found.trace[0] < found.objective <= best * (1 + np.finfo(np.float32).eps)


def test_rule_recipe_frees_frozen_axes(recipes):
    scope = recipes["rule"]
    assert not scope["before"].sizes
    assert list(scope["after"].sizes.values()) == [8]
    assert {frozen.reason for frozen in scope["before"].frozen if frozen.leaf == "out" and frozen.axis == 0}


def test_derivation_page_shows_the_printed_output(capsys):
    exec("\n".join(blocks("derivation.md")), {})
    assert capsys.readouterr().out.split() == "\n".join(blocks("derivation.md", "text")).split()


def programs():
    paths = (path for path in (ROOT / "experiments").glob("*.py") if path.stem != "__main__")
    return sorted(path.stem for path in paths if 'if __name__ == "__main__":' in path.read_text())


@pytest.mark.parametrize("name", programs())
def test_experiment_has_a_page_and_a_figure(name):
    page = (DOCS / "experiments" / f"{name}.md").read_text()
    assert f"::: experiments.{name}\n" in page
    assert f"experiments/{name}.md" in (ROOT / "mkdocs.yml").read_text()
    assert f"]({name}.md)" in (DOCS / "experiments" / "index.md").read_text()
    draws = "EXPERIMENT = " in (ROOT / "experiments" / f"{name}.py").read_text()
    if draws or name == "report":
        assert f"]({name}.png)" in page
        assert (DOCS / "experiments" / f"{name}.png").is_file()


def test_experiment_pages_have_an_experiment():
    assert {path.stem for path in (DOCS / "experiments").glob("*.md")} == {*programs(), "index"}


def test_reference_lists_every_public_name():
    assert sorted(re.findall(r"^::: mcomb\.(\w+)$", (DOCS / "api.md").read_text(), re.M)) == sorted(mcomb.__all__)


def test_docstring_examples_have_a_rendered_section():
    sources = {path.relative_to(ROOT): path.read_text() for path in (ROOT / "mcomb").rglob("*.py")}
    wrong = [str(path) for path, source in sources.items() if re.search(r"^ +Example:$", source, re.M)]
    assert not wrong, "mkdocstrings shows `Example:` as quotations: write `Examples:`"


def test_design_page_lists_all_modules():
    tree = blocks("design.md", "")[0].splitlines()
    listed: dict[Path, set[str]] = {}
    folders = [ROOT]
    for line in tree:
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders = [*folders[: depth + 1], folders[depth] / name]
        assert folders[-1].exists(), name
        listed.setdefault(folders[depth], set()).add(name.rstrip("/"))
    for folder in set(listed) - {ROOT}:
        found = {path.name for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
        assert listed[folder] == found - {"__init__.py"}, folder


def test_files_named_in_docs_and_checks_exist():
    files = [*DOCS.glob("*.md"), *(ROOT / ".ci").iterdir(), *ROOT.glob(".github/*/*"), *ROOT.glob("*.md")]
    text = "\n".join(file.read_text() for file in files)
    named = {*re.findall(r"(?<![\w/.])((?:tests|mcomb|benchmarks)/[\w/.]*\w)", text)}
    assert "tests/pytorch" in named
    assert not {path for path in named if not (ROOT / path).exists()}


def test_citation_names_the_paper_and_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "version", "license", "preferred-citation"} <= citation.keys()
    assert citation["version"] == VERSION
    paper = citation["preferred-citation"]
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert paper["title"] in readme
    assert all(author["family-names"] in readme for author in paper["authors"])
    assert {"type": "other", "value": "arXiv:2308.11511"}.items() <= paper["identifiers"][0].items()


def test_changelog_starts_with_the_current_version():
    first = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    assert first.split()[1] == VERSION
