"""Render results as one self-contained HTML page."""

import base64
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from mcomb.errors import UserError
from mcomb.lab.runs.results import METRICS, SPLITS, Number, Results, barriers_of


@dataclass(frozen=True)
class Entry:
    """An experiment with results: its results.json, figure, name, and setup and width.

    `flags` lists the flags of its run that differ from the page's.
    """

    results: Results
    png: bytes
    name: str
    place: str
    flags: str = ""


@dataclass(frozen=True)
class Missing:
    """An experiment without results: its name, command, and setup and width."""

    name: str
    command: str
    place: str


Item = Entry | Missing


VERDICTS = {  # CSS class, mark and words, so that colour is never the only cue
    True: ("agrees", "✓", "agrees"),
    False: ("differs", "✗", "does not agree"),
    None: ("open", "○", "no verdict"),
}
OTHER_VERDICTS = {  # for networks that are not in the paper
    True: ("agrees", "✓", "shows"),
    False: ("open", "✗", "does not show"),
    None: ("open", "○", "no verdict"),
}
ANSWERS = {True: "yes", False: "no", None: "no verdict"}  # for questions that the paper leaves open
PNG = b"\x89PNG\r\n\x1a\n"
NOTHING = "–"  # an empty cell
CURVES = ("aligned", "naive")

STYLESHEET = Path(__file__).with_name("report.css").read_text(encoding="utf-8")


class Html(str):
    """HTML that must not be escaped again."""

    __slots__ = ()


def joined(parts: Iterable[str]) -> Html:
    """Concatenate parts and escape those that are not `Html`."""
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


def tag(name: str, *children: str, **attributes: str | int) -> Html:
    """Return an element; an underscore after an attribute avoids Python's keywords, as in `class_`."""
    given = "".join(f' {key.strip("_").replace("_", "-")}="{escape(str(it))}"' for key, it in attributes.items())
    closing = "" if name in {"img", "meta"} else f"{joined(children)}</{name}>"
    end = "" if name in {"a", "cite", "code", "span", "strong", "td", "th"} else "\n"
    return Html(f"<{name}{given}>{closing}{end}")


def number(value: Number | None) -> str:
    """Format a barrier with three decimals, as in the paper, without negative zero."""
    if value is None:
        return NOTHING
    return (f"{value:z.3f}" if abs(value) < 1000 else f"{value:.3g}").replace("-", "−")


def counted(count: int, one: str, many: str) -> str:
    """Return a count with the singular or plural words."""
    return f"{count} {one if count == 1 else many}"


def duration(seconds: Number) -> str:
    """Format a time in its two largest units."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def settings(config: Mapping[str, Any]) -> str:
    """Format all values of a config that are set."""

    def flat(values: Mapping[str, Any]) -> Iterator[str]:
        for name, value in values.items():
            if isinstance(value, Mapping):
                yield from flat(value)
            elif value is True:
                yield name
            elif value is not None and value is not False:
                yield f"{name.replace('_', ' ')} {value}"

    return ", ".join(dict.fromkeys(flat(config)))  # without duplicates, because a recipe repeats its flags


def size(png: bytes, name: str) -> tuple[int, int]:
    """Return width and height from a PNG's header, so that browsers can lay out the page before decoding."""
    if not png.startswith(PNG) or len(png) < 24:
        raise UserError(f"The figure of {name} is not a PNG file: run the experiment again.")
    return int.from_bytes(png[16:20]), int.from_bytes(png[20:24])


def embedded(png: bytes) -> str:
    """Return a picture as a data URL."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


def anchor(index: int, entry: Entry) -> str:
    """Return the id of an entry's section, unique even if an experiment appears twice."""
    return f"{re.sub(r'[^a-z0-9]+', '-', entry.name.lower())}-{index}"


def places_of(items: Iterable[Item]) -> list[str]:
    """Return all setups and widths of a page in order."""
    return list(dict.fromkeys(item.place for item in items))


