"""Names of weights in other people's files: a small table from their names and layouts to those of a JAX function.

    Row(r"layer(\\d+)\\.weight", r"dense\\1/kernel", (1, 0))

says that `layer3.weight`, a matrix, is `dense3/kernel` with its axes in the order (1, 0). A pattern is a regular
expression for a whole name; a row with axes fits only arrays with as many; the first row that fits counts. What is left
of a name's dots becomes slashes. Every name must fit a row, and no two may become the same. A row with the name `-`
leaves arrays out. Where names begin with Flax's `batch_stats/`, those of all other arrays begin with `params/`.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mcomb.errors import UserError
from mcomb.trees import Array


class Row(NamedTuple):
    """Names that fit the pattern become `name`; the axes of their arrays are transposed, if an order is given."""

    pattern: str
    name: str
    axes: tuple[int, ...] | None = None


Table = Sequence[Row]
LEFT_OUT = "-"
COLLECTIONS = "params/", "batch_stats/"  # Flax's

TABLES: Mapping[str, Table] = {
    # PyTorch's layouts under its own module names: Embedding (by its name), Linear, Conv1d to Conv3d, and norms.
    "pytorch": (
        Row(r"((?:.*\.)?[^.]*(?:emb|Emb|wte|wpe)[^.]*)\.weight", r"\1/embedding", (0, 1)),
        Row(r"(.*)\.weight", r"\1/kernel", (1, 0)),
        *(Row(r"(.*)\.weight", r"\1/kernel", (*range(2, axes), 1, 0)) for axes in (3, 4, 5)),
        Row(r"(.*)\.weight", r"\1/scale", (0,)),
        Row(r"(.*)\.bias", r"\1/bias"),
        Row(r"(.*)\.running_(mean|var)", r"batch_stats/\1/\2"),
        Row(r".*\.num_batches_tracked", LEFT_OUT),
    ),
    # Git Re-Basin's ResNet-20, laid out as the one here.
    "git-re-basin": (
        Row(r"conv1/kernel", "conv0/kernel"),
        Row(r"norm1/(\w+)", r"norm0/\1"),
        Row(r"blockgroup(\d)/blocks_0/shortcut/layers_0/kernel", r"block\1_1/shortcut_conv/kernel"),
        Row(r"blockgroup(\d)/blocks_0/shortcut/layers_1/(\w+)", r"block\1_1/shortcut_norm/\2"),
        *(Row(rf"blockgroup(\d)/blocks_{i}/(\w+/\w+)", rf"block\g<1>_{i + 1}/\2") for i in range(3)),
        Row(r"dense/(\w+)", r"logits/\1"),
    ),
}


def read_table(name: str) -> Table:
    """The table of this name, or that in a text file: in each line a pattern, a name and, if need be, axes as 1,0.

    A line with nothing but the name of a table stands for the rows of that table.
    """
    if name in TABLES:
        return TABLES[name]
    path = Path(name)
    if not path.is_file():
        raise UserError(f"there are no names {name}: give {', '.join(TABLES)} or a file with a table")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text ({error.reason}): give a table of names") from error
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        pattern, *rest = line.split() or ["#"]
        if pattern.startswith("#"):
            continue
        if pattern in TABLES and not rest:
            rows += TABLES[pattern]
            continue
        try:
            re.compile(pattern)
            order = tuple(int(axis) for axis in rest[1].split(",")) if len(rest) > 1 else None
            rows.append(Row(pattern, rest[0], order))
        except (ValueError, IndexError, re.error) as error:
            raise UserError(f"line {number} of {path} is no row ({error}): give a pattern, a name and axes") from error
    return rows


def to_ours(table: Table, theirs: Mapping[str, Array]) -> dict[str, Any]:
    """Arrays under the function's own names and in its layouts."""
    return {
        new: array if axes is None else np.transpose(array, axes)
        for (new, axes), array in zip(_renamed(table, theirs), theirs.values(), strict=True)
        if new != LEFT_OUT
    }


def to_theirs(table: Table, ours: Mapping[str, Array], like: Mapping[str, Array]) -> dict[str, Any]:
    """Arrays under the names and in the layouts of those in `like`, which `to_ours` took or left out."""
    found = {}
    for (new, axes), (name, array) in zip(_renamed(table, like), like.items(), strict=True):
        own = np.asarray(array if new == LEFT_OUT else ours[new])
        found[name] = own if axes is None else np.transpose(own, np.argsort(axes))
    return found


def _renamed(table: Table, theirs: Mapping[str, Array]) -> list[tuple[str, tuple[int, ...] | None]]:
    """The new name of each array, and the new order of its axes."""
    renamed: list[tuple[str, tuple[int, ...] | None]] = []
    taken: dict[str, str] = {}
    for name, array in theirs.items():
        rows = (
            (row, re.fullmatch(row.pattern, name)) for row in table if len(row.axes or np.shape(array)) == array.ndim
        )
        row, found = next(((row, found) for row, found in rows if found), (None, None))
        if row is None or found is None:
            raise UserError(f"no row of the table of names fits {name} of shape {array.shape}: add one")
        try:
            new = found.expand(row.name).replace(".", "/")
        except (re.error, IndexError) as error:
            problem = f"the table's name {row.name} cannot be made of {name} ({error})"
            raise UserError(f"{problem}: mend the table of names") from error
        if new in taken and new != LEFT_OUT:
            raise UserError(f"{name} and {taken[new]} both become {new}: mend the table of names")
        taken[new] = name
        renamed.append((new, None if new == LEFT_OUT else row.axes))
    if any(new.startswith("batch_stats/") for new, _ in renamed):
        has_collection = (*COLLECTIONS, LEFT_OUT)
        return [(new if new.startswith(has_collection) else f"params/{new}", axes) for new, axes in renamed]
    return renamed
