"""All results on one page: a single HTML file that opens, prints and is mailed without anything beside it."""

import base64
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from mcomb.errors import UserError
from mcomb.lab.runs.results import METRICS, SPLITS


@dataclass(frozen=True)
class Entry:
    """An experiment that was run: its results.json and its figure, what it is called, and of which networks it is.

    `flags` are those of its run that differ from the page's.
    """

    results: Mapping[str, Any]
    png: bytes
    name: str
    place: str
    flags: str = ""


@dataclass(frozen=True)
class Missing:
    """An experiment that was not run: what it is called, its command, and of which networks it is."""

    name: str
    command: str
    place: str


Item = Entry | Missing


VERDICTS = {  # by `agrees`: a class for the style sheet, a mark and words, so that colour is never alone
    True: ("agrees", "✓", "agrees"),
    False: ("differs", "✗", "does not agree"),
    None: ("open", "○", "no verdict"),
}
OTHERS = {  # the same of networks that the paper does not have
    True: ("agrees", "✓", "shows"),
    False: ("open", "✗", "does not show"),
    None: ("open", "○", "no verdict"),
}
ANSWERS = {True: "yes", False: "no", None: "no verdict"}  # to questions that the paper leaves open
PNG = b"\x89PNG\r\n\x1a\n"
THUMBNAIL = (320, 240)  # pixels at most: twice as many as the style sheet's, for fine screens
NOTHING = "–"  # a cell without a number
Number = float | int  # JSON has both

STYLE = Path(__file__).with_name("report.css").read_text()


class Html(str):
    """Text that is HTML already; all other text is escaped on its way in."""

    __slots__ = ()


def joined(parts: Iterable[str]) -> Html:
    """The parts one after another, escaped unless they are HTML."""
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


def tag(name: str, *children: str, **attributes: str | int) -> Html:
    """An element; an attribute that Python reserves is given with an underscore after it, as in `class_`."""
    given = "".join(f' {key.strip("_").replace("_", "-")}="{escape(str(it))}"' for key, it in attributes.items())
    closing = "" if name in {"img", "meta"} else f"{joined(children)}</{name}>"
    end = "" if name in {"a", "cite", "code", "span", "strong", "td", "th"} else "\n"
    return Html(f"<{name}{given}>{closing}{end}")


def number(value: Number | None) -> str:
    """A barrier with the paper's three decimals, and never minus nothing."""
    if value is None:
        return NOTHING
    return (f"{value:z.3f}" if abs(value) < 1000 else f"{value:.3g}").replace("-", "−")


def counted(count: int, one: str, many: str) -> str:
    """A count before the words that go with it."""
    return f"{count} {one if count == 1 else many}"


def duration(seconds: Number) -> str:
    """A time in the two units that matter."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def settings(config: Mapping[str, Any]) -> str:
    """Whatever is set in a config, in words."""

    def flat(values: Mapping[str, Any]) -> Iterator[str]:
        for name, value in values.items():
            if isinstance(value, Mapping):
                yield from flat(value)
            elif value is True:
                yield name
            elif value is not None and value is not False:
                yield f"{name.replace('_', ' ')} {value}"

    return ", ".join(dict.fromkeys(flat(config)))  # a recipe repeats the flags that changed it


def size(png: bytes, name: str) -> tuple[int, int]:
    """The width and height that a PNG's first chunk gives, so that the page is laid out before it is decoded."""
    if not png.startswith(PNG) or len(png) < 24:
        raise UserError(f"the figure of {name} is not a PNG file: run the experiment again")
    return int.from_bytes(png[16:20]), int.from_bytes(png[20:24])


def embedded(png: bytes) -> str:
    """A picture as an address."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


def thumbnail(entry: Entry) -> bytes:
    """A small copy of a figure, in few colours: all of them weigh about as much as one or two figures."""
    with Image.open(io.BytesIO(entry.png)) as picture:
        small = picture.convert("RGB")
    small.thumbnail(THUMBNAIL, Image.Resampling.LANCZOS)
    file = io.BytesIO()
    small.quantize(32).save(file, "png", optimize=True)
    return file.getvalue()


def anchor(index: int, entry: Entry) -> str:
    """The id of an entry's section, its own even when an experiment was run twice."""
    return f"{re.sub(r'[^a-z0-9]+', '-', entry.name.lower())}-{index}"


def places_of(items: Iterable[Item]) -> list[str]:
    """The networks that a page is about, in their order."""
    return list(dict.fromkeys(item.place for item in items))


def full_name(item: Item, items: Sequence[Item]) -> str:
    """What an experiment is called among others, with its networks where there are several."""
    return f"{item.name}, {item.place}" if len(places_of(items)) > 1 else item.name


