import gzip

import pytest
import tensorflow_datasets as tfds

from data_prep.documents import TfdsDocuments
from data_prep.multilingual import TfdsSplit, TmxFile
from data_prep.rules import Rule
from data_prep.sources import Row
from data_prep.tsv import Document, Malformed, Pair

_TMX = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE tmx SYSTEM "tmx14.dtd">
<tmx version="1.4"><header srclang="en"/><body>
  <tu><tuv xml:lang="EN-US"><seg>a <bpt i="1">&lt;b&gt;</bpt>red<ept i="1">&lt;/b&gt;</ept>
      <hi>house</hi></seg></tuv>
    <tuv xml:lang="de-DE"><seg>ein rotes Haus</seg></tuv>
    <tuv xml:lang="pt-BR"><seg>uma casa vermelha</seg></tuv></tu>
  <tu><tuv xml:lang="de"><seg>ohne Englisch</seg></tuv></tu>
  <tu><tuv lang="en"><seg>two</seg></tuv><tuv lang="pt"><seg>dois</seg></tuv>
    <tuv lang="x-unknown9"><seg>?</seg></tuv></tu>
</body></tmx>
"""


@pytest.fixture
def tmx_path(tmp_path):
    path = tmp_path / "memory.tmx.gz"
    path.write_bytes(gzip.compress(_TMX.encode()))
    return path


def test_every_language_beside_english(tmx_path):
    assert list(TmxFile(tmx_path).rows()) == [
        Row("de", Pair("ein rotes Haus", "a red house")),
        Row("pt", Pair("uma casa vermelha", "a red house")),
        Row("de", Rule.UNPAIRED),
        Row("pt", Pair("dois", "two")),
        Row("x-unknown9", Rule.UNKNOWN_LANGUAGE),
    ]


def test_wanted_languages_take_their_regions(tmx_path):
    both = TmxFile(tmx_path, ("pt", "pt-BR"))
    # An invalid language name is counted for any selection of languages.
    assert [row.language for row in both.rows()] == ["pt-BR", "pt", "x-unknown9"]
    portuguese = TmxFile(tmx_path, ("pt",)).rows()
    assert [row.language for row in portuguese] == ["pt", "pt", "x-unknown9"]


def test_languages_by_the_names_of_the_source(tmx_path):
    rows = list(TmxFile(tmx_path, language_codes="source").rows())
    assert [row.language for row in rows] == ["de-DE", "pt-BR", "de", "pt", "x-unknown9"]
    odd = gzip.decompress(tmx_path.read_bytes()).replace(b"x-unknown9", b"a/b")
    tmx_path.write_bytes(gzip.compress(odd))
    rows = list(TmxFile(tmx_path, language_codes="source").rows())
    assert [row.language for row in rows] == ["de-DE", "pt-BR", "de", "pt", "a?b"]
    assert rows[-1].example is Rule.UNKNOWN_LANGUAGE
    wanted = list(TmxFile(tmx_path, ("pt",), language_codes="source").rows())
    assert [row.language for row in wanted] == ["pt", "a?b"]
    assert wanted[0].example.source == "dois"


def test_invalid_tmx_is_refused(tmp_path):
    (tmp_path / "x.tmx").write_text("<tmx><body><tu>")
    with pytest.raises(ValueError, match=r"x.tmx is not TMX: "):
        list(TmxFile(tmp_path / "x.tmx").rows())
    for content in (
        gzip.compress(_TMX.encode())[:-40],
        gzip.compress(_TMX.encode())[:60],
        b"no gzip",
    ):
        (tmp_path / "x.tmx.gz").write_bytes(content)
        with pytest.raises(ValueError, match=r"x.tmx.gz is (corrupt gzip|not TMX): [^\n]+$"):
            list(TmxFile(tmp_path / "x.tmx.gz").rows())
    (tmp_path / "x.tmx").write_bytes(gzip.compress(b"<tmx/>"))
    with pytest.raises(ValueError, match=r"x.tmx is gzip, expected text in UTF-8: name it .gz"):
        list(TmxFile(tmp_path / "x.tmx").rows())
    with pytest.raises(ValueError, match=r"none.tmx: there is no such file"):
        list(TmxFile(tmp_path / "none.tmx").rows())


class _Talks(tfds.core.GeneratorBasedBuilder):
    """A data set in the format of ted_multi_translate."""

    name = "small_talks"
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        translations = tfds.features.TranslationVariableLanguages(
            languages=["de", "en", "pt-br", "calv"]
        )
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict({"translations": translations})
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        yield 0, {"translations": {"de": "ein Haus", "en": "a house", "pt-br": "uma\ncasa"}}
        yield 1, {"translations": {"de": "ohne Englisch", "pt-br": "sem"}}
        yield 2, {"translations": {"en": "two", "de": "zwei", "calv": "?"}}


class _Pictures(tfds.core.GeneratorBasedBuilder):
    """No translations."""

    name = "small_pictures"
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict({"caption": tfds.features.Text()})
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        yield 0, {"caption": "a house"}


@pytest.fixture(scope="module")
def tfds_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    for builder in (_Talks, _Pictures):
        builder(data_dir=folder).download_and_prepare()
    return folder


def test_a_set_of_variable_languages(tfds_dir):
    found = list(TfdsSplit("small_talks", "train", tfds_dir).rows())
    assert sorted(found, key=str) == [
        Row("calv", Rule.UNKNOWN_LANGUAGE),
        Row("de", Rule.UNPAIRED),
        Row("de", Pair("ein Haus", "a house")),
        Row("de", Pair("zwei", "two")),
        Row("pt", Rule.UNPAIRED),
        Row("pt", Pair("uma casa", "a house")),
    ]
    only = TfdsSplit("small_talks", "train", tfds_dir, languages=("pt-BR",))
    assert sorted(only.rows(), key=str) == [
        Row("calv", Rule.UNKNOWN_LANGUAGE),
        Row("pt-BR", Rule.UNPAIRED),
        Row("pt-BR", Pair("uma casa", "a house")),
    ]


def test_a_real_set_of_two_languages_on_made_up_data(tmp_path):
    with tfds.testing.mock_data(num_examples=3):
        rows = list(TfdsSplit("flores/neen", "test", tmp_path).rows())
    assert [row.language for row in rows] == ["ne"] * 3
    assert all(row.example.source and row.example.english for row in rows)


def test_unknown_sets_and_sets_without_translations_are_refused(tfds_dir):
    with pytest.raises(ValueError, match=r"tfds no_such_set, split train: "):
        list(TfdsSplit("no_such_set", "train", tfds_dir).rows())
    with pytest.raises(ValueError, match=r"tfds small_talks, split later: "):
        list(TfdsSplit("small_talks", "later", tfds_dir).rows())
    with pytest.raises(ValueError, match=r"has features \['caption'\]: expected several languages"):
        list(TfdsSplit("small_pictures", "train", tfds_dir).rows())


def test_documents_are_a_feature(tfds_dir):
    source = TfdsDocuments("small_pictures", "train", "captions", "caption", tfds_dir)
    assert list(source.rows()) == [Row("captions", Document("a house"))]
    for name, feature, known in (
        ("small_pictures", "title", "caption"),
        ("small_talks", "translations", "translations"),
    ):
        wrong = TfdsDocuments(name, "train", "captions", feature, tfds_dir)
        message = f"tfds {name}, split train has no text in feature '{feature}', only {known}"
        with pytest.raises(ValueError, match=message):
            list(wrong.rows())


def _tmx_of(*texts):
    units = ""
    for i, text in enumerate(texts):
        units += f'<tu><tuv xml:lang="en"><seg>{i}</seg></tuv>'
        units += f'<tuv xml:lang="de"><seg>{text}</seg></tuv></tu>'
    return f"<tmx><body>{units}</body></tmx>"


def test_a_damaged_character_costs_its_unit(tmp_path):
    path = tmp_path / "x.tmx"
    text = _tmx_of("gut", "mit &#x1F; Referenz", "mit \0 NUL", "ein Byte", "l" * 10_100_000, "gut")
    path.write_bytes(text.encode().replace(b"ein Byte", b"ein \xff Byte"))
    texts = [row.example.source for row in TmxFile(path).rows()]
    assert texts[:4] == ["gut", "mit \ufffd Referenz", "mit \ufffd NUL", "ein \ufffd Byte"]
    assert len(texts[4]) == 10_100_000 and texts[5] == "gut"

    # A sign that is not markup is text.
    path.write_text(_tmx_of("gut", "a < b & c", "1&nbsp;000", "gut"))
    texts = [row.example.source for row in TmxFile(path).rows()]
    assert texts == ["gut", "a < b & c", "1 000", "gut"]

    # Some tools write UTF-16.
    path.write_text(_tmx_of("schön", "\u2028"), encoding="utf-16")
    assert [row.example.source for row in TmxFile(path).rows()] == ["schön", ""]


def test_a_placeholder_separates_words(tmp_path):
    path = tmp_path / "x.tmx"
    texts = {
        'Klick<ph x="1"/>hier': "Klick hier",
        "Klick<ph>&lt;br/&gt;</ph><ph/>hier": "Klick hier",
        "Klick <ph/> hier<ph/>.": "Klick hier.",
        "un<bpt i='1'>&lt;b&gt;</bpt>weit<ept i='1'>&lt;/b&gt;</ept>er": "unweiter",
        "点击<ph/>这里": "点击这里",
        "点击<ph/>OK": "点击 OK",
        "<ph/>Anfang<ph/>": "Anfang",
        # Words that end with a vowel sign, a point, a tone, and a virama with a joiner.
        "नदी<ph/>किनारा": "नदी किनारा",
        "אַתָּ<ph/><ph/>בָא": "אַתָּ בָא",
        "ma˥˩<ph/>pa꜔<ph/>e\u0301<ph/>o": "ma˥˩ pa꜔ e\u0301 o",
        "അവന്\u200d<ph/>വന്നു": "അവന്\u200d വന്നു",
        # A mark continues its word; Thai, Tibetan, kana and Han are written without spaces.
        "क<ph/>\u093fत": "क\u093fत",
        "กิ่<ph/>น้ำ": "กิ่น้ำ",
        "བོ<ph/>ད": "བོད",
        "コー<ph/>ヒー々<ph/>飲<ph/>\U00020000": "コーヒー々飲\U00020000",
    }
    path.write_text(_tmx_of(*texts), encoding="utf-8")
    assert [row.example.source for row in TmxFile(path).rows()] == list(texts.values())


def test_text_without_a_language_is_counted(tmp_path):
    path = tmp_path / "x.tmx"
    text = _tmx_of("gut", "gut").replace('"de"', '"und"', 1)
    path.write_text(text.replace('"de"', '"mul"', 1))
    assert list(TmxFile(path).rows()) == [
        Row("und", Rule.UNKNOWN_LANGUAGE),
        Row("mul", Rule.UNKNOWN_LANGUAGE),
    ]


def test_a_repeated_text_is_malformed(tmp_path):
    path = tmp_path / "x.tmx"
    english = '<tuv xml:lang="en"><seg>one</seg></tuv>'
    german = '<tuv xml:lang="de"><seg>eins</seg></tuv>'
    units = [
        english + '<tuv xml:lang="de"><seg>eins</seg><seg>zwei</seg></tuv>',
        english + '<tuv xml:lang="de" lang="fr"><seg>eins</seg></tuv>',
        english + '<tuv xml:lang="de" lang="DE"><seg>eins</seg></tuv>',
        english.replace("</tuv>", "<seg>two</seg></tuv>") + german,
    ]
    path.write_text(f"<tmx><body>{''.join(f'<tu>{unit}</tu>' for unit in units)}</body></tmx>")
    rows = list(TmxFile(path).rows())
    assert {row.language for row in rows} == {"de"}
    assert [row.example for row in rows] == [
        Malformed("a text has 2 segments, expected one"),
        Malformed("a text has two languages, de and fr"),
        Pair("eins", "one"),
        Malformed("a text has 2 segments, expected one"),
    ]
    path.write_text(f'<tmx><body><tu lang="en" lang="de">{english}</tu></body></tmx>')
    with pytest.raises(ValueError, match="x.tmx is not TMX: Attribute lang redefined"):
        list(TmxFile(path).rows())


_DTD = """<!DOCTYPE tmx PUBLIC "-//LISA//TMX" "tmx14.dtd" [
  <!-- don't: <!ENTITY firm "commented"> ]> -->
  <!ENTITY firm "Müller &amp; Söhne"> <!ENTITY firm "second">
  <!ENTITY % more SYSTEM "more.dtd"> <!ENTITY other SYSTEM "secret.txt">
  <!ENTITY long-name.1 'the "&firm;"'>
  <!ENTITY marked "<hi>&firm;</hi>!"> <!ENTITY none "">
]>"""


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "iso-8859-1"])
def test_entities_of_its_own_dtd_are_text(tmp_path, encoding):
    (tmp_path / "secret.txt").write_text("secret")
    texts = {
        "bei &firm; hier": "bei Müller & Söhne hier",
        "&long-name.1;&none;.": 'the "Müller & Söhne".',
        "&marked; <hi x='&long-name.1;'>a</hi>": "Müller & Söhne! a",
        "&other; &unknown; &amp;firm; <![CDATA[&firm;]]>": "&other; &unknown; &firm; &firm;",
        "&auml;&firm": "ä&firm",
    }
    path = tmp_path / "x.tmx"
    head = f'<?xml version="1.0" encoding="{encoding}"?>\n{_DTD}\n'
    path.write_bytes((head + _tmx_of(*texts)).encode(encoding))
    assert [row.example.source for row in TmxFile(path).rows()] == list(texts.values())
    path.write_bytes((head + "<tmx>\n<tu></tmx>").encode(encoding))
    with pytest.raises(ValueError, match=f"line {head.count(chr(10)) + 2}, "):
        list(TmxFile(path).rows())


def test_entities_that_grow_are_undecodable(tmp_path):
    """The billion laughs, an entity that refers to itself, and many references to a long one."""
    laughs = [f'<!ENTITY a{i} "{f"&a{i - 1};" * 10}">' for i in range(1, 10)]
    declared = ['<!ENTITY a0 "ha">', *laughs, '<!ENTITY x "a &y;"> <!ENTITY y "b &x;">']
    declared.append(f'<!ENTITY long "{"long " * 10_000}">')
    texts = ["&a9;", "gut", "&a1;", "&x;", *["&long;"] * 200, "gut"]
    path = tmp_path / "x.tmx"
    path.write_text(f"<!DOCTYPE tmx [{''.join(declared)}]>" + _tmx_of(*texts))
    found = [row.example.source for row in TmxFile(path).rows()]
    assert "\ufffd" in found[0] and len(found[0]) < 100
    assert found[1:3] == ["gut", "ha" * 10]
    assert "\ufffd" in found[3] and len(found[3]) < 10
    of_long = found[4:-1]
    assert of_long[0] == ("long " * 10_000).strip() and of_long[-1] == "\ufffd"
    assert sum(map(len, of_long)) < 3_000_000 and found[-1] == "gut"


def test_an_encoding_that_is_not_known_is_refused(tmp_path):
    path = tmp_path / "x.tmx"
    for name in ("x-none", "base64", "idna"):
        path.write_text(f'<?xml version="1.0" encoding="{name}"?>' + _tmx_of("gut"))
        with pytest.raises(ValueError, match=f"x.tmx is not TMX: {name} is not a known encoding"):
            list(TmxFile(path).rows())
