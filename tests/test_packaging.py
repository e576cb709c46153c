import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

import mcomb
from mcomb.errors import UserError
from mcomb.lab.setups import SETUPS

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_packaging_tpu_requirements_match_dependencies():
    lines = (ROOT / "requirements-tpu.txt").read_text().splitlines()
    wanted = {line.strip() for line in lines if line and not line.startswith("#")}
    needed = {re.sub(r"\s", "", line) for line in PROJECT["project"]["dependencies"]}
    needed = {line.replace("jax>", "jax[tpu]>") if line.startswith("jax>") else line for line in needed}
    extra = {line for line in PROJECT["project"]["optional-dependencies"]["tfds"] if line != "tensorflow"}
    assert wanted == needed | extra


def test_packaging_installs_every_package():
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "mcomb").rglob("*.py")}
    included = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {".".join(folder.parts) for folder in folders} == set(find_packages(str(ROOT), include=included))


def test_packaging_takes_version_from_library():
    assert re.fullmatch(r"\d+\.\d+\.\d+", mcomb.__version__)
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "mcomb.__version__"}


def test_packaging_exports_errors_that_are_value_errors():
    assert mcomb.UserError is UserError
    assert issubclass(mcomb.UserError, ValueError)
    assert issubclass(mcomb.Diverged, mcomb.UserError)
    assert {"UserError", "Diverged"} <= {*mcomb.__all__}


MISUSE = """
import jax
import mcomb

def apply(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x @ params["kernel"]

a, b = mcomb.read_checkpoint("a.npz"), mcomb.read_checkpoint("b.npz")
x = jax.numpy.zeros((3, 2))
spec = mcomb.derive_spec(apply, a, x)
aligned = mcomb.align(apply, a, b, x, matcher=mcomb.weights(restarts=2), spec=spec)
sweep = mcomb.sweep(apply, (a, aligned.params), x, x, mcomb.uniform)
print(sweep.barrier.loss + sweep.loss.max(), aligned.matching.objective)
merged = mcomb.merge(apply, (a, aligned.params), x, method=mcomb.refit(ridge=1))
print(mcomb.score(merged.apply, merged.params, x, x).accuracy)
spec.apply(aligned, b)  # wrong
mcomb.align(a, b)  # wrong
mcomb.sweep(apply, (a, b), x, x)  # wrong
mcomb.sweep(apply, (a, b), x, x, "uniform")  # wrong
mcomb.merge(apply, (a, b), x, "refit", mcomb.refit())  # wrong
mcomb.refit(rigde=0.1)  # wrong
"""


@pytest.mark.slow
def test_packaging_types_let_mypy_flag_misuse_only(tmp_path):
    pytest.importorskip("mypy", reason="mypy is among the dev extras")
    script = tmp_path / "script.py"
    script.write_text(MISUSE)
    found = subprocess.run(
        [sys.executable, "-m", "mypy", str(script)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    flagged = {int(line.split(":")[1]) for line in found.stdout.splitlines() if ": error:" in line}
    wrong = {number for number, line in enumerate(MISUSE.splitlines(), 1) if line.endswith("# wrong")}
    assert flagged == wrong, found.stdout + found.stderr


def test_notebook_is_valid_and_offers_all_setups():
    notebook = json.loads((ROOT / "notebooks" / "mode_combinability.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    sources = ["".join(cell["source"]) for cell in code]
    for source in sources:
        ast.parse(source)
    (offered,) = re.findall(r"SETUP = .*@param (\[.*\])", "\n".join(sources))
    assert set(json.loads(offered)) == set(SETUPS)