def full_name(item: Item, items: Sequence[Item]) -> str:
    """Return an experiment's name, with its setup and width if the page has several."""
    return f"{item.name}, {item.place}" if len(places_of(items)) > 1 else item.name


def words_of(results: Results) -> tuple[str, str, str]:
    """Return the CSS class, mark and words of a verdict."""
    kind, mark, words = (VERDICTS if results.is_papers else OTHER_VERDICTS)[results.agrees]
    return kind, mark, ANSWERS[results.agrees] if results.is_open else words


def verdict(results: Results) -> Html:
    """Render the mark and words of a verdict."""
    kind, mark, words = words_of(results)
    return tag("span", tag("span", mark, aria_hidden="true"), words, class_=f"verdict {kind}")


def command(text: str) -> Html:
    """Render a command; one click selects it."""
    # Spans keep browsers from breaking a line after the hyphens of a flag.
    parts = re.split(r"(?<!\S)(--[\w-]+)", text)
    return tag("pre", tag("code", *(tag("span", part) if i % 2 else part for i, part in enumerate(parts))))


def numbers(values: Iterable[Number | None]) -> Html:
    """Render the cells of a table row."""
    return joined(tag("td", number(value), class_="number") for value in values)


def scrolling(caption: str, *parts: str, **attributes: str) -> Html:
    """Render a table in a box that scrolls by itself, also from the keyboard."""
    whole = tag("table", tag("caption", tag("span", caption)), *parts, **attributes)
    return tag("div", whole, class_="scroll", role="group", aria_label=caption, tabindex=0)


def table(caption: str, corner: str, below: Sequence[str], rows: Iterable[str]) -> Html:
    """Render a table of barriers: the `corner` column, then the columns `below` loss and below accuracy."""
    groups = [tag("colgroup", span=1), *(tag("colgroup", span=len(below)) for _ in METRICS)]
    top = [
        tag("th", corner, scope="col", rowspan=2),
        *(tag("th", name, scope="colgroup", colspan=len(below), class_="number") for name in METRICS),
    ]
    second = [tag("th", name, scope="col", class_="number") for _ in METRICS for name in below]
    head = tag("thead", tag("tr", *top), tag("tr", *second))
    return scrolling(caption, *groups, head, tag("tbody", *rows))


