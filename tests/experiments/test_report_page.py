import base64
import dataclasses
import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from entries import entry, png

from experiments.report_page import STYLESHEET, Missing, duration, number, render
from mcomb.errors import UserError

VOID = {"img", "meta"}
HOSTILE = """<b>"x" & 'y'</b>"""


class Page(HTMLParser):
    """Parse a page's elements and text, and fail on elements that are not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.words = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), f"{tag} has an attribute twice"
        self.elements.append((tag, dict(attrs), tuple(self.open)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append((data, tuple(self.open)))

    def all(self, *tags):
        return [attributes for tag, attributes, _ in self.elements if tag in tags]

    def text(self, inside="html"):
        return " ".join("".join(data for data, path in self.words if inside in path).split())


def rows(text):
    """Return the text of all cells, by table and row."""
    return [
        [re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.S)]
        for row in re.findall(r"<tr[^>]*>(.*?)</tr>", text, re.S)
    ]


FULL = render(
    "A report",
    [
        entry(),
        entry(experiment="bernoulli", agrees=False, seconds=4000),
        entry(experiment="three_models", agrees=None, barriers=None, paper=None),
    ],
    [
        Missing("robustness", "python -m experiments.robustness", "MLP on digits, width 32"),
        Missing("width", "python -m experiments.width --width 32", "MLP on digits, width 32"),
    ],
)


@pytest.mark.parametrize("text", [FULL, render("Nothing", [], []), render("One", [entry()], [])])
def test_page_is_well_formed(text):
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    assert page.all("html") == [{"lang": "en"}]
    levels = [int(tag[1]) for tag, *_ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(below - above <= 1 for above, below in pairwise(levels))
    assert all("scope" in attributes for attributes in page.all("th"))
    assert all(path[-1] == "div" for tag, _, path in page.elements if tag == "table")
    assert all(attributes["tabindex"] == "0" for attributes in page.all("div") if attributes["class"] == "scroll")
    assert all("figure" in path for tag, _, path in page.elements if tag == "figcaption")
    assert all({"figure", "a"} & {*path} for tag, _, path in page.elements if tag == "img")


def test_page_is_self_contained():
    page = Page(FULL)
    assert not page.all("script", "link", "iframe", "object", "embed", "form", "base")
    for _, attributes, _ in page.elements:
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("src", "data:image/png;base64,").startswith("data:image/png;base64,")
        assert attributes.get("href", "#").startswith("#")
    assert "url(" not in STYLESHEET
    assert "@import" not in STYLESHEET
    assert "//" not in STYLESHEET


def test_links_have_unique_targets():
    entries = [entry(), entry(), entry(experiment="Ünïform, s=1"), entry(place="elsewhere")]
    page = Page(render("Twice", entries, [Missing("a", "b", "elsewhere")]))
    ids = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
    links = [attributes["href"].removeprefix("#") for attributes in page.all("a")]
    assert len(set(ids)) == len(ids)
    assert {*ids} - {*links} == {"summary", "background"}
    assert {*links} <= {*ids}
    assert not any(re.search(r"[^\w-]", name) for name in ids)


def test_figures_have_bytes_alt_text_and_size():
    image = Page(FULL).all("img")[0]
    assert base64.b64decode(image["src"].partition(",")[2]) == png()
    assert image["alt"] == "loss and accuracy over s"
    assert (image["width"], image["height"]) == ("7", "5")


@pytest.mark.parametrize("broken", [b"", png()[:20], b"GIF89a" + png()])
def test_figure_that_is_no_png_is_rejected_by_name(broken):
    with pytest.raises(UserError, match=r"figure of uniform is not a PNG"):
        render("Broken", [dataclasses.replace(entry(), png=broken)], [])


def test_results_are_escaped():
    texts = ("experiment", "title", "claim", "finding", "alt", "command")
    environment = {
        "python": HOSTILE,
        "platform": HOSTILE,
        "packages": {HOSTILE: HOSTILE},
        "devices": [HOSTILE],
        "revision": HOSTILE,
    }
    left = [Missing(HOSTILE, HOSTILE, HOSTILE)]
    hostile = entry(
        place=HOSTILE,
        **dict.fromkeys(texts, HOSTILE),
        config={"setup": HOSTILE, "width": HOSTILE, HOSTILE: HOSTILE},
        environment=environment,
        barriers={HOSTILE: {"test": {"loss": 1.0}}},
    )
    text = render(HOSTILE, [hostile, entry(environment={**environment, "python": "3"})], left)
    page = Page(text)
    assert "<b>" not in text
    assert not page.all("b")
    assert page.all("img")[0]["alt"] == HOSTILE
    for place in ("h1", "title", "h2", "dd", "figcaption", "caption", "th", "a", "code", "li"):
        assert HOSTILE in page.text(place), place


def test_header_counts_verdicts():
    text = Page(FULL).text("header")
    assert "Of 3 experiments, 1 agrees with the paper, 1 does not, 1 has no verdict. 2 are still to run." in text
    assert "mlp-digits at width 32" in text
    assert "No experiment has been run yet." in Page(render("Nothing", [], [])).text("header")


def test_header_counts_effects_of_other_networks():
    entries = [entry(is_papers=False), entry(experiment="bernoulli", is_papers=False, agrees=False)]
    text = render("Others", entries, [])
    assert "Of 2 experiments, 1 shows the paper’s effect, 1 does not, 0 have no verdict." in Page(text).text("header")
    assert [row[0] for row in rows(text) if row[0][:7] in {"uniform", "bernoul"}][:2] == [
        "uniform✓shows",
        "bernoulli✗does not show",
    ]
    assert 'class="verdict differs"' not in text
    both = Page(render("Both", [*entries, entry()], [])).text("header")
    assert "1 agrees with the paper, 0 do not, 1 shows the paper’s effect, 1 does not, 0 have no verdict." in both


def test_verdicts_have_words_and_marks():
    cells = [row[0] for row in rows(FULL) if set(row[0]) & set("✓✗○")]
    assert cells == ["uniform✓agrees", "bernoulli✗does not agree", "three_models○no verdict"]
    assert [Page(FULL).text("dd").count(words) for words in ("does not agree", "no verdict")] == [1, 1]


def test_summary_has_barriers_of_run_and_paper():
    found = rows(FULL)
    at = found.index(["uniform✓agrees", "0.052", "1.457", "0.011", "0.447"])
    assert found[at + 1] == ["paper, aligned", "0.044", "–", "0.012", "–"]
    assert ["three_models○no verdict", *("–",) * 4] in found


def test_summary_compares_several_networks():
    places = [f"MLP on digits, width {width}" for width in (2, 4)]
    entries = [entry(place=places[0]), entry("linear", places[0], agrees=None, barriers=None), entry(place=places[1])]
    page = render("Two", entries, [Missing("linear", "python …", places[1])])
    found = rows(page.replace("\u00a0", " "))
    head = found.index(["experiment", *places])
    assert found[head + 1 : head + 3] == [
        ["uniform", "✓agrees0.011 / 0.447", "✓agrees0.011 / 0.447"],
        ["linear", "○no verdict", "not run"],
    ]
    assert [f"barriers on the test set, {place}" in page for place in places] == [True, True]
    assert ["uniform, MLP on digits, width 4", "1 min 12 s"] in found


def test_section_has_barriers_of_curves_and_paper():
    found = rows(render("One", [entry()], []))
    first = found.index(["naive", "1.410", "1.457", "0.420", "0.447"])
    assert found[first + 1 : first + 3] == [
        ["aligned", "0.042", "0.052", "0.000", "0.011"],
        ["paper, aligned", "–", "0.044", "–", "0.012"],
    ]


@pytest.mark.parametrize("barriers", [None, {}])
def test_section_without_barriers_has_no_table(barriers):
    text = render("None", [entry(barriers=barriers, paper=None, agrees=None)], [])
    assert "Barriers of" not in text


def test_barriers_may_lack_splits_and_metrics():
    found = rows(render("Part", [entry(barriers={"linear": {"test": {"accuracy": 0.5}}}, paper=None)], []))
    assert ["linear", "–", "–", "–", "0.500"] in found
    assert ["uniform✓agrees", *("–",) * 4] in found


def test_section_has_claim_finding_settings_and_command():
    page = Page(FULL)
    assert "MLP on digits, width 32: uniform coefficients" in page.text("h2")
    assert "every mixture works" in page.text("dd")
    assert "every mixture worked" in page.text("dd")
    assert "Figure 1. uniform: setup mlp-digits, width 32, seed 0, batch size 100." in page.text("figcaption")
    assert "python -m experiments.uniform --setup mlp-digits" in page.text("code")


def test_missing_experiments_are_listed_with_commands():
    text = Page(FULL[FULL.index('<h3 id="missing">') : FULL.index("</section>\n</main>")]).text("li")
    assert text == "robustness python -m experiments.robustness width python -m experiments.width --width 32"
    assert "All experiments of this page have results" in Page(render("All", [entry()], [])).text()


def test_environments_are_listed_once_with_experiments():
    same = Page(FULL).text("dd")
    assert same.count("2 × cpu:cpu") == 1
    assert "jax 0.10.2, scipy not installed" in same
    assert "0123abcd" in same
    other = {**entry().results.environment, "devices": ["tpu:TPU v3"] * 8, "revision": None}
    mixed = Page(render("Two", [entry(), entry(experiment="width", environment=other)], [])).text("dd")
    assert re.search(r"uniform ?0123abcd.*2 × cpu:cpu.*width ?unknown.*8 × tpu:TPU v3", mixed)


def test_environment_may_be_incomplete():
    bare = {**entry().results.environment, "packages": {}, "devices": [], "revision": None}
    page = Page(render("Bare", [entry(environment=bare)], []))
    assert "Revision unknown Platform Linux-6.1 Python 3.11.2 Durations" in page.text()


def test_durations_are_listed_with_their_sum():
    found = rows(FULL)
    assert ["uniform", "1 min 12 s"] in found
    assert ["bernoulli", "1 h 06 min"] in found
    assert ["all", "1 h 09 min"] in found


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0114, "0.011"),
        (0, "0.000"),
        (-0.0001, "0.000"),
        (-0.25, "−0.250"),
        (12.3456, "12.346"),
        (123456.0, "1.23e+05"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
        (None, "–"),
    ],
)
def test_barriers_have_three_decimals(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.6, "1 min 00 s"),
        (3599.6, "1 h 00 min"),
        (90061, "25 h 01 min"),
    ],
)
def test_durations_have_two_units(seconds, text):
    assert duration(seconds) == text


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_colours_meet_wcag_aa_contrast(mode):
    palettes = re.findall(r":root \{(.*?)\}", STYLESHEET, re.S)
    assert len(palettes) == 2
    colours = dict(re.findall(r"--(\w+): (#\w{6})", palettes[mode]))
    for ground in ("page", "panel"):
        for ink in colours.keys() - {"page", "panel", "rule"}:
            dark, bright = sorted(luminance(colours[name]) for name in (ground, ink))
            assert (bright + 0.05) / (dark + 0.05) >= 4.5, (ink, ground)
