import gzip
import logging

import pytest
from absl import logging as absl_logging

from data_prep import tsv
from data_prep.tsv import Pair


def test_reads_plain_and_gzip_alike(tmp_path):
    content = "\ufeffein Haus\ta house\r\n  zwei Hunde \t two dogs\nhé\tho".encode()
    (tmp_path / "de-en.tsv").write_bytes(content)
    (tmp_path / "de-en.tsv.gz").write_bytes(gzip.compress(content))
    expected = [Pair("ein Haus", "a house"), Pair("zwei Hunde", "two dogs"), Pair("hé", "ho")]
    for name in ("de-en.tsv", "de-en.tsv.gz"):
        text = tsv.read(tmp_path / name, max_malformed_share=0.0)
        assert text.pairs == expected
        assert text.num_malformed == 0


def test_malformed_lines_are_logged_with_their_number_and_counted(tmp_path, caplog):
    path = tmp_path / "de-en.tsv"
    path.write_bytes(
        b"a\tb\nno tab\nc\td\ntwo\ttabs\there\n\xff\tx\n\tempty source\nempty\t \ne\tf\n"
    )
    absl_logging.use_absl_handler()
    with caplog.at_level(logging.WARNING):
        absl_logging.get_absl_logger().addHandler(caplog.handler)
        text = tsv.read(path, max_malformed_share=0.7)
        absl_logging.get_absl_logger().removeHandler(caplog.handler)
    assert text.pairs == [Pair("a", "b"), Pair("c", "d"), Pair("e", "f")]
    assert text.num_malformed == 5
    for number, reason in (
        (2, "expected 1 tab, given 0"),
        (4, "expected 1 tab, given 2"),
        (5, "not UTF-8"),
        (6, "the source is empty"),
        (7, "the English is empty"),
    ):
        assert f"{path}:{number}: skipped: {reason}" in caplog.text


def test_too_many_malformed_lines_are_refused(tmp_path):
    path = tmp_path / "de-en.tsv"
    path.write_text("a\tb\n" * 98 + "x\n" * 2)
    assert tsv.read(path, max_malformed_share=0.02).num_malformed == 2
    with pytest.raises(ValueError, match=r"de-en.tsv: 2 of 100 lines are malformed \(2.0%\).*1.0%"):
        tsv.read(path, max_malformed_share=0.01)


def test_binary_content_is_refused(tmp_path):
    path = tmp_path / "de-en.tsv"
    path.write_bytes(b"a\tb\n\x00\x01\x02\n")
    with pytest.raises(ValueError, match=r"de-en.tsv is binary"):
        tsv.read(path, max_malformed_share=1.0)


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
        tsv.read(path, max_malformed_share=1.0)


def test_written_bytes_depend_on_the_pairs_alone(tmp_path):
    pairs = [Pair("eins", "one"), Pair("zwei", "two")]
    tsv.write(tmp_path / "x" / "a-en.tsv.gz", pairs)
    tsv.write(tmp_path / "y" / "b-en.tsv.gz", pairs)
    first = (tmp_path / "x" / "a-en.tsv.gz").read_bytes()
    assert first == (tmp_path / "y" / "b-en.tsv.gz").read_bytes()
    assert first[4:8] == bytes(4)  # gzip's time stamp
    assert tsv.read(tmp_path / "x" / "a-en.tsv.gz", 0.0).pairs == pairs
