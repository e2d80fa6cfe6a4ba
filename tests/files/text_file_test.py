import gzip
import io

import pytest

from lingvo_gshard import line_program
from lingvo_gshard.files import text_file

_TEXT = "ein Haus\nzwei H\u00e4user\n" * 40
_ZSTD = b"\x28\xb5\x2f\xfd\x04\x00\x01\x02"


@pytest.mark.parametrize(
    ("content", "name"),
    [
        pytest.param(gzip.compress(_TEXT.encode()), "gzip", id="gzip"),
        pytest.param(_ZSTD, "zstd", id="zstd"),
        pytest.param(b"PK\x03\x04\x14\x00", "zip", id="zip"),
        pytest.param(_TEXT.encode("utf-16"), "UTF-16", id="UTF-16"),
        pytest.param(_TEXT.encode("utf-32"), "UTF-32", id="UTF-32"),
        pytest.param(_TEXT.encode("utf-16-le"), "binary", id="UTF-16 without a mark"),
        pytest.param(b"\7\0\0\0" * 900, "binary", id="integers"),
    ],
)
def test_binary_files_are_refused_with_their_format(tmp_path, content, name):
    path = tmp_path / "x.txt"
    path.write_bytes(content)
    told = rf"x.txt is {name}[,:] .*expected text in UTF-8"
    with pytest.raises(ValueError, match=told), text_file.opened_text(path):
        pass

    # Also in a file whose name ends in .gz, and on standard input.
    (tmp_path / "y.txt.gz").write_bytes(gzip.compress(content))
    with pytest.raises(ValueError, match=rf"y.txt.gz is {name}"):
        with text_file.opened_text(tmp_path / "y.txt.gz"):
            pass
    with path.open("rb") as stream, pytest.raises(ValueError, match=rf"standard input is {name}"):
        list(line_program.read_lines(stream, "standard input"))


@pytest.mark.parametrize(
    "content",
    [b"", b"a\0b\n", bytes(range(256)) * 20, b"\xff\xfe\n\xc3", "\ufeffein Haus\n".encode()],
)
def test_text_with_a_little_damage_is_text(tmp_path, content):
    path = tmp_path / "x.txt"
    path.write_bytes(content)
    with text_file.opened_text(path) as file:
        assert file.read() == content


def test_gzip_and_plain_files_have_the_same_lines(tmp_path):
    (tmp_path / "x.txt").write_text(_TEXT)
    (tmp_path / "x.txt.gz").write_bytes(gzip.compress(_TEXT.encode()))
    for name in ("x.txt", "x.txt.gz"):
        with text_file.opened_text(tmp_path / name) as stream:
            lines = [line for some in line_program.read_lines(stream, name) for line in some]
        assert lines == _TEXT.split("\n")[:-1]


def test_the_first_line_that_is_not_utf_8_is_reported(tmp_path, caplog):
    path = tmp_path / "x.txt"
    path.write_bytes(b"good\n\nna\xefve\nbad \xff\n")
    with path.open("rb") as stream:
        lines = [line for some in line_program.read_lines(stream, "x.txt") for line in some]
    assert lines == ["good", "", "na\ufffdve", "bad \ufffd"]
    (told,) = caplog.messages
    assert told.startswith("x.txt: line 3 is not UTF-8 (invalid continuation byte at byte 2); ")


def test_a_line_that_no_memory_holds_is_refused(monkeypatch):
    monkeypatch.setattr(text_file, "MAX_LINE_BYTES", 1 << 20)
    stream = io.BytesIO(b"a\n" + b"x" * (3 << 20))
    with pytest.raises(ValueError, match="^the text: line 2 has over 1 MiB, expected a line"):
        list(line_program.read_lines(stream))