def header(title: str, entries: Sequence[Entry], missing: Sequence[Missing]) -> Html:
    """Render the title, the introduction and the counts of verdicts."""
    found = Counter(
        "open" if it.is_open else it.agrees if it.agrees is None else (it.agrees, it.is_papers)
        for it in (entry.results for entry in entries)
    )
    own, others = (any(found[agrees, is_papers] for agrees in (True, False)) for is_papers in (True, False))
    verdicts = [
        *([counted(found[True, True], "agrees with the paper", "agree with the paper")] if own else []),
        *([counted(found[False, True], "does not", "do not")] if own else []),
        *([counted(found[True, False], "shows the paper’s effect", "show the paper’s effect")] if others else []),
        *([counted(found[False, False], "does not", "do not")] if others else []),
        counted(found[None], "has no verdict", "have no verdict"),
        *([counted(found["open"], "answers an open question", "answer open questions")] if found["open"] else []),
    ]
    outcome = f"Of {counted(len(entries), 'experiment', 'experiments')}, {', '.join(verdicts)}."
    configs = [entry.results.config for entry in entries]
    networks = dict.fromkeys(f"{config.get('setup')} at width {config.get('width')}" for config in configs)
    left = (counted(len(missing), "is ", "are "), tag("a", "still to run", href="#missing"), ".")
    flagged = sum(bool(entry.flags) for entry in entries)
    noted = counted(flagged, "was", "were") + " run with other flags, which are listed in the sections. "
    return tag(
        "header",
        tag("h1", title),
        tag(
            "p",
            "We train two networks from different seeds, permute the units of one to match the other, combine "
            "their weights element by element, and measure the combinations. This page compares the results with "
            "those of Csiszárik, Kiss et al., ",
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


def barrier_of(results: Results, curve: str) -> Mapping[str, Number]:
    """Return the test barriers of a curve, or an empty mapping."""
    found: Mapping[str, Number] = barriers_of(results).get(curve, {}).get("test", {})
    return found


def paper_of(results: Results) -> Mapping[str, Number]:
    """Return the paper's barriers, or an empty mapping."""
    return vars(results.paper) if results.paper else {}


def summary(entries: Sequence[Entry], missing: Sequence[Missing]) -> Html:
    """Render one row for each experiment, with its verdict and barriers."""
    places = places_of([*entries, *missing])

    def row(index: int, entry: Entry) -> Html:
        link = tag("a", entry.name, href=f"#{anchor(index, entry)}")
        head = tag("th", tag("span", link, verdict(entry.results), class_="named"), scope="row")
        own = tag("tr", head, numbers(barrier_of(entry.results, curve).get(m) for m in METRICS for curve in CURVES))
        return joined((own, paper_row(entry.results, CURVES)))

    def of(place: str) -> Html:
        rows = [row(index, entry) for index, entry in enumerate(entries, 1) if entry.place == place]
        caption = "Verdicts, and barriers on the test set" + (f", {place}" if len(places) > 1 else "")
        return table(caption, "experiment", CURVES, rows) if rows else Html()

    return tag(
        "section",
        tag("h2", "Summary"),
        side_by_side(entries, missing, places) if len(places) > 1 else "",
        *map(of, places),
        tag(
            "p",
            "A barrier is the difference between the worst sampled combination and the mean of the two networks. A "
            "barrier of 0 means no loss of performance. The paper does not name the split of its barriers; we assume "
            "the test set. Only the paper’s own networks can agree or disagree with the paper: ResNet-20 and Tiny-10 "
            "on CIFAR-10 at the paper’s widths. For all other networks, the verdict is whether they show the effect.",
            class_="note",
        ),
        id="summary",
    )


def side_by_side(entries: Sequence[Entry], missing: Sequence[Missing], places: Sequence[str]) -> Html:
    """Render a table of experiments by setups and widths, with verdicts and accuracy barriers."""
    found = {(entry.name, entry.place): (index, entry) for index, entry in enumerate(entries, 1)}
    left = {(item.name, item.place) for item in missing}

    def cell(name: str, place: str) -> Html:
        if (name, place) not in found:
            return tag("td", tag("a", "not run", href="#missing") if (name, place) in left else NOTHING)
        index, entry = found[name, place]
        lost = [barrier_of(entry.results, curve).get("accuracy") for curve in CURVES]
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


def paper_row(results: Results, below: Sequence[str]) -> Html:
    """Render the paper's barriers, of aligned combinations on the test set, as a row of a table of barriers."""
    if not (paper := paper_of(results)):
        return Html()
    cells = (paper.get(metric) if name in ("aligned", "test") else None for metric in METRICS for name in below)
    return tag("tr", tag("th", "paper, aligned", scope="row"), numbers(cells), class_="paper")


def barriers(results: Results) -> Html:
    """Render the barriers of every curve and of the paper, if there are any."""
    found = barriers_of(results)
    rows = [
        tag(
            "tr",
            tag("th", curve, scope="row"),
            numbers(by_split.get(split, {}).get(metric) for metric in METRICS for split in SPLITS),
        )
        for curve, by_split in found.items()
    ]
    rows.append(paper_row(results, SPLITS))
    return table(f"Barriers of {results.experiment}", "curve", SPLITS, rows) if found else Html()


def section(index: int, entry: Entry) -> Html:
    """Render one experiment: claim, finding, verdict, figure, barriers and command."""
    results = entry.results
    setting, colon, name = results.title.rpartition(": ")
    width, height = size(entry.png, entry.name)
    source = embedded(entry.png)
    return tag(
        "section",
        tag("h2", tag("span", setting + colon, class_="of") if setting else "", tag("span", name)),
        tag(
            "dl",
            tag("dt", "The paper leaves open" if results.is_open else "The paper found"),
            tag("dd", results.claim),
            tag("dt", "Measured here"),
            tag("dd", results.finding),
            tag("dt", "Verdict"),
            tag("dd", verdict(results)),
        ),
        tag(
            "figure",
            tag("div", tag("img", src=source, alt=results.alt, width=width, height=height), class_="card"),
            tag("figcaption", f"Figure {index}. {entry.name}: {settings(results.config)}."),
        ),
        barriers(results),
        tag("p", f"This run used other flags than the page: {entry.flags}.", class_="note") if entry.flags else "",
        tag("p", "Command:", class_="label"),
        command(results.command),
        id=anchor(index, entry),
    )


def listed(items: Iterable[str]) -> Html:
    """Join items with commas, without line breaks inside an item."""
    texts = list(items)
    return Html(" ".join(tag("span", text) for text in (*(f"{text}," for text in texts[:-1]), *texts[-1:])))


def environments(entries: Sequence[Entry]) -> Html:
    """Render each distinct environment, with its experiments if there are several environments."""
    users: dict[str, list[str]] = {}
    for entry in entries:
        users.setdefault(json.dumps(entry.results.environment), []).append(full_name(entry, entries))

    def block(text: str, experiments: list[str]) -> Html:
        environment = json.loads(text)
        packages, devices = environment["packages"], Counter(environment["devices"])
        facts = {
            "Experiments": listed(experiments) if len(users) > 1 else "",
            "Revision": environment["revision"] or "unknown",
            "Devices": listed(f"{count} × {kind}" for kind, count in devices.items()),
            "Platform": environment["platform"],
            "Python": environment["python"],
            "Packages": listed(f"{name} {version or 'not installed'}" for name, version in packages.items()),
        }
        return tag("dl", *(joined((tag("dt", name), tag("dd", value))) for name, value in facts.items() if value))

    return joined(block(text, experiments) for text, experiments in users.items())


def durations(entries: Sequence[Entry]) -> Html:
    """Render the duration of each experiment and the total."""

    def row(name: str, seconds: Number) -> Html:
        return tag("tr", tag("th", name, scope="row"), tag("td", duration(seconds), class_="number"))

    head = tag("tr", tag("th", "experiment", scope="col"), tag("th", "time", scope="col", class_="number"))
    times = [(full_name(entry, entries), entry.results.seconds) for entry in entries]
    total = row("all", sum(seconds for _, seconds in times))
    body = tag("tbody", *(row(*time) for time in times))
    return scrolling("Wall-clock time", tag("thead", head), body, tag("tfoot", total), class_="short")


def background(entries: Sequence[Entry], missing: Sequence[Missing]) -> Html:
    """Render the environments, durations and missing experiments."""
    every: list[Item] = [*entries, *missing]
    left = [tag("li", tag("p", full_name(item, every), class_="label"), command(item.command)) for item in missing]
    ran = (tag("h3", "Environment"), environments(entries), tag("h3", "Durations"), durations(entries))
    return tag(
        "section",
        tag("h2", "Environment and durations"),
        *(ran if entries else ()),
        tag("h3", "Still to run", id="missing"),
        tag("ul", *left, class_="left") if left else tag("p", "All experiments of this page have results."),
        id="background",
    )


def render(title: str, entries: Sequence[Entry], missing: Sequence[Missing]) -> str:
    """Render one HTML page: all experiments in order, then the missing ones."""
    # The browser enforces this policy: the page fetches nothing and runs no scripts.
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Html(STYLESHEET)),
    )
    sections = [section(index, entry) for index, entry in enumerate(entries, 1)]
    top = (summary(entries, missing),) if entries else ()
    main = tag("main", *top, *sections, background(entries, missing))
    body = tag("body", header(title, entries, missing), main)
    return "<!DOCTYPE html>\n" + tag("html", head, body, lang="en")
