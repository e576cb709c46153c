import struct

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from results import results_of

from mcomb.lab import figures
from mcomb.lab.figures import STYLE, draw_sweep, save, wrap
from mcomb.lab.runs.results import SweepResults


@pytest.fixture(autouse=True, scope="module")
def small_figures():
    """Draw real figures in these tests."""


def results(samples=2, **others):
    level = {split: {"loss": 0.1, "accuracy": 0.9} for split in ("train", "test")}
    rng = np.random.default_rng(0)
    curve = {split: {m: rng.random((3, samples)).tolist() for m in ("loss", "accuracy")} for split in level}
    curves = {"naive": curve, "aligned": curve, "through A": curve, "direct": curve}
    values = {
        "experiment": "uniform",
        "title": "A title",
        "ends": ["B", "C"],
        "models": {"A": level, "B": level, "C": level},
        "parameter": {"name": "s", "values": [0.0, 0.25, 0.5], "label": "s: " + "long " * 30},
        "curves": curves,
    }
    return results_of(SweepResults, values | others)


@pytest.mark.slow
def test_sweep_figure_is_deterministic(tmp_path):
    folders = [tmp_path / name for name in ("first", "again")]
    for folder in folders:
        folder.mkdir()
        draw_sweep(results(), folder)
        assert sorted(path.name for path in folder.iterdir()) == ["uniform.pdf", "uniform.png"]
    for kind, magic in (("png", b"\x89PNG"), ("pdf", b"%PDF")):
        first, again = ((folder / f"uniform.{kind}").read_bytes() for folder in folders)
        assert first == again
        assert first.startswith(magic)
    width, height = struct.unpack(">II", (folders[0] / "uniform.png").read_bytes()[16:24])
    assert (width, height) == (5.6 * 250, 4.5 * 250)


@pytest.mark.parametrize("flagged", [False, True])
def test_sweep_draws_best_temperatures_only_if_measured(flagged, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, folder, name: drawn.append(figure))
    curves = results().curves
    tempered = {"at_best_temperature": {"models": {}, "curves": curves, "barriers": {}}} if flagged else {}
    draw_sweep(results(**tempered), tmp_path)
    labels = {panel.get_title(): panel.get_legend_handles_labels()[1] for panel in drawn[0].axes[:2]}
    expected = [f"{variant}, best temperature" for variant in curves]
    assert [label for label in labels["test"] if "temperature" in label] == (expected if flagged else [])
    assert not any("temperature" in label for label in labels["train"])


def test_sweep_figure_keeps_matplotlib_settings(tmp_path):
    before = dict(matplotlib.rcParams)
    draw_sweep(results(samples=1), tmp_path)
    assert dict(matplotlib.rcParams) == before


def test_save_failure_keeps_previous_figure(tmp_path, monkeypatch):
    draw_sweep(results(), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(self, path, **options):
        path.write_bytes(b"half")
        raise OSError

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError):  # noqa: PT011
        draw_sweep(results(), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_pdf_figures_contain_text(tmp_path):
    with matplotlib.rc_context(STYLE):
        figure = Figure()
        figure.suptitle("Θ and λ")
        save(figure, tmp_path, "x")
    assert b"/Type /Font" in (tmp_path / "x.pdf").read_bytes()
    assert b"/Type3" not in (tmp_path / "x.pdf").read_bytes()


def test_wrap_breaks_lines_between_words():
    assert wrap("one two three", 8) == "one two\nthree"
    assert wrap("short", 8) == "short"
