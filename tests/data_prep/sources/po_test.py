import pytest

from data_prep.sources.po import PoFile
from data_prep.sources.source import Row
from data_prep.tsv import Pair

_PO = """
msgid ""
msgstr "Content-Type: text/plain; charset=UTF-8\\nPlural-Forms: nplurals=3; plural=n;\\n"

msgid "Open\\n"
"the file"
msgstr "Öffne die Datei"

#, fuzzy
msgid "Close"
msgstr "Offen"

msgid "Untranslated"
msgstr ""

msgid "one file"
msgid_plural "%d files"
msgstr[0] "plik"
msgstr[1] "pliki"
msgstr[2] "plików"

#~ msgid "Old"
#~ msgstr "Alt"
"""


def test_translated_messages(tmp_path):
    path = tmp_path / "de.po"
    path.write_text(_PO)
    assert list(PoFile(path, "de", "train").rows()) == [
        Row("de", Pair("Öffne die Datei", "Open the file")),
        Row("de", Pair("plik", "one file")),
        Row("de", Pair("plików", "%d files")),
    ]


def test_what_is_no_catalog_is_refused(tmp_path):
    (tmp_path / "x.po").write_text("this is no catalog\n")
    with pytest.raises(ValueError, match=r"x.po is no gettext catalog: "):
        list(PoFile(tmp_path / "x.po", "de").rows())
    with pytest.raises(ValueError, match=r"no file .*none.po"):
        list(PoFile(tmp_path / "none.po", "de").rows())
