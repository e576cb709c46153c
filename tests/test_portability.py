"""The library runs on Linux, macOS and Windows: what a program that runs on Linux can check."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import linear
from mcomb.lab.run_folders import RunFolders
from mcomb.lab.setups import SETUPS

ROOT = Path(__file__).parent.parent
SOURCES = [path for folder in ("mcomb", "experiments") for path in sorted((ROOT / folder).rglob("*.py"))]
POSIX_ONLY = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
OTHER_OPENERS = ("os", "tarfile", "Image", "archive")
RESERVED = r"(CON|PRN|AUX|NUL|COM[1-9]|LPT[1-9])(\..*)?"


def problems(code):
    """Return the lines of code that need POSIX, or whose result depends on the system's encoding."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [node.lineno for name in names if name and name.partition(".")[0] in POSIX_ONLY]
        elif isinstance(node, ast.Call) and "encoding" not in [keyword.arg for keyword in node.keywords]:
            owner, _, function = ast.unparse(node.func).rpartition(".")
            is_binary = any(isinstance(arg, ast.Constant) and "b" in str(arg.value) for arg in node.args)
            opens_text = function == "open" and owner not in OTHER_OPENERS and not is_binary
            if opens_text or (function in ("read_text", "write_text") and owner):
                found.append(node.lineno)
    return found


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("path.read_text()", [1]),
        ("path.write_text(text)", [1]),
        ("path.open('a')", [1]),
        ("open(path)", [1]),
        ("import fcntl, os", [1]),
        ("def f():\n    from resource import getrusage", [2]),
        ("read_text(path); path.read_bytes(); path.open('wb'); open(path, encoding='utf-8')", []),
    ],
)
def test_portability_check_finds_problems(code, found):
    assert problems(code) == found


def test_library_names_encodings_and_needs_no_posix():
    assert len(SOURCES) > 100
    found = {str(path.relative_to(ROOT)): problems(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {path: lines for path, lines in found.items() if lines} == {}


def is_a_name_on_windows(name):
    return not re.search(r'[<>:"/\\|?*\x00-\x1f]|[ .]$', name) and not re.fullmatch(RESERVED, name, re.IGNORECASE)


@pytest.mark.parametrize("setup", SETUPS)
def test_run_folders_have_names_for_windows(setup, tmp_path):
    flags = {"range": (-1.5, 2.0), "dtype": "bfloat16", "learning_rate": 1e-5, "matcher": "activations", "seed_a": 7}
    config = linear.EXPERIMENT.config(setup=setup, width=2, out=tmp_path, **flags)
    folders, training = RunFolders(config), config.training_of("A")
    a, b = folders.network_name(training), "a file-0123456789abcdef"
    paths = [folders.network(training), folders.matching(a, b, config.matcher, 3), folders.experiment("linear", {})]
    for path in paths:
        for part in path.relative_to(tmp_path).parts:
            assert is_a_name_on_windows(part), part


def test_commands_print_to_streams_with_few_characters(tmp_path):
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "JAX_PLATFORMS": "cpu"}
    words = [sys.executable, "-m", "experiments", "--setup", "mlp-digits", "--out", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"uniform" in done.stdout
    assert b"?" in done.stdout
