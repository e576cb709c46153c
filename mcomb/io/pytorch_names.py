r"""Translate names and layouts of weights in PyTorch and other files to those of a JAX function, with a table.

    Row(r"layer(\d+)\.weight", r"dense\1/kernel", (1, 0))

maps the matrix `layer3.weight` to `dense3/kernel` with its axes in the order (1, 0). A pattern is a regular expression
for a whole name. A row with axes matches only arrays with as many axes. The first matching row applies. Remaining dots
in a name become slashes. Every name must match a row, and no two names may become equal. A row with the name `-` drops
arrays. If some names start with Flax's `batch_stats/`, all other names get the prefix `params/`.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mcomb.errors import UserError
from mcomb.trees import Array


class Row(NamedTuple):
    """A rule: names that match the pattern become `name`, and their arrays are transposed if `axes` is set."""

    pattern: str
    name: str
    axes: tuple[int, ...] | None = None


Table = Sequence[Row]
LEFT_OUT = "-"
COLLECTIONS = "params/", "batch_stats/"  # Flax's

TABLES: Mapping[str, Table] = {
    # PyTorch's layouts under its module names: Embedding (recognised by name), Linear, Conv1d to Conv3d and their
    # transposes (Flax's with transpose_kernel=True), MultiheadAttention, and norms.
    "pytorch": (
        Row(r"(.*\.)?in_proj_weight", r"\1in_proj/kernel", (1, 0)),
        Row(r"(.*\.)?in_proj_bias", r"\1in_proj/bias"),
        Row(r"((?:.*\.)?[^.]*(?:emb|Emb|wte|wpe)[^.]*)\.weight", r"\1/embedding", (0, 1)),
        Row(r"(.*)\.weight", r"\1/kernel", (1, 0)),
        *(Row(r"(.*)\.weight", r"\1/kernel", (*range(2, axes), 1, 0)) for axes in (3, 4, 5)),
        Row(r"(.*)\.weight", r"\1/scale", (0,)),
        Row(r"(.*)\.bias", r"\1/bias"),
        Row(r"(.*)\.running_(mean|var)", r"batch_stats/\1/\2"),
        Row(r".*\.num_batches_tracked", LEFT_OUT),
    ),
    # Git Re-Basin's ResNet-20, which has the layouts of the one here.
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
    """Return the table with this name, or read one from a text file.

    Each line has a pattern, a name and optionally axes such as 1,0. A line that is only the name of a table includes
    the rows of that table.
    """
    if name in TABLES:
        return TABLES[name]
    path = Path(name)
    if not path.is_file():
        raise UserError(f"Unknown names {name}: pass {', '.join(TABLES)} or a file with a table.")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a text file ({error.reason}): pass a table of names.") from error
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
            raise UserError(
                f"Line {number} of {path} is not a row ({error}): write a pattern, a name and axes."
            ) from error
    return rows


def to_ours(table: Table, theirs: Mapping[str, Array]) -> dict[str, Any]:
    """Return arrays with the function's names and layouts."""
    return {
        new: array if axes is None else np.transpose(array, axes)
        for (new, axes), array in zip(_renamed(table, theirs), theirs.values(), strict=True)
        if new != LEFT_OUT
    }


def to_theirs(table: Table, ours: Mapping[str, Array], like: Mapping[str, Array]) -> dict[str, Any]:
    """Return arrays with the names and layouts of those in `like`, the inverse of `to_ours`."""
    found = {}
    for (new, axes), (name, array) in zip(_renamed(table, like), like.items(), strict=True):
        own = np.asarray(array if new == LEFT_OUT else ours[new])
        found[name] = own if axes is None else np.transpose(own, np.argsort(axes))
    return found


def _renamed(table: Table, theirs: Mapping[str, Array]) -> list[tuple[str, tuple[int, ...] | None]]:
    """Return the new name of each array, and the new order of its axes."""
    renamed: list[tuple[str, tuple[int, ...] | None]] = []
    taken: dict[str, str] = {}
    for name, array in theirs.items():
        rows = (
            (row, re.fullmatch(row.pattern, name)) for row in table if len(row.axes or np.shape(array)) == array.ndim
        )
        row, found = next(((row, found) for row, found in rows if found), (None, None))
        if row is None or found is None:
            raise UserError(f"No row of the table of names matches {name} of shape {array.shape}: add a row.")
        try:
            new = found.expand(row.name).replace(".", "/")
        except (re.error, IndexError) as error:
            problem = f"Cannot expand the name {row.name} of the table for {name} ({error})"
            raise UserError(f"{problem}: fix the table of names.") from error
        if new in taken and new != LEFT_OUT:
            raise UserError(f"{name} and {taken[new]} both become {new}: fix the table of names.")
        taken[new] = name
        renamed.append((new, None if new == LEFT_OUT else row.axes))
    if any(new.startswith("batch_stats/") for new, _ in renamed):
        has_collection = (*COLLECTIONS, LEFT_OUT)
        return [(new if new.startswith(has_collection) else f"params/{new}", axes) for new, axes in renamed]
    return renamed
