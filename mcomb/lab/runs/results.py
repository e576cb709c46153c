"""Define the results of a run, write them to results.json and read them back, and format them as a table.

An experiment with measurements of its own extends `Results` or `Curves` by further fields. The file is flat: one entry
for each field that is set.
"""

import dataclasses
import itertools
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from mcomb.evaluation.evaluate import Metrics
from mcomb.io.paths import AnyPath, read_json, write_json
from mcomb.lab.run_folders import RESULTS
from mcomb.lab.setups import SETUPS
from mcomb.lab.tables import columns, with_range

R = TypeVar("R", bound="Results")

SPLITS = ("train", "test")
VARIANTS = ("naive", "aligned")
METRICS = ("loss", "accuracy")

Number = int | float
"""A number of one run; with --pairs, the mean may have another type."""

Scores = dict[str, dict[str, Any]]
"""For each split, a number or an array of numbers for each metric."""

Identity = dict[str, Any]
"""All inputs of a result as JSON values, by the names of fields of `Results`."""


class LayoutError(ValueError):
    """Exception for a file whose entries do not fit the results' class."""


@dataclass(frozen=True)
class Paper:
    """The paper's barriers for a setup, and the width of its networks."""

    loss: Number
    accuracy: Number
    width: int = 32


@dataclass(frozen=True, kw_only=True)
class Results:
    """The results of a run.

    Attributes:
        models: The scores of each network.
        guessing: For each split, the loss and accuracy of the best constant prediction, and the number of examples.
        inner_products: For each matching, the inner product of the two networks' weights, naive and aligned.
        title: The title of the figure.
        experiment: The name of the experiment.
        config: The flags that change results, and the recipe.
        version: The version of the measurement.
        networks: The fingerprint of each network.
        matchings: The fingerprint of each matching.
        parts: The identity of each part.
        data: The fingerprint of the data.
        devices: The number and kind of devices.
        environment: The versions and devices that the results depend on, besides the config.
        paper: The paper's barriers for this setup.
        command: The command line.
        durations: The seconds spent on each kind of work.
        seconds: The seconds in total.
        pairs: With --pairs, the results of each pair; all numbers are means over these.
        least: With --pairs, the least of all numbers.
        largest: With --pairs, the largest of all numbers.
        claim: The paper's finding or open question. The verdict follows; it is never written to a file.
        alt: The alternative text of the figure.
        agrees: Whether the results show the finding, or the answer to the question; None without a verdict.
        finding: The reason for the verdict.
        is_open: Whether the claim is a question.
        is_papers: Whether the paper has these networks.
    """

    models: dict[str, Scores] = field(default_factory=dict)
    guessing: dict[str, dict[str, Any]] = field(default_factory=dict)
    inner_products: dict[str, dict[str, Number]] = field(default_factory=dict)

    title: str = ""
    experiment: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    version: int = 0
    networks: dict[str, str] = field(default_factory=dict)
    matchings: dict[str, str] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    data: str | None = None
    devices: str | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    paper: Paper | None = None
    command: str = ""
    durations: dict[str, Number] = field(default_factory=dict)
    seconds: Number = 0.0

    pairs: list["Results"] = field(default_factory=list)
    least: "Results | None" = None
    largest: "Results | None" = None

    claim: str = ""
    alt: str = ""
    agrees: bool | None = None
    finding: str = ""
    is_open: bool = False
    is_papers: bool = False

    @property
    def measured_widths(self) -> list[int]:
        """The widths of the networks."""
        return [self.config["width"]]


VERDICT = ("claim", "alt", "agrees", "finding", "is_open", "is_papers")
ORIGIN = ("title", "version", "networks", "matchings", "parts", "environment", "command", "durations", "seconds")


@dataclass(frozen=True)
class Parameter:
    """The parameter that varies along a curve."""

    name: str
    label: str
    values: list[Number]


@dataclass(frozen=True)
class Calibrated:
    """Test losses at the best softmax temperatures: of networks, on curves, and as barriers."""

    models: dict[str, Scores]
    curves: dict[str, Scores]
    barriers: dict[str, Scores]


@dataclass(frozen=True, kw_only=True)
class Curves(Results):
    """Measurements on curves between two networks.

    Attributes:
        ends: The letters of the two networks.
        curves: For each curve, the measurements with one row for each value of the parameter.
        barriers: The barriers of each curve.
        at_best_temperature: The test losses with --temperatures.
    """

    ends: list[str]
    curves: dict[str, Scores]
    barriers: dict[str, Scores]
    at_best_temperature: Calibrated | None = None


@dataclass(frozen=True, kw_only=True)
class SweepResults(Curves):
    """Measurements on curves that share a parameter."""

    parameter: Parameter


def pairs_of(results: R) -> list[R]:
    """Return the results of each pair."""
    return cast(list[R], results.pairs) or [results]


def sides(results: R) -> tuple[R, ...]:
    """Return the results, and with --pairs also the least and the largest numbers."""
    return cast(tuple[R, ...], (results, results.least, results.largest) if results.pairs else (results,))


def spread(results: R) -> tuple[R, R]:
    """Return the least and the largest numbers over pairs; for one pair, the results themselves twice."""
    return cast(tuple[R, R], (results.least, results.largest) if results.pairs else (results, results))


def scores_of(by_split: Mapping[str, Metrics]) -> Scores:
    """Return the loss and the accuracy on each split."""
    return {split: {name: metrics.values[name] for name in METRICS} for split, metrics in by_split.items()}


def write_results(folder: AnyPath, results: Results) -> None:
    """Write results.json, after everything else that belongs to it."""
    write_json(folder / RESULTS, to_json(results))


