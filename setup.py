"""Install the experiments in wheels as mcomb.experiments; pyproject.toml contains everything else.

An installed package called `experiments` could clash with others. A mapping of the folder in pyproject.toml would also
work, but mypy and editors could not follow the resulting editable install.
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
