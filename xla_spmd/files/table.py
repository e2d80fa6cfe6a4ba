"""Tables as text, Markdown and HTML; optional numbers; and short forms of large counts."""

import html
from collections.abc import Iterable, Sequence


def text(rows: Iterable[Sequence[object]], indent: str = "") -> str:
    """Returns rows as aligned columns, the first flush left.

    Raises ValueError if the rows have unequal lengths.
    """
    cells = [list(map(str, row)) for row in rows]
    columns = zip(*cells, strict=True)
    widths = [max(map(len, column)) for column in columns]

    # The first column has names, the others mostly numbers.
    lines: list[str] = []
    for first, *others in cells:
        aligned = [first.ljust(widths[0])]
        for cell, width in zip(others, widths[1:], strict=True):
            aligned.append(cell.rjust(width))
        lines.append((indent + "  ".join(aligned)).rstrip())
    return "\n".join(lines)


def markdown(rows: Iterable[Sequence[object]]) -> str:
    """Returns rows as a Markdown table, every line ended by a newline; the first is the header."""
    # A colon in the rule aligns a column to the right.
    header, *body = rows
    rule = ["---"] + ["---:"] * (len(header) - 1)

    lines: list[str] = []
    for row in (header, rule, *body):
        cells = " | ".join(map(str, row))
        lines.append(f"| {cells} |\n")
    return "".join(lines)


def as_html(rows: Iterable[Sequence[object]]) -> str:
    """Returns rows as an HTML table, one line each; the first is the header."""
    lines: list[str] = []
    for row in rows:
        tag = "td" if lines else "th"
        cells = [f"<{tag}>{html.escape(str(cell))}" for cell in row]
        lines.append(f"<tr>{''.join(cells)}\n")
    return f"<table>\n{''.join(lines)}</table>"


def count(number: int) -> str:
    """Returns a count, such as a number of weights, in billions, or in millions below 10^8."""
    return f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number / 1e6:.2f} M"


def number(value: float | None, spec: str = ".2f") -> str:
    """Returns a number in one of Python's formats, or `-` for None."""
    return "-" if value is None else format(value, spec)
