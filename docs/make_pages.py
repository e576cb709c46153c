"""Run every experiment on digits and write its page into docs/experiments/, with its figure and its output.

    python -m docs.make_pages --out runs    # half an hour on two CPU cores; seconds from cached results

The command is the first one in the experiment's docstring, except for the experiments in SHOWN. The site shows that
docstring on the same page. Chromium, if installed, takes the picture of the report.
"""

import importlib
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from PIL import Image

from docs.pictures import reduce_picture
from mcomb.lab import cli
from mcomb.lab.cache.store import Store
from mcomb.lab.cli import Flag
from mcomb.lab.flags import parse_flags
from mcomb.lab.runs.experiment import Experiment
from mcomb.lab.runs.run import run

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "experiments"
WORDS = {True: "This run shows the effect.", False: "This run does not show the effect.", None: ""}
SHOWN = {  # commands that replace the first one of a docstring
    "decay": "python -m experiments.decay --setup mlp-digits --width 4 --decays 1e-4 1e-3 5e-3 --lengths 5 20",
    "robustness": "python -m experiments.robustness --setup mlp-digits --by correlation norm fisher variance random",
}
REPORT_SIZE = (1000, 1100)  # of the browser window that shows the report


@dataclass(frozen=True)
class PagesConfig:
    """Flags of this program."""

    out: Annotated[Path, Flag("root folder of all runs")] = Path("runs")
    names: Annotated[tuple[str, ...], Flag("the experiments whose pages to write (default: all)")] = ()


def programs() -> list[str]:
    """Return the names of all experiments, which are the modules that run as programs."""
    paths = sorted((ROOT / "experiments").glob("*.py"))
    return [path.stem for path in paths if path.stem != "__main__" and 'if __name__ == "__main__":' in path.read_text()]


def first_command(module: Any) -> str:
    """Return the first command of a module's docstring."""
    return next(line for line in module.__doc__.splitlines() if "python -m" in line).partition("#")[0].strip()


def page(name: str, rest: str = "") -> str:
    """Return the page of an experiment: its docstring, then the rest."""
    options = "".join(f"      {option}: false\n" for option in ("show_root_heading", "show_root_toc_entry", "members"))
    return f"# {name}\n\n::: experiments.{name}\n    options:\n{options}{rest}"


def run_and_write(name: str, experiment: Experiment, line: str, out: Path) -> str:
    """Run an experiment, write its figure, and return its page after the docstring."""
    config = replace(parse_flags(experiment.config, "", shlex.split(line)[3:]), out=out)
    results = run(experiment, config)
    numbers = [experiment.table(results)] if results.models else []
    printed = "\n".join(part.rstrip() for part in "\n".join([results.title, *numbers]).splitlines())
    figure = FOLDER / f"{name}.png"
    reduce_picture(Image.open(Store(config).folder(name) / figure.name), figure)
    whose, words = ("Open question", {}) if results.is_open else ("The paper's claim", WORDS)
    claim = f"\n{whose}: *{results.claim}* {words.get(results.agrees, '')}".rstrip() + "\n" if numbers else ""
    return (
        f"\n## Output\n\n{shown(figure, results.alt)}\n"
        f"`{line}` printed:\n\n```text\n{printed}\n```\n\n{results.finding}\n{claim}"
    )


def shown(picture: Path, alt: str) -> str:
    """Return Markdown that shows a picture at half its pixel size, for high-density screens."""
    return f'![{alt}]({picture.name}){{ width="{Image.open(picture).width // 2}" }}\n'


def picture_report(out: Path) -> str:
    """Take a picture of the report if Chromium is installed, and return its page after the docstring."""
    browser, report = shutil.which("chromium"), out / "mlp-digits" / "width-32" / "report.html"
    if browser and report.is_file():
        with tempfile.TemporaryDirectory() as folder:
            shot, size = Path(folder) / "shot.png", ",".join(map(str, REPORT_SIZE))
            flags = "--headless --no-sandbox --disable-gpu --hide-scrollbars --force-device-scale-factor=1.4"
            places = [f"--window-size={size}", f"--screenshot={shot}", f"--user-data-dir={folder}/profile"]
            words = [browser, *flags.split(), *places, report.absolute().as_uri()]
            subprocess.run(words, check=True, capture_output=True)
            reduce_picture(Image.open(shot), FOLDER / "report.png")
    return f"\n## Output\n\n{shown(FOLDER / 'report.png', 'The top of the report.')}"


def main() -> None:
    """Write all pages."""
    config = cli.parse(PagesConfig, __doc__ or "")
    out = config.out
    FOLDER.mkdir(exist_ok=True)
    for name in config.names or programs():
        module: Any = importlib.import_module(f"experiments.{name}")
        rest = ""
        if hasattr(module, "EXPERIMENT"):
            rest = run_and_write(name, module.EXPERIMENT, SHOWN.get(name) or first_command(module), out)
        elif name == "report":
            module.main([*shlex.split(first_command(module))[3:], "--out", str(out)])
            rest = picture_report(out)
        (FOLDER / f"{name}.md").write_text(page(name, rest))


if __name__ == "__main__":
    cli.run(main)
