"""Pages in HTML: they escape text, wide content scrolls, and each page is one file."""

import html.parser
import re

from lingvo_gshard.evaluation import html_page
from lingvo_gshard.evaluation.html_page import Section


def _draw(figure, height):
    figure.set_size_inches(2, height)
    figure.subplots().plot([1, 2])


def _page():
    section = Section(
        "A & B",
        "1 < 2",
        (html_page.rows([("a", "b"), ("<i>", "2")]), html_page.picture('a "line"', _draw, 1)),
    )
    return html_page.document("<b>", [("steps", "1 < 3")], [section])


def test_text_is_escaped():
    page = _page()
    assert "<title>&lt;b&gt;</title>" in page and "<h1>&lt;b&gt;</h1>" in page
    assert "<h2>A &amp; B</h2>\n<p>1 &lt; 2</p>" in page
    assert "<dt>steps<dd>1 &lt; 3</div>" in page and "<td>&lt;i&gt;" in page
    assert 'alt="a &quot;line&quot;"' in page


def test_tables_and_pictures_scroll_by_themselves():
    page = _page()
    assert page.count("<div class=scroll>") == page.count("<table>") + page.count("<img") == 2
    assert ".scroll { overflow-x: auto" in page and "prefers-color-scheme: dark" in page


def test_a_page_is_one_file():
    links = []

    class Parser(html.parser.HTMLParser):
        def handle_starttag(self, tag, attrs):
            links.extend(value for name, value in attrs if name in ("src", "href"))

    page = _page()
    Parser().feed(page)
    assert len(links) == 1 and links[0].startswith("data:image/png;base64,iVBOR")
    assert not re.search(r"url\(|@import", page)
