"""The results of a run: their names and the table that is printed."""

import operator
from collections.abc import Mapping
from functools import reduce
from typing import Any

from mcomb.lab.tables import columns, with_range

Results = dict[str, Any]

SPLITS = ("train", "test")
VARIANTS = ("naive", "aligned")
METRICS = ("loss", "accuracy")


def table(results: Mapping[str, Any]) -> str:
    """The numbers of a run for a person: the networks themselves, the barriers, and the paper's.

    Of several pairs, the means, and the least and the largest in brackets.
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
        # The paper gives one number for each metric, and does not say of which split: test, we take it.
        rows.append((f"paper, width {paper['width']}", "", f"{paper['loss']:.3f}", "", f"{paper['accuracy']:.3f}"))
    return columns(rows)
