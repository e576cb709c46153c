"""The architecture as imports: which package may import which, and what the library needs by itself."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Lowest first: a module may import modules of its own layer and of the layers before it.
LAYERS = (
    ("mcomb.errors", "mcomb.trees", "mcomb.keys"),
    ("mcomb.symmetry",),
    ("mcomb.runtime",),
    ("mcomb.io",),
    ("mcomb.combination",),
    ("mcomb.evaluation",),
    ("mcomb.matching",),
    ("mcomb.merging",),
    ("mcomb.pytorch",),
    ("mcomb.lab",),
    ("experiments",),
    ("mcomb.__main__",),
    ("benchmarks",),
)


def modules() -> dict[str, Path]:
    paths = [path for folder in ("mcomb", "experiments", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


MODULES = modules()


class Imports(ast.NodeVisitor):
    """Collects the modules of this project that a file imports, except those for type checkers only."""

    def __init__(self, path: Path):
        self.path, self.found = path, set[str]()
        self.visit(ast.parse(path.read_text()))
        self.found &= MODULES.keys()

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.found |= {alias.name for alias in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        here = self.path.relative_to(ROOT).parent.parts if node.level else ()
        module = ".".join([*here[: len(here) - node.level + 1], *([node.module] if node.module else [])])
        self.found |= {f"{module}.{alias.name}" for alias in node.names} & MODULES.keys() or {module}


def layer(module: str) -> int:
    layers = [i for i, row in enumerate(LAYERS) for name in row if module == name or module.startswith(f"{name}.")]
    assert layers, f"{module} has no layer: add it here and to docs/design.md"
    return layers[0]


def test_imports_point_to_lower_layers():
    imports = {module: Imports(path).found - {"mcomb"} for module, path in MODULES.items() if module != "mcomb"}
    assert len(imports) > 100
    wrong = [
        f"{module} imports {other}"
        for module, others in imports.items()
        for other in others
        if layer(other) > layer(module)
    ]
    assert not wrong


def test_imports_have_no_cycles():
    TopologicalSorter({module: Imports(path).found for module, path in MODULES.items()}).prepare()


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from mcomb.io.paths import as_path", {"mcomb.io.paths"}),
        ("def f():\n    from mcomb.io import paths", {"mcomb.io.paths"}),
        ("import mcomb.keys", {"mcomb.keys"}),
        ("if TYPE_CHECKING:\n    import mcomb.keys", set()),
    ],
)
def test_imports_are_found_wherever_they_stand(code, found, tmp_path):
    path = tmp_path / "module.py"
    path.write_text(code)
    assert Imports(path).found == found


def test_library_imports_without_lab_and_its_dependencies():
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


def test_library_modules_do_not_shadow_public_names():
    import mcomb

    stems = {path.stem for path in (ROOT / "mcomb").glob("*.py")} | {path.name for path in (ROOT / "mcomb").iterdir()}
    assert not stems & set(mcomb.__all__)
