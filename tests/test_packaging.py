import re
import tomllib
from pathlib import Path

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
