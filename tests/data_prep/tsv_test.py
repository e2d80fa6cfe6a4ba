import errno
import gzip
import io

import pytest

from data_prep import tsv
from data_prep.multilingual import TmxFile
from data_prep.sources import TsvFile
from data_prep.tsv import Malformed, Pair
from lingvo_gshard.files import text_file


def test_reads_plain_and_gzip_alike(tmp_path):
    content = "\ufeffein Haus\ta house\r\n  zwei Hunde \t two dogs\nhé\tho\n\tnothing".encode()
    (tmp_path / "de-en.tsv").write_bytes(content)
    (tmp_path / "de-en.tsv.gz").write_bytes(gzip.compress(content))
    expected = [
        Pair("ein Haus", "a house"),
        Pair("zwei Hunde", "two dogs"),
        Pair("hé", "ho"),
        Pair("", "nothing"),
    ]
    for name in ("de-en.tsv", "de-en.tsv.gz"):
        assert list(tsv.read(tmp_path / name)) == expected


def test_malformed_lines_have_their_reason(tmp_path):
    path = tmp_path / "de-en.tsv"
    path.write_bytes(b"a\tb\nno tab\nc\td\ntwo\ttabs\there\n\xff\tx\n")
    assert list(tsv.read(path)) == [
        Pair("a", "b"),
        Malformed("expected 1 tab, got 0"),
        Pair("c", "d"),
        Malformed("expected 1 tab, got 2"),
        Malformed("not UTF-8: invalid start byte at byte 0"),
    ]


def test_spans_hold_each_line_once_for_any_boundaries(tmp_path, monkeypatch):
    path = tmp_path / "de-en.tsv"
    path.write_bytes("\ufeffa\tb\r\n\nx\tno end é\n\xffé\ty\n".encode() + b"last\tone")
    whole = list(tsv.read(path))
    for size in range(1, path.stat().st_size + 2):
        monkeypatch.setattr(tsv, "BYTES_PER_SPAN", size)
        found = []
        for span in TsvFile(path, "de").spans():
            found += tsv.read_lines(path, tsv.parse, span)
        assert found == whole
        assert len(TsvFile(path, "de").spans()) == -(-path.stat().st_size // size)
    assert TsvFile(tmp_path / "x.tsv.gz", "de").spans() == [tsv.WHOLE]


def test_a_file_that_became_shorter_is_refused(tmp_path):
    path = tmp_path / "de-en.tsv"
    path.write_text("a\tb\n" * 10)
    (span,) = TsvFile(path, "de").spans()
    path.write_text("a\tb\n" * 9)
    with pytest.raises(ValueError, match=r"de-en.tsv has 36 bytes, fewer than when the run"):
        list(tsv.read_lines(path, tsv.parse, span))


def test_one_nul_costs_its_line(tmp_path):
    path = tmp_path / "de-en.tsv"
    path.write_bytes(b"a\tb\nc\x00\td\ne\tf\n")
    nul = Malformed("it has a NUL byte")
    assert list(tsv.read(path)) == [Pair("a", "b"), nul, Pair("e", "f")]


def test_binary_content_and_missing_files_are_refused(tmp_path):
    path = tmp_path / "de-en.tsv"
    path.write_bytes(b"a\tb\n" + bytes(range(8)) * 9 + b"\n")
    with pytest.raises(ValueError, match=r"de-en.tsv is binary"):
        list(tsv.read(path))
    path.write_text("ein Haus\ta house\n", encoding="utf-16")
    with pytest.raises(ValueError, match=r"de-en.tsv is UTF-16, expected text in UTF-8: iconv"):
        list(tsv.read(path))
    with pytest.raises(ValueError, match=r"none.tsv: there is no such file"):
        list(tsv.read(tmp_path / "none.tsv"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:20] + b"\xaa\x55" * 8 + data[36:],
        lambda data: b"not gzip at all",
    ],
)
def test_corrupt_gzip_is_refused(tmp_path, damage):
    path = tmp_path / "de-en.tsv.gz"
    text = "".join(f"Satz {i * i}\tsentence {i}\n" for i in range(500)).encode()
    path.write_bytes(damage(gzip.compress(text)))
    with pytest.raises(ValueError, match=r"de-en.tsv.gz is corrupt gzip"):
        list(tsv.read(path))


@pytest.mark.parametrize("source", [TsvFile, TmxFile])
def test_a_disk_that_is_lost_midway_is_named_by_the_file(tmp_path, monkeypatch, source):
    class Lost(io.BytesIO):
        def read(self, *size):
            raise OSError(errno.ESTALE, "Stale file handle")

        __next__ = readline = read

    (tmp_path / "x.tsv").touch()
    monkeypatch.setitem(vars(text_file), "open", lambda *args: Lost())
    with pytest.raises(OSError, match=r"Stale file handle: '.*/x.tsv'"):
        list(source(tmp_path / "x.tsv", "de").rows())


def test_written_bytes_depend_only_on_the_pairs(tmp_path):
    pairs = [Pair("eins", "one"), Pair("zwei", "two")]
    tsv.write(tmp_path / "x" / "a-en.tsv.gz", pairs)
    tsv.write(tmp_path / "y" / "b-en.tsv.gz", pairs)
    first = (tmp_path / "x" / "a-en.tsv.gz").read_bytes()
    assert first == (tmp_path / "y" / "b-en.tsv.gz").read_bytes()
    assert first[4:8] == bytes(4)  # gzip's time stamp
    assert list(tsv.read(tmp_path / "x" / "a-en.tsv.gz")) == pairs


def test_any_two_texts_make_a_line():
    assert Pair.of(" ein\tHaus\n", "a\r\nhouse\u2028") == Pair("ein Haus", "a house")
