"""Checks the types and shapes of arrays in mcomb, if it is imported before it is.

Not in `mcomb.symmetry`, which has axes in the place of arrays: there functions inside functions are made anew for each
jaxpr, and a check would be compiled for each of them.
"""

from pathlib import Path

from jaxtyping import install_import_hook

MODULES = {path.stem for path in (Path(__file__).parents[2] / "mcomb").iterdir() if not path.name.startswith("_")}
CHECKED = [f"mcomb.{name}" for name in sorted(MODULES - {"symmetry"})]

install_import_hook(CHECKED, "beartype.beartype")