def words_of(results: Mapping[str, Any]) -> tuple[str, str, str]:
    """The class, the mark and the words of a verdict."""
    kind, mark, words = (VERDICTS if results["is_papers"] else OTHERS)[results["agrees"]]
    return kind, mark, ANSWERS[results["agrees"]] if results["is_open"] else words


def verdict(results: Mapping[str, Any]) -> Html:
    """The mark and the words of a verdict."""
    kind, mark, words = words_of(results)
    return tag("span", tag("span", mark, aria_hidden="true"), words, class_=f"verdict {kind}")


def command(text: str) -> Html:
    """A command to copy: one click selects all of it."""
    # Browsers would break a line after the hyphens of a flag.
    parts = re.split(r"(?<!\S)(--[\w-]+)", text)
    return tag("pre", tag("code", *(tag("span", part) if i % 2 else part for i, part in enumerate(parts))))


def numbers(values: Iterable[Number | None]) -> Html:
    """Cells of a table's row."""
    return joined(tag("td", number(value), class_="number") for value in values)


def scrolling(caption: str, *parts: str, **attributes: str) -> Html:
    """A table of these parts in a box that scrolls by itself, also from the keyboard."""
    whole = tag("table", tag("caption", tag("span", caption)), *parts, **attributes)
    return tag("div", whole, class_="scroll", role="group", aria_label=caption, tabindex=0)


def table(caption: str, corner: Sequence[str], below: Sequence[str], rows: Iterable[str]) -> Html:
    """A table of barriers: the `corner` columns, then those `below` loss and those below accuracy."""
    groups = [tag("colgroup", span=len(corner)), *(tag("colgroup", span=len(below)) for _ in METRICS)]
    top = [
        *(tag("th", name, scope="col", rowspan=2) for name in corner),
        *(tag("th", name, scope="colgroup", colspan=len(below), class_="number") for name in METRICS),
    ]
    second = [tag("th", name, scope="col", class_="number") for _ in METRICS for name in below]
    head = tag("thead", tag("tr", *top), tag("tr", *second))
    return scrolling(caption, *groups, head, tag("tbody", *rows))


def header(title: str, entries: Sequence[Entry], missing: Sequence[Missing]) -> Html:
    """What this page is, of which networks, and how it went."""
    found = Counter(
        "open" if it["is_open"] else it["agrees"] if it["agrees"] is None else (it["agrees"], it["is_papers"])
        for it in (entry.results for entry in entries)
    )
    own, others = (any(found[agrees, is_papers] for agrees in (True, False)) for is_papers in (True, False))
    verdicts = [
        *([counted(found[True, True], "agrees with the paper", "agree with the paper")] if own else []),
        *([counted(found[False, True], "does not", "do not")] if own else []),
        *([counted(found[True, False], "shows the paper’s effect", "show the paper’s effect")] if others else []),
        *([counted(found[False, False], "does not", "do not")] if others else []),
        counted(found[None], "has no verdict", "have no verdict"),
        *([counted(found["open"], "answers", "answer") + " what it leaves open"] if found["open"] else []),
    ]
    outcome = f"Of {counted(len(entries), 'experiment', 'experiments')}, {', '.join(verdicts)}."
    configs = [entry.results["config"] for entry in entries]
    networks = dict.fromkeys(f"{config.get('setup')} at width {config.get('width')}" for config in configs)
    left = (counted(len(missing), "is ", "are "), tag("a", "still to run", href="#missing"), ".")
    flagged = sum(bool(entry.flags) for entry in entries)
    noted = counted(flagged, "was", "were") + " run with other flags than the page’s, which the sections name. "
    return tag(
        "header",
        tag("h1", title),
        tag(
            "p",
            "Two networks trained from different seeds; the neurons of one re-ordered to match the other; then "
            "their weights mixed element by element, and every mixture measured. This page sets what was measured "
            "beside what Csiszárik, Kiss et al. found in ",
            tag("cite", "Mode Combinability: Exploring Convex Combinations of Permutation Aligned Models"),
            ".",
        ),
        tag(
            "p",
            tag("strong", outcome if entries else "No experiment has been run yet."),
            " ",
            noted if flagged else "",
            *(left if missing else ()),
            class_="lede",
        ),
        tag("p", "Networks: ", "; ".join(networks), ".", class_="note") if entries else "",
    )


