"""Everything is in pyproject.toml, but for this: wheels have the experiments as mcomb.experiments.

Nobody wants a package called `experiments` among those they have installed. Mapping the folder in pyproject.toml would
do for wheels, but makes an editable install one that mypy and editors cannot follow.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithExperiments(build_py):
    """Copies experiments/ into the wheel; an editable install has the clone's own."""

    def run(self) -> None:
        """Build the packages and add the experiments."""
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib, "mcomb", "experiments")
            self.mkpath(str(folder))
            for path in (*Path("experiments").glob("*.py"), Path("experiments/report.css")):
                self.copy_file(str(path), str(folder / path.name))


setup(cmdclass={"build_py": BuildWithExperiments})
