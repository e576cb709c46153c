"""Format tables and numbers as text."""

from collections.abc import Iterable

TABLE_WIDTH = 100  # the maximum, in characters


def with_range(numbers: list[float | None]) -> str:
    """Format a number, or a mean with its range; return an empty string for None."""
    written = ["" if number is None else f"{number:.4f}" for number in numbers]
    return f"{written[0]} ({written[1]}–{written[2]})" if len(written) > 1 and written[0] else written[0]


def columns(rows: Iterable[tuple[str, ...]], labels: int = 1) -> str:
    """Format rows of cells as text, with the first column left-aligned and all others right-aligned.

    Tables wider than TABLE_WIDTH are split into parts, one below the other. Each part repeats the first `labels`
    columns.
    """
    rows = list(rows)
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    whole = list(range(len(widths)))
    return "\n\n".join(
        "\n".join("  ".join(_pad(row[i], widths[i], i) for i in part).rstrip() for row in rows)
        for part in _split(whole[:labels], whole[labels:], widths)
    )


def _split(labels: list[int], others: list[int], widths: list[int]) -> list[list[int]]:
    """Return the columns of each part of a table, in the fewest parts that fit; one part if no split fits."""
    for count in range(1, len(others) + 1):
        size = -(-len(others) // count)
        parts = [labels + others[i : i + size] for i in range(0, len(others), size)]
        if all(sum(widths[i] + 2 for i in part) - 2 <= TABLE_WIDTH for part in parts):
            return parts
    return [labels + others]


def _pad(cell: str, width: int, column: int) -> str:
    return cell.rjust(width) if column else cell.ljust(width)


def readable_bytes(count: float) -> str:
    """Format a number of bytes with a suitable unit, such as `9.4 GB`."""
    unit, name = next(((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB")) if count >= unit), (1e3, "kB"))
    return f"{count / unit:.1f} {name}"
