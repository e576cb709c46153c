"""Run the examples of all docstrings, with the networks that docs/api.md and docs/pytorch.md train."""

import ast
import doctest
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parent.parent
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*\.?\d*(?:e-?\d+)?(?![\w])")


class Checker(doctest.OutputChecker):
    """Ignore output that an example does not show, and compare numbers with a tolerance for other machines."""

    def check_output(self, want, got, optionflags):
        if not want:
            return True
        want = want.replace(doctest.BLANKLINE_MARKER, "")
        words = [" ".join(NUMBER.sub("#", text).split()) for text in (want, got)]
        numbers = [[float(number.replace(",", "")) for number in NUMBER.findall(text)] for text in (want, got)]
        return words[0] == words[1] and numbers[0] == pytest.approx(numbers[1], rel=0.1, abs=0.03)


def examples(path: Path) -> Iterator[tuple[str, str, list[doctest.Example]]]:
    """Yield the scope, name and examples of each docstring; the members of a class share its scope."""
    parse = doctest.DocTestParser().get_examples

    def visit(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, str, list[doctest.Example]]]:
        target = None
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                below = (*names, child.name)
                if found := parse(ast.get_docstring(child) or ""):
                    yield below[0], ".".join(below), found
                yield from visit(child, below)
            elif isinstance(child, ast.Assign):
                target = child.targets[0]
            elif isinstance(child, ast.Expr) and isinstance(target, ast.Name):  # the docstring of a variable
                text = getattr(child.value, "value", None)
                if isinstance(text, str) and (found := parse(text)):
                    yield target.id, target.id, found

    yield from visit(ast.parse(path.read_text()), ())


def scopes(*folders: str) -> list:
    """Return one parameter for each scope: its examples in order."""
    found: dict[str, list] = {}
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for scope, name, own in examples(path):
                found.setdefault(f"{module}.{scope}", []).append((f"{module}.{name}", own))
    return [pytest.param(own, id=scope.removeprefix("mcomb.")) for scope, own in found.items()]


def first_block(page: str) -> str:
    """Return the first Python code of a page."""
    return re.search(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.S).group(1)


def run(own, scope, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong: list[str] = []
    for name, found in own:
        test = doctest.DocTest(found, {}, name, None, None, None)
        test.globs = scope  # not a copy, so that the next docstring of the class sees its variables
        doctest.DocTestRunner(Checker(), verbose=False).run(test, out=wrong.append, clear_globs=False)
    assert not wrong, "".join(wrong)


@pytest.fixture(autouse=True, scope="module")
def ordinary_settings():
    """Allow rank promotion, as JAX does by default."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def networks():
    scope: dict = {}
    exec(first_block("api.md"), scope)
    return scope


@pytest.fixture(scope="module")
def modules():
    pytest.importorskip("torch")
    pytest.importorskip("torchax")
    scope: dict = {}
    exec(first_block("pytorch.md"), scope)
    return scope


@pytest.mark.slow
@pytest.mark.parametrize("own", [each for each in scopes("mcomb") if not each.id.startswith("pytorch.")])
def test_docstring_examples_print_their_output(own, networks, tmp_path, monkeypatch):
    run(own, dict(networks), tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("own", scopes("mcomb/pytorch"))
def test_docstring_examples_of_pytorch_print_their_output(own, modules, tmp_path, monkeypatch):
    run(own, dict(modules), tmp_path, monkeypatch)
