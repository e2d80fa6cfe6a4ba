import io

import pytest
from lxml import etree

from data_prep.xml_repair import Repaired


def _read(content, size):
    file = Repaired(io.BytesIO(content))
    return b"".join(iter(lambda: file.read(size), b""))


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_characters_outside_of_xml_become_replacement_characters(size):
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
def test_characters_without_markup_become_text(size):
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


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_other_encodings_become_utf_8(size):
    text = "<a b='R&D'>\xe4 \U0001f600 &#x1; &uuml;</a>"
    expected = "<a b='R&amp;D'>\xe4 \U0001f600 &#xFFFD; &#252;</a>".encode()
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8"):
        assert _read(text.encode(encoding), size) == expected
        # Such files may also be in UTF-8.
        declared = f"<?xml version='1.0' encoding='UTF-16'?>{text}"
        assert _read(declared.encode(encoding), size) == b"<?xml version='1.0'?>" + expected

    head = "<?xml version='1.0' encoding=\"windows-1251\" ?>"
    russian = f"{head}<a>\u0434\u0430 & \u043d\u0435\u0442</a>".encode("cp1251")
    assert _read(russian, size) == "<?xml version='1.0' ?><a>да &amp; нет</a>".encode()


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_entities_are_those_that_a_parser_knows(size):
    """libxml2 expands entities that are free of errors; our repaired file has the same text."""
    content = b"""<?xml version="1.0"?><!-- <a> --> <?p <a>?>
<!DOCTYPE a [<!ENTITY x "1 &y; 2"><!ENTITY y '<b>"&#65;&amp;"</b>'><!ELEMENT a ANY>
<!ATTLIST a c CDATA "]>"><?p ]> ?><!ENTITY n\xc3\xa4-1. "it's">]><!-- after -->
<a d="&n\xc3\xa4-1.;">&x;&y;&n\xc3\xa4-1.; &lt;<![CDATA[&x;]]></a>"""
    parsed = etree.fromstring(content, etree.XMLParser(resolve_entities=True))
    repaired = _read(content, size)
    root = etree.fromstring(repaired)
    assert b"<!DOCTYPE" not in repaired and repaired.count(b"\n") == content.count(b"\n")
    assert root.get("d") == parsed.get("d") == "it's"
    assert "".join(root.itertext()) == "".join(parsed.itertext())
    assert root.findtext("b") == parsed.findtext("b") == '"A&"'