def read_results(path: AnyPath, kind: type[R]) -> R | None:
    """Read results.json; return None if it is missing or damaged.

    Raises:
        LayoutError: The entries of the file do not fit this class.
    """
    found = read_json(path)
    return None if found is None else from_json(kind, _renamed(found))


def to_json(results: Results) -> dict[str, Any]:
    """Return the fields that are set as JSON values, and the verdict if there is one."""
    kept = {name: value for name, value in vars(results).items() if value not in (None, _DEFAULTS.get(name))}
    kept |= {name: getattr(results, name) for name in VERDICT} if results.finding else {}
    return {name: _plain(value) for name, value in kept.items()}


def without_origin(results: R) -> R:
    """Return results without their verdict, and without the entries that differ between equal runs."""
    return replace(results, **{name: _DEFAULTS[name] for name in (*ORIGIN, *VERDICT)})


def from_json(kind: type[R], values: Mapping[str, Any]) -> R:
    """Return results from JSON values.

    Raises:
        LayoutError: The values do not fit this class.
    """
    try:
        built: R = _build(kind, values)
        return built
    except (TypeError, AttributeError, ValueError) as error:
        raise LayoutError(str(error)) from error


_DEFAULTS: dict[str, Any] = {
    own.name: own.default if own.default_factory is dataclasses.MISSING else own.default_factory()
    for own in dataclasses.fields(Results)
}


def _plain(value: Any) -> Any:
    """Return a value with dicts in place of dataclasses."""
    if isinstance(value, Results):
        return to_json(value)
    if dataclasses.is_dataclass(value):
        return {name: _plain(entry) for name, entry in vars(value).items()}
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], Results):
        return [_plain(entry) for entry in value]
    return value


def _build(kind: Any, value: Any, within: Any = None) -> Any:
    """Return a JSON value as a type: a dataclass, or lists, dicts and options of dataclasses."""
    if value is None:
        return None
    if kind is Results and within:
        kind = within  # the results of a pair are of the same kind
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _build(hints[name], entry, kind) for name, entry in value.items() if name in hints})
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType or origin is typing.Union:
        return _build(of[0], value, within)
    if origin is dict:
        return {name: _build(of[1], entry, within) for name, entry in value.items()}
    if origin is list and dataclasses.is_dataclass(of[0]):
        return [_build(of[0], entry, within) for entry in value]
    return value


def _renamed(value: Any) -> Any:
    """Rename entries of earlier versions, which called all examples images."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_renamed(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    names = {f"{split}_images": f"{split}_examples" for split in SPLITS}
    names["images"] = "examples" if "accuracy" in value else "labels"
    return {names.get(name, name): _renamed(entry) for name, entry in value.items()}


def fold(values: Sequence[Any], by: Callable[[Any], Any]) -> Any:
    """Fold several values of the same form into one: numbers by `by`, and other values that differ into a list."""
    first = values[0]
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        entries = {name: fold([getattr(value, name) for value in values], by) for name in vars(first)}
        return replace(first, **entries)
    if all(isinstance(value, dict) and value.keys() == first.keys() for value in values):
        return {key: fold([value[key] for value in values], by) for key in first}
    if all(isinstance(value, list) and len(value) == len(first) for value in values):
        return [fold(items, by) for items in zip(*values, strict=True)]
    if all(value == first for value in values):
        return first
    if all(isinstance(value, int | float) for value in values):
        return by(values).item()
    return list(values)


def barriers_of(results: Results) -> dict[str, Scores]:
    """Return the barriers of each curve; none for experiments without curves."""
    return results.barriers if isinstance(results, Curves) else {}


def table(results: Results) -> str:
    """Format the scores of the networks, the barriers, and the paper's barriers as a table.

    Language models also have a test perplexity, the exponential of the test loss. For several pairs, the
    table has the means, with the least and the largest in brackets.
    """
    shown = list(itertools.product(METRICS, SPLITS))
    if SETUPS[results.config["setup"]].dataset.unit == "token":
        shown.append(("perplexity", "test"))
    rows = [("", *(f"{split} {metric}" for metric, split in shown))]

    def row(label: str, scores_of: Callable[[Any], Scores | None], is_network: bool) -> None:
        """Add a row, unless a side has no such scores."""
        found = [scores_of(side) for side in sides(results)]
        cells = [[_number(scores or {}, metric, split, is_network) for scores in found] for metric, split in shown]
        if None not in found:
            rows.append((label, *map(with_range, cells)))

    for x in results.models:
        row(f"network {x}", lambda side, x=x: side.models[x], True)  # type: ignore[misc]
        row("  at best temperature", lambda side, x=x: _calibrated(side, "models", x), True)  # type: ignore[misc]
    for x in barriers_of(results):
        row(f"{x} barrier", lambda side, x=x: side.barriers[x], False)  # type: ignore[misc]
        row("  at best temperature", lambda side, x=x: _calibrated(side, "barriers", x), False)  # type: ignore[misc]
    if paper := results.paper:
        # The paper gives one number for each metric without naming a split; we assume the test split.
        written = (f"paper, width {paper.width}", "", f"{paper.loss:.3f}", "", f"{paper.accuracy:.3f}")
        rows.append((*written, *[""] * (len(rows[0]) - len(written))))
    return columns(rows)


def _calibrated(side: Results, kind: str, name: str) -> Scores | None:
    calibrated = side.at_best_temperature if isinstance(side, Curves) else None
    return getattr(calibrated, kind).get(name) if calibrated else None


def _number(scores: Scores, metric: str, split: str, is_network: bool) -> float | None:
    """Return a number of a table, or None for an empty cell."""
    at = scores.get(split, {})
    if metric == "perplexity":
        return math.exp(at["loss"]) if is_network and "loss" in at else None
    return at.get(metric)
