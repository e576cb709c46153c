"""Write the results of a run to results.json, and as a table."""

import operator
from collections.abc import Mapping
from functools import reduce
from typing import Any

from mcomb.io.paths import AnyPath, write_json
from mcomb.lab.run_folders import RESULTS
from mcomb.lab.tables import columns, with_range

Results = dict[str, Any]

SPLITS = ("train", "test")
VARIANTS = ("naive", "aligned")
METRICS = ("loss", "accuracy")


def write_results(folder: AnyPath, results: Results) -> None:
    """Write results.json, after everything else that belongs to it."""
    write_json(folder / RESULTS, results)


def spread(results: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the least and the largest numbers over pairs, in the form of the results; for one pair, itself twice."""
    return results.get("least", results), results.get("largest", results)


def table(results: Mapping[str, Any]) -> str:
    """Write the numbers of a run for a person: the networks themselves, the barriers, and the paper's.

    Of several pairs, write the means, with the least and the largest in brackets.
    """
    rows = [("", *(f"{split} {metric}" for metric in METRICS for split in SPLITS))]
    parts = [results[side] for side in ("least", "largest") if side in results]

    def row(name: str, *path: str) -> None:
        cells = [reduce(operator.getitem, path, whole) for whole in (results, *parts)]
        rows.append((
            name,
            *(with_range([c.get(split, {}).get(metric) for c in cells]) for metric in METRICS for split in SPLITS),
        ))  # fmt: skip

    for kind, label in (("models", "network {}"), ("barriers", "{} barrier")):
        for name in results.get(kind, {}):
            row(label.format(name), kind, name)
            if name in results.get("at_best_temperature", {}).get(kind, {}):
                row("  at best temperature", "at_best_temperature", kind, name)
    if paper := results.get("paper"):
        # The paper gives one number for each metric without naming a split; we assume the test split.
        rows.append((f"paper, width {paper['width']}", "", f"{paper['loss']:.3f}", "", f"{paper['accuracy']:.3f}"))
    return columns(rows)
