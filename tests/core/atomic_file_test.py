import errno

import pytest

from lingvo_gshard.core import atomic_file


def test_a_block_that_fails_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "a.json"
    atomic_file.write(path, "before")
    with pytest.raises(RuntimeError), atomic_file.replacing(path) as partial:
        partial.write_text("half of ")
        raise RuntimeError("stopped")
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_content_replaces_the_file_and_leaves_no_other(tmp_path):
    atomic_file.write(tmp_path / "a", b"\x00\x01")
    atomic_file.write(tmp_path / "a", "text\n")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"text\n"


def test_an_error_without_a_name_gets_the_files(tmp_path):
    with (
        pytest.raises(OSError, match=r"No space left.*a\.partial"),
        atomic_file.replacing(tmp_path / "a"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_an_error_without_a_number_keeps_its_message(tmp_path):
    with (
        pytest.raises(OSError, match=r"800 requested and 0 written: .*a\.partial") as raised,
        atomic_file.replacing(tmp_path / "a"),
    ):
        raise OSError("800 requested and 0 written")
    assert raised.value.errno == errno.EIO