def gallery(entries: Sequence[Entry]) -> Html:
    """All figures, small, each a link to its section."""
    places = places_of(entries)

    def item(index: int, entry: Entry) -> Html:
        small = thumbnail(entry)
        width, height = size(small, entry.name)
        kind, mark, words = words_of(entry.results)
        picture = tag("img", src=embedded(small), alt="", width=width, height=height)  # the link has the words
        verdict = tag("span", mark, class_=f"verdict {kind}", aria_hidden="true")
        text = tag("span", verdict, " ", entry.name, class_="name")
        return tag("li", tag("a", picture, text, href=f"#{anchor(index, entry)}", aria_label=f"{entry.name}: {words}"))

    def pictures(place: str) -> Html:
        items = [item(index, entry) for index, entry in enumerate(entries, 1) if entry.place == place]
        return joined((tag("h3", place) if len(places) > 1 else "", tag("ul", *items, class_="gallery")))

    return tag("section", tag("h2", "All figures"), *map(pictures, places), id="figures")


def barrier_of(results: Mapping[str, Any], curve: str) -> Mapping[str, Number]:
    """The barriers of a curve on the test set, as far as there are any."""
    found: Mapping[str, Number] = (results.get("barriers") or {}).get(curve, {}).get("test", {})
    return found


def summary(entries: Sequence[Entry], missing: Sequence[Missing]) -> Html:
    """A line for each experiment, with its verdict and barriers; of several networks first all side by side."""
    places = places_of([*entries, *missing])

    def row(index: int, entry: Entry) -> Html:
        results = entry.results
        sources = (*(barrier_of(results, curve) for curve in ("aligned", "naive")), results.get("paper") or {})
        return tag(
            "tr",
            tag("th", tag("a", entry.name, href=f"#{anchor(index, entry)}"), scope="row"),
            tag("td", verdict(results)),
            numbers(source.get(metric) for metric in METRICS for source in sources),
        )

    def of(place: str) -> Html:
        rows = [row(index, entry) for index, entry in enumerate(entries, 1) if entry.place == place]
        caption = "Barriers on the test set" + (f", {place}" if len(places) > 1 else "")
        return table(caption, ("experiment", "verdict"), ("aligned", "naive", "paper"), rows) if rows else Html()

    return tag(
        "section",
        tag("h2", "Summary"),
        side_by_side(entries, missing, places) if len(places) > 1 else "",
        *map(of, places),
        tag(
            "p",
            "A barrier is the worst of all sampled networks against the mean of the two that were mixed: 0 is no "
            "worse. The paper does not say of which split its barriers are; they are taken to be of the test set. Only "
            "results of the paper’s own networks can agree with it: ResNet-20 and Tiny-10 on CIFAR-10, at its widths. "
            "For all others the verdict is whether the effect shows.",
            class_="note",
        ),
        id="summary",
    )


def side_by_side(entries: Sequence[Entry], missing: Sequence[Missing], places: Sequence[str]) -> Html:
    """A table of all experiments by all networks: verdicts, and how much accuracy aligned and naive mixtures lose."""
    found = {(entry.name, entry.place): (index, entry) for index, entry in enumerate(entries, 1)}
    left = {(item.name, item.place) for item in missing}

    def cell(name: str, place: str) -> Html:
        if (name, place) not in found:
            return tag("td", tag("a", "not run", href="#missing") if (name, place) in left else NOTHING)
        index, entry = found[name, place]
        lost = [barrier_of(entry.results, curve).get("accuracy") for curve in ("aligned", "naive")]
        text = f"{number(lost[0])} / {number(lost[1])}" if lost != [None, None] else ""
        link = tag("a", verdict(entry.results), href=f"#{anchor(index, entry)}")
        return tag("td", link, tag("span", text, class_="lost"))

    head = tag(
        "tr",
        tag("th", "experiment", scope="col"),
        *(tag("th", place.replace("width ", "width\u00a0"), scope="col") for place in places),
    )
    every: list[Item] = [*entries, *missing]
    names = dict.fromkeys(item.name for item in every)
    rows = [tag("tr", tag("th", name, scope="row"), *(cell(name, place) for place in places)) for name in names]
    caption = "Verdicts, and accuracy barriers on the test set: aligned / naive"
    return scrolling(caption, tag("thead", head), tag("tbody", *rows), class_="matrix")


def barriers(results: Mapping[str, Any]) -> Html:
    """The barriers of every curve over the paper's, or nothing if there are none."""
    found = results.get("barriers") or {}
    rows = [
        tag(
            "tr",
            tag("th", curve, scope="row"),
            numbers(by_split.get(split, {}).get(metric) for metric in METRICS for split in SPLITS),
        )
        for curve, by_split in found.items()
    ]
    if paper := results.get("paper"):
        cells = ({"test": paper}.get(split, {}).get(metric) for metric in METRICS for split in SPLITS)
        rows.append(tag("tr", tag("th", "paper, aligned", scope="row"), numbers(cells), class_="paper"))
    return table(f"Barriers of {results['experiment']}", ("curve",), SPLITS, rows) if rows else Html()


