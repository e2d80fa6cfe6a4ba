"""Tables as text, Markdown and HTML, numbers that may be missing, and large counts in short."""

import html
import itertools
from collections.abc import Iterable, Sequence


def text(rows: Iterable[Sequence[object]], indent: str = "") -> str:
    """Returns rows as aligned columns, the first flush left; ValueError for unequal lengths."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return "\n".join((indent + line).rstrip() for line in lines)


def markdown(rows: Iterable[Sequence[object]]) -> str:
    """Returns the same rows as a Markdown table, every line ended by a newline."""
    header, *body = rows
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "".join("| " + " | ".join(map(str, row)) + " |\n" for row in (header, rule, *body))


def as_html(rows: Iterable[Sequence[object]]) -> str:
    """Returns the same rows as an HTML table, a line for each row."""
    lines = (
        "".join(f"<{tag}>{html.escape(str(cell))}" for cell in row)
        for tag, row in zip(itertools.chain(["th"], itertools.repeat("td")), rows, strict=False)
    )
    return "<table>\n" + "".join(f"<tr>{line}\n" for line in lines) + "</table>"


def count(number: int) -> str:
    """Returns a count such as a number of weights in billions, or in millions below 10^8."""
    return f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number / 1e6:.2f} M"


def number(value: float | None, spec: str = ".2f") -> str:
    """Returns a number in a format of Python's, or `-` for None."""
    return "-" if value is None else format(value, spec)
