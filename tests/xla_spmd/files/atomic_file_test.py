import errno

import pytest

from xla_spmd.files import atomic_file


def test_a_failing_block_does_not_change_the_file(tmp_path):
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


def test_the_target_of_a_link_is_replaced(tmp_path):
    (tmp_path / "link").symlink_to("first")
    for content in ("old", "new"):
        with atomic_file.replacing_folder(tmp_path / "link") as partial:
            (partial / "a").write_text(content)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "first/a").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "link"]


def test_folders_beside_it_are_unchanged(tmp_path):
    for name in ("model.before", "model.partial"):
        (tmp_path / name).mkdir()
    for content in ("one", "two"):
        with atomic_file.replacing_folder(tmp_path / "model") as partial:
            (partial / "file").write_text(content)
    assert (tmp_path / "model/file").read_text() == "two"
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["model", "model.before", "model.partial"]