def section(index: int, entry: Entry) -> Html:
    """One experiment: what the paper found, what was measured, the figure, the numbers, the command."""
    results = entry.results
    setting, colon, name = results["title"].rpartition(": ")
    width, height = size(entry.png, entry.name)
    source = embedded(entry.png)
    return tag(
        "section",
        tag("h2", tag("span", setting + colon, class_="of") if setting else "", tag("span", name)),
        tag(
            "dl",
            tag("dt", "The paper leaves open" if results["is_open"] else "The paper found"),
            tag("dd", results["claim"]),
            tag("dt", "Measured here"),
            tag("dd", results["finding"]),
            tag("dt", "Verdict"),
            tag("dd", verdict(results)),
        ),
        tag(
            "figure",
            tag("div", tag("img", src=source, alt=results["alt"], width=width, height=height), class_="card"),
            tag("figcaption", f"Figure {index}. {entry.name}: {settings(results['config'])}."),
        ),
        barriers(results),
        tag("p", f"This run has other flags than the page: {entry.flags}.", class_="note") if entry.flags else "",
        tag("p", "The command that measures and draws this:", class_="label"),
        command(results["command"]),
        id=anchor(index, entry),
    )


def listed(items: Iterable[str]) -> Html:
    """The items with commas between them, none broken over two lines nor from its comma."""
    texts = list(items)
    return Html(" ".join(tag("span", text) for text in (*(f"{text}," for text in texts[:-1]), *texts[-1:])))


def environments(entries: Sequence[Entry]) -> Html:
    """Every environment that results come from, once each; which results, if there is more than one."""
    users: dict[str, list[str]] = {}
    for entry in entries:
        users.setdefault(json.dumps(entry.results["environment"]), []).append(full_name(entry, entries))

    def block(text: str, experiments: list[str]) -> Html:
        environment = json.loads(text)
        packages, devices = environment["packages"], Counter(environment["devices"])
        facts = {
            "Experiments": listed(experiments) if len(users) > 1 else "",
            "Revision": environment["revision"] or "not known",
            "Devices": listed(f"{count} × {kind}" for kind, count in devices.items()),
            "Platform": environment["platform"],
            "Python": environment["python"],
            "Packages": listed(f"{name} {version or 'not installed'}" for name, version in packages.items()),
        }
        return tag("dl", *(joined((tag("dt", name), tag("dd", value))) for name, value in facts.items() if value))

    return joined(block(text, experiments) for text, experiments in users.items())


def durations(entries: Sequence[Entry]) -> Html:
    """How long each experiment took, and all of them."""

    def row(name: str, seconds: Number) -> Html:
        return tag("tr", tag("th", name, scope="row"), tag("td", duration(seconds), class_="number"))

    head = tag("tr", tag("th", "experiment", scope="col"), tag("th", "time", scope="col", class_="number"))
    times = [(full_name(entry, entries), entry.results["seconds"]) for entry in entries]
    total = row("all", sum(seconds for _, seconds in times))
    body = tag("tbody", *(row(*time) for time in times))
    return scrolling("Wall-clock time", tag("thead", head), body, tag("tfoot", total), class_="short")


def background(entries: Sequence[Entry], missing: Sequence[Missing]) -> Html:
    """Where and how long everything ran, and what has not."""
    every: list[Item] = [*entries, *missing]
    left = [tag("li", tag("p", full_name(item, every), class_="label"), command(item.command)) for item in missing]
    ran = (tag("h3", "Environment"), environments(entries), tag("h3", "Durations"), durations(entries))
    return tag(
        "section",
        tag("h2", "Behind the results"),
        *(ran if entries else ()),
        tag("h3", "Still to run", id="missing"),
        tag("ul", *left, class_="left") if left else tag("p", "Nothing: every experiment of this page has been run."),
        id="background",
    )


def render(title: str, entries: Sequence[Entry], missing: Sequence[Missing]) -> str:
    """One HTML page of experiments, in their order, with those that were not run at its end."""
    # The policy is a promise that the browser keeps: nothing is fetched, nothing is run.
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Html(STYLE)),
    )
    sections = [section(index, entry) for index, entry in enumerate(entries, 1)]
    top = (gallery(entries), summary(entries, missing)) if entries else ()
    main = tag("main", *top, *sections, background(entries, missing))
    body = tag("body", header(title, entries, missing), main)
    return "<!DOCTYPE html>\n" + tag("html", head, body, lang="en")
