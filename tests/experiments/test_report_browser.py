"""The report in a real browser: requests, messages, links, pictures, widths, colour schemes and print."""

import re

import pytest
from browser import Browser, find_browser
from entries import entry, png

from experiments.report_page import Missing, render

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no Chromium or Chrome is installed")

PLACES = ("MLP on digits, width 2", "Tiny-10 on CIFAR-10, width 32")
NAMES = ("uniform", "transitivity", "linear, beyond")
LONG = "python -m experiments.transitivity --setup mlp-digits --out /a/rather/long/path/without/any/space/in/it" * 2
A4 = 673  # pixels between the margins

# For every element with its own text: size, colour and background colour.
TEXTS = """
[...document.querySelectorAll('body *')].filter(element =>
    [...element.childNodes].some(node => node.nodeType == 3 && node.data.trim())
).map(element => {
    let behind = element
    const ground = at => getComputedStyle(at).backgroundColor
    while (ground(behind) == 'rgba(0, 0, 0, 0)' && behind.parentElement) behind = behind.parentElement
    const style = getComputedStyle(element)
    return [element.textContent.trim().slice(0, 30), parseFloat(style.fontSize), style.color, ground(behind)]
})
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of two setups in a browser."""
    agrees = dict(zip(NAMES, (True, False, None), strict=True))
    entries = [
        entry(name, place, png(1200, 800), agrees=agrees[name], command=LONG) for place in PLACES for name in NAMES
    ]
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render("; ".join(PLACES), entries, [Missing("width", LONG, PLACES[1])]))
    with Browser() as browser:
        browser.look()
        browser.open(path)
        yield browser


def luminance(colour):
    channels = [int(channel) / 255 for channel in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_page_loads_without_messages_and_requests(page):
    assert page.problems() == []
    assert page.evaluate("document.compatMode") == "CSS1Compat"


def test_page_shows_every_picture(page):
    pictures = page.evaluate("[...document.images].map(it => [it.complete, it.naturalWidth, it.clientWidth])")
    assert len(pictures) == len(PLACES) * len(NAMES)
    assert all(complete and width > 0 and shown > 0 for complete, width, shown in pictures), pictures


def test_page_links_reach_their_targets(page):
    page.look()
    script = """[...document.links].map(link => {
        link.click()
        const target = document.getElementById(link.hash.slice(1))
        const top = target ? target.getBoundingClientRect().top : null
        return [link.hash, location.hash, top]
    })"""
    links = page.evaluate(script)
    assert len(links) > 2 * len(NAMES)
    assert all(wanted == got and top is not None and -1 <= top < 900 for wanted, got, top in links), links


@pytest.mark.parametrize("width", [320, 390, 1200])
def test_page_is_readable_at_any_width(page, width):
    page.look(width, 844)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("innerWidth") == width
    small = [(text, size) for text, size, *_ in page.evaluate(TEXTS) if size < 14]
    assert not small
    beyond = "[...document.querySelectorAll('body *')].filter(it => it.getBoundingClientRect().right > innerWidth + 1)"
    clipped = page.evaluate(
        f"{beyond}.filter(it => !it.closest('.scroll, .card')).map(it => it.outerHTML.slice(0, 80))"
    )
    assert not clipped


def test_page_tables_fit_a_phone(page):
    page.look(390, 844)
    boxes = page.evaluate("[...document.querySelectorAll('.scroll')].map(it => [it.scrollWidth, it.clientWidth])")
    assert len(boxes) > len(PLACES)
    assert all(wanted <= shown for wanted, shown in boxes), boxes


def test_page_figures_scroll_at_a_readable_size_on_a_phone(page):
    page.look(390, 844)
    sizes = (
        "[...document.querySelectorAll('.card')].map(it => [it.firstChild.clientWidth, it.scrollWidth, it.clientWidth])"
    )
    boxes = page.evaluate(sizes)
    assert len(boxes) == len(PLACES) * len(NAMES)
    assert all(shown >= 560 and shown <= wanted and box < 390 for shown, wanted, box in boxes), boxes


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_text_has_contrast_in_both_colour_schemes(page, scheme):
    page.look(scheme=scheme)
    texts = page.evaluate(TEXTS)
    ground = luminance(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert ground < 0.02 if scheme == "dark" else ground > 0.9
    for text, _, *colours in texts:
        dark, bright = sorted(map(luminance, colours))
        assert (bright + 0.05) / (dark + 0.05) >= 4.5, (text, colours)
    white = page.evaluate("[...document.images].map(it => getComputedStyle(it.closest('.card') ?? it).backgroundColor)")
    assert {*white} == {"rgb(255, 255, 255)"}


def test_page_prints_without_clipping(page):
    page.look(A4, 1000, medium="print", scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= A4
    boxes = "[...document.querySelectorAll('.scroll, pre, dd')]"
    assert page.evaluate(f"{boxes}.filter(it => it.scrollWidth > it.clientWidth).map(it => it.outerHTML)") == []
    assert luminance(page.evaluate("getComputedStyle(document.body).color")) < 0.05  # paper is white
    printed = page.pdf()
    assert printed.startswith(b"%PDF")
    pages = len(re.findall(rb"/Type\s*/Page\b", printed))
    assert len(PLACES) * len(NAMES) <= pages <= 4 + len(PLACES) * len(NAMES)
