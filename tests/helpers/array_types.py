"""Check types and array shapes in mcomb; import this module before mcomb.

`mcomb.symmetry` is excluded, because it creates new functions for each jaxpr and beartype would compile a check for
each of them.
"""

from pathlib import Path

from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

MODULES = {path.stem for path in (Path(__file__).parents[2] / "mcomb").iterdir() if not path.name.startswith("_")}
CHECKED = [f"mcomb.{name}" for name in sorted(MODULES - {"symmetry"})]
check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # accept int for float, as type checkers do

install_import_hook(CHECKED, "array_types.check")
