import io

import pytest
from lxml import etree

from data_prep.xml_repair import Repaired


def _read(content, size):
    file = Repaired(io.BytesIO(content))
    return b"".join(iter(lambda: file.read(size), b""))


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_what_xml_cannot_hold_becomes_a_replacement_character(size):
    content = (
        b"<a>&#x1F;b\0c&#31;&#x41;&#65;&amp;&#9;\xff\xc3\xa4&#xD800;&#1114112;&#x10FFFF;"
        b"\xef\xbf\xbe\x0b&#x000041; at the end &#x1"
    )
    mark = b"&#xFFFD;"
    expected = (
        b"<a>%sb%sc%s&#x41;&#65;&amp;&#9;\xef\xbf\xbd\xc3\xa4%s%s&#x10FFFF;"
        b"%s%s&#x000041; at the end &amp;#x1" % ((mark,) * 7)
    )
    assert _read(content, size) == expected


@pytest.mark.parametrize("size", [1, 3, 16, 1000])
def test_what_is_no_markup_is_text(size):
    content = (
        b"<a b='R&D'>AT&T & 1&nbsp;000 &amp;#65; &lt;b> &unknown; &AMP; a < b <3 x<=y ]]> "
        b"<![CDATA[a && b < c ]] &amp; \0]]></a>"
    )
    repaired = _read(content, size)
    root = etree.fromstring(repaired)
    assert root.get("b") == "R&D"
    assert root.text == (
        "AT&T & 1\xa0000 &#65; <b> &unknown; & a < b <3 x<=y ]]> a && b < c ]] &amp; \ufffd"
    )
    assert _read(repaired, size) == repaired


def test_other_encodings_are_left_as_they_are():
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        content = "<a>text</a>".encode(encoding)
        assert _read(content, 5) == content
    latin = b"<?xml version='1.0' encoding='iso-8859-1'?><a>\xe4&#x1;</a>"
    assert _read(latin, 1000) == latin.replace(b"&#x1;", b"&#xFFFD;")
