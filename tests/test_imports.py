"""The architecture, as imports: which package may import which, and what a user of the library alone needs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Lowest first: a module may import those of its own line and of the lines before.
LIBRARY = (
    ("mcomb.base", "mcomb.runtime.interrupts", "mcomb.runtime.processes", "mcomb.runtime.progress"),
    (
        "mcomb.devices",
        "mcomb.io.paths",
        "mcomb.io.fingerprints",
        "mcomb.io.locks",
        "mcomb.evaluation.objectives",
        "mcomb.symmetry.dead_units",
        "mcomb.io.pytorch_names",
        "mcomb.threefry",
    ),
    ("mcomb.io.checkpoints", "mcomb.combination"),
    ("mcomb.symmetry", "mcomb.runtime.training_loop"),
    ("mcomb.evaluation.batch_statistics",),
    ("mcomb.evaluation.evaluate",),
    ("mcomb.matching", "mcomb.merging.refit", "mcomb.evaluation.repair", "mcomb.merging.fine_tuning"),
    ("mcomb.merging", "mcomb.merging.partial"),
    ("mcomb.lab",),
    ("experiments",),
    ("mcomb.__main__",),
    ("benchmarks",),
)
# Inside a package each module may import only what stands before it; "" is the package's own `__init__`.
ORDERS = {
    "mcomb.symmetry": (
        *(
            "axes",
            "spec",
            "check",
            "arrays",
            "known",
            "reshapes",
            "interpreter",
            "rules",
            "derive",
            "intermediates",
            "",
        ),
    ),
    "mcomb.symmetry.rules": ("common", "distinct", "shapes", "reductions", "lookups", "control", "products", ""),
    "mcomb.matching": ("core", "weights", "many", "activations", "straight_through", ""),
    "mcomb.lab": (
        *(
            "versions",
            "cli",
            "data",
            "models",
            "augmentation",
            "training",
            "partition",
            "setups",
            "config",
            "results",
            "side_by_side",
        ),
        *(
            "barriers",
            "training_checkpoints",
            "store",
            "identity",
            "measure",
            "verdicts",
            "pairs",
            "figures",
            "plan",
            "experiment",
            "state",
            "",
        ),
    ),
}


def modules() -> dict[str, Path]:
    paths = [path for folder in ("mcomb", "experiments", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def imported(path: Path) -> set[str]:
    """The modules of this project that a file imports, wherever in it."""
    known, found = modules(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            here = path.relative_to(ROOT).parent.parts if node.level else ()
            module = ".".join([*here[: len(here) - node.level + 1], *([node.module] if node.module else [])])
            inner = {f"{module}.{alias.name}" for alias in node.names}
            found |= inner & known.keys() or {module}
    return found & known.keys()


def level(module: str) -> int:
    levels = [i for i, row in enumerate(LIBRARY) for name in row if module == name or module.startswith(f"{name}.")]
    assert levels, f"{module} has no place in the architecture: give it one here and in docs/design.md"
    return levels[0]


@pytest.mark.parametrize("module", sorted(modules().keys() - {"mcomb"}))
def test_imports_go_one_way(module):
    others = imported(modules()[module]) - {"mcomb"}
    assert not {other for other in others if level(other) > level(module)}
    package, _, name = module.rpartition(".")
    if module in ORDERS:
        package, name = module, ""
    if package in ORDERS:
        order = ORDERS[package]
        inner = {
            other.removeprefix(f"{package}.").partition(".")[0] for other in others if other.startswith(f"{package}.")
        }
        assert name in order
        assert not {other for other in inner - {""} if order.index(other) >= order.index(name)}


def test_the_library_needs_neither_the_lab_nor_what_only_the_lab_uses():
    absent = ("mcomb.lab", "matplotlib", "sklearn", "tensorflow_datasets", "tensorflow", "flax", "orbax", "experiments")
    code = f"""
import sys
for name in {absent}: sys.modules[name] = None  # importing it is an ImportError
import jax
before = dict(jax.config.values)
import mcomb
assert dict(jax.config.values) == before, "importing mcomb changes JAX's configuration"
print(len(mcomb.__all__))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


def test_no_module_has_the_name_of_something_public():
    import mcomb

    stems = {path.stem for path in (ROOT / "mcomb").glob("*.py")} | {path.name for path in (ROOT / "mcomb").iterdir()}
    assert not stems & set(mcomb.__all__)
