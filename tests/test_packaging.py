import ast
import json
import os
import re
import shutil
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


def notebook_cells():
    """Return the code cells of the notebook by id."""
    notebook = json.loads((ROOT / "notebooks" / "mode_combinability.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    return {cell["id"]: cell for cell in notebook["cells"] if cell["cell_type"] == "code"}


def test_notebook_is_valid_and_offers_all_setups():
    cells = notebook_cells().values()
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    sources = ["".join(cell["source"]) for cell in cells]
    for source in sources:
        ast.parse(source)
    (offered,) = re.findall(r"SETUP = .*@param (\[.*\])", "\n".join(sources))
    assert set(json.loads(offered)) == set(SETUPS)


COLAB = {
    "google/colab/__init__.py": "",
    "google/colab/output.py": "",  # JAX imports it
    "google/colab/drive.py": "def mount(folder): print('mounted', folder)",
    "google/colab/files.py": """
import os, pathlib, shutil
def upload():
    path = pathlib.Path(os.environ["UPLOAD"])
    shutil.copy(path, path.name)
    return {path.name: path.read_bytes()}
""",
}


def archive(folder, kind):
    """Pack the package as a wheel, or as an archive of the repository has it; return the path."""
    inner = folder / "mcomb-0.1.0" if kind != "whl" else folder
    shutil.copytree(ROOT / "mcomb", inner / "mcomb", ignore=shutil.ignore_patterns("__pycache__"))
    if kind == "whl":
        (folder / "mcomb-0.1.0.dist-info").mkdir()
        lines = [f"Requires-Dist: {line}\n" for line in (*PROJECT["project"]["dependencies"], 'x; extra == "dev"')]
        (folder / "mcomb-0.1.0.dist-info" / "METADATA").write_text("Name: mcomb\nVersion: 0.1.0\n" + "".join(lines))
    else:
        shutil.copy(ROOT / "pyproject.toml", inner)
    packed = shutil.make_archive(f"{folder}-packed", "gztar" if kind == "tar.gz" else "zip", folder)
    return Path(packed).rename(folder.parent / f"mcomb-0.1.0.{kind}")


@pytest.mark.parametrize(("kind", "on_colab"), [("zip", True), ("tar.gz", False), ("whl", True)])
def test_notebook_runs_from_archive(kind, on_colab, tmp_path):
    """On Colab the first cell asks for the archive; elsewhere it takes the one next to the notebook."""
    home, place = tmp_path / "home", tmp_path / "colab"
    home.mkdir()
    packed = archive(tmp_path / "content", kind)
    if on_colab:
        for name, text in COLAB.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(text)
    else:
        shutil.copy(packed, home)
    cells = notebook_cells()
    first, second = ("".join(cells[name]["source"]) for name in ("place", "install"))
    run = "subprocess.run([sys.executable, '-m', 'mcomb'], check=True)"
    environment = os.environ | {"UPLOAD": str(packed), "PYTHONPATH": str(place), "JAX_PLATFORMS": "cpu"}
    code_folder = (home / "mcomb-code") if kind == "whl" else home / "mcomb-code" / "mcomb-0.1.0"
    for code in (f"{first}\n{second}\n{run}", first):  # the second run asks for nothing
        words = [sys.executable, "-c", code]
        done = subprocess.run(words, cwd=home, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert f"code in {code_folder}, " in done.stdout
        assert ("All packages are installed." in done.stdout) == (second in code)
        assert ("mounted" in done.stdout) == on_colab
        packed.unlink(missing_ok=True)


def test_notebook_names_remedy_without_code(tmp_path):
    code = "".join(notebook_cells()["place"]["source"])
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "Found no code of mcomb: fill in REPOSITORY, or put an archive" in done.stderr.splitlines()[-1]
