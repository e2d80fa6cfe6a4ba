import gzip

import pytest

from data_prep.sources.source import Row
from data_prep.sources.tmx import TmxFile
from data_prep.tsv import Pair

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
def path(tmp_path):
    path = tmp_path / "memory.tmx.gz"
    path.write_bytes(gzip.compress(_TMX.encode()))
    return path


def test_every_language_beside_english(path):
    assert list(TmxFile(path).rows()) == [
        Row("de", Pair("ein rotes Haus", "a red house")),
        Row("pt", Pair("uma casa vermelha", "a red house")),
        Row("pt", Pair("dois", "two")),
    ]


def test_wanted_languages_take_their_regions(path):
    both = TmxFile(path, ("pt", "pt-BR"))
    assert [row.language for row in both.rows()] == ["pt-BR", "pt"]
    assert [row.language for row in TmxFile(path, ("pt",)).rows()] == ["pt", "pt"]


def test_many_units_are_forgotten_as_they_are_read(tmp_path):
    unit = '<tu><tuv lang="en"><seg>n{0}</seg></tuv><tuv lang="de"><seg>z{0}</seg></tuv></tu>'
    path = tmp_path / "many.tmx"
    path.write_text(f"<tmx><body>{''.join(map(unit.format, range(5000)))}</body></tmx>")
    rows = list(TmxFile(path).rows())
    assert [row.pair.english for row in rows] == [f"n{i}" for i in range(5000)]


def test_what_is_no_tmx_is_refused(tmp_path):
    (tmp_path / "x.tmx").write_text("<tmx><body><tu>")
    with pytest.raises(ValueError, match=r"x.tmx is not TMX: "):
        list(TmxFile(tmp_path / "x.tmx").rows())
    with pytest.raises(ValueError, match=r"no file .*none.tmx"):
        list(TmxFile(tmp_path / "none.tmx").rows())
