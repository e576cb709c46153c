"""Checks types and array shapes in mcomb if it is imported before mcomb.

`mcomb.symmetry` is left out: it makes functions anew for each jaxpr, and a check would be compiled for each of them.
"""

from pathlib import Path

from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

MODULES = {path.stem for path in (Path(__file__).parents[2] / "mcomb").iterdir() if not path.name.startswith("_")}
CHECKED = [f"mcomb.{name}" for name in sorted(MODULES - {"symmetry"})]
check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float, as for type checkers

install_import_hook(CHECKED, "array_types.check")
