import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mcomb.lab.setups import SETUPS

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_a_tpu_needs_what_the_package_needs_and_tfds():
    lines = (ROOT / "requirements-tpu.txt").read_text().splitlines()
    wanted = {line.strip() for line in lines if line and not line.startswith("#")}
    needed = {re.sub(r"\s", "", line) for line in PROJECT["project"]["dependencies"]}
    needed = {line.replace("jax>", "jax[tpu]>") if line.startswith("jax>") else line for line in needed}
    extra = {line for line in PROJECT["project"]["optional-dependencies"]["tfds"] if line != "tensorflow"}
    assert wanted == needed | extra


def test_every_package_of_the_tree_is_installed():
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "mcomb").rglob("__init__.py")}
    assert {".".join(folder.parts) for folder in folders} == set(PROJECT["tool"]["setuptools"]["packages"])


MISUSE = """
import jax
import mcomb

def apply(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x @ params["kernel"]

a, b = mcomb.read_checkpoint("a.npz"), mcomb.read_checkpoint("b.npz")
x = jax.numpy.zeros((3, 2))
spec = mcomb.derive_spec(apply, a, x)
aligned = spec.apply(mcomb.match(spec, a, b).perms, b)
evaluate(apply, mix(mcomb.uniform), (a, aligned), x, x, x, x)
evaluate(apply, mcomb.uniform)  # wrong
spec.apply(mcomb.match(spec, a, b), b)  # wrong
mcomb.match(a, b)  # wrong
mcomb.align(a, b)  # wrong
"""


@pytest.mark.slow
def test_mypy_flags_what_is_wrong_in_a_script_and_nothing_else(tmp_path):
    pytest.importorskip("mypy", reason="mypy is among the dev extras")
    script = tmp_path / "script.py"
    script.write_text(MISUSE)
    found = subprocess.run(
        [sys.executable, "-m", "mypy", str(script)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    flagged = {int(line.split(":")[1]) for line in found.stdout.splitlines() if ": error:" in line}
    wrong = {number for number, line in enumerate(MISUSE.splitlines(), 1) if line.endswith("# wrong")}
    assert flagged == wrong, found.stdout + found.stderr


def test_the_notebook_is_valid_python_without_outputs_and_offers_all_setups():
    notebook = json.loads((ROOT / "notebooks" / "mode_combinability.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    sources = ["".join(cell["source"]) for cell in code]
    for source in sources:
        ast.parse(source)
    (offered,) = re.findall(r"SETUP = .*@param (\[.*\])", "\n".join(sources))
    assert set(json.loads(offered)) == set(SETUPS)
