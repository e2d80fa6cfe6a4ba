"""A page of text, tables and pictures: HTML in a single file, for dark and light screens."""

import base64
import dataclasses
import html
import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from xla_spmd.files import table

# Content wider than the window scrolls by itself, so that the page never does. A table's first
# column stays in sight. Pictures are drawn on white, so they keep a white frame on dark screens.
_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2330; --muted: #5b6472; --line: #d9dee6;
  --stripe: #f5f7fa; --accent: #1f5fbf }
@media (prefers-color-scheme: dark) { :root { --paper: #14181f; --ink: #e6eaf0; --muted: #9aa4b2;
  --line: #2c3440; --stripe: #1b212b; --accent: #7fb0ff } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; line-height: 1.2; overflow-wrap: anywhere }
h2 { font-size: 1.2rem; margin: 0; padding-top: 1rem; border-top: 1px solid var(--line) }
section { margin: 2.5rem 0 }
p { color: var(--muted); max-width: 48rem; overflow-wrap: anywhere }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .8rem }
dl div { padding: .6rem .8rem; border: 1px solid var(--line); border-radius: .5rem }
dt { color: var(--muted); font-size: .85rem }
dd { margin: 0; font-size: 1.15rem; font-variant-numeric: tabular-nums }
.scroll { overflow-x: auto; margin: 1rem 0 }
img { display: block; box-sizing: border-box; width: 100%; min-width: 44rem; padding: .5rem;
  background: #fff; border: 1px solid var(--line); border-radius: .5rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
tr { background: var(--paper) }
tr:nth-child(odd) { background: var(--stripe) }
th, td { padding: .3rem .8rem; text-align: right; vertical-align: bottom; min-width: 4rem }
th { font-weight: 600; color: var(--muted); border-bottom: 2px solid var(--line) }
tr > :first-child { text-align: left; position: sticky; left: 0; background: inherit }
"""
# On the screen, a picture's text is at least as large as the text of the page around it.
_TEXT: Any = {"font.size": 11, "axes.titlesize": 11, "axes.labelsize": 11, "legend.fontsize": 10}


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a page: its title, a text, and tables and pictures in HTML."""

    title: str
    text: str
    content: tuple[str, ...] = ()


def document(title: str, facts: Sequence[tuple[str, str]], sections: Sequence[Section]) -> str:
    """Returns a page: a title, facts as (name, value) pairs, and sections."""
    title = html.escape(title)
    # HTML does not need the end tags of <dt> and <dd>.
    lines = [
        "<!doctype html>",
        "<html lang=en>",
        f"<meta charset=utf-8><title>{title}</title>",
        "<meta name=viewport content='width=device-width'>",
        f"<style>{_STYLE}</style>",
        f"<h1>{title}</h1>",
        "<dl>",
    ]
    for name, value in facts:
        lines.append(f"<div><dt>{html.escape(name)}<dd>{html.escape(value)}</div>")
    lines.append("</dl>")

    for section in sections:
        lines += [
            "<section>",
            f"<h2>{html.escape(section.title)}</h2>",
            paragraph(section.text),
            *section.content,
            "</section>",
        ]

    return "\n".join([*lines, "</html>"]) + "\n"


def paragraph(text: str) -> str:
    """Returns a text as a paragraph."""
    return f"<p>{html.escape(text)}</p>"


def rows(cells: Sequence[Sequence[str]]) -> str:
    """Returns rows, the first of which is the header, as a table that scrolls if it is wide."""
    return f"<div class=scroll>\n{table.as_html(cells)}\n</div>"


def picture(description: str, draw: Callable[..., None], *args: Any) -> str:
    """Returns the picture that `draw(figure, *args)` draws as an embedded image.

    Screen readers read out the description.
    """
    png = io.BytesIO()
    with matplotlib.rc_context(_TEXT):
        figure = Figure(layout="constrained")
        draw(figure, *args)
        figure.savefig(png, format="png", dpi=150)

    # Embedded, so that the report is a single file, which can be sent.
    data = base64.b64encode(png.getvalue()).decode()
    alt = html.escape(description, quote=True)
    return f'<div class=scroll><img src="data:image/png;base64,{data}" alt="{alt}"></div>'
