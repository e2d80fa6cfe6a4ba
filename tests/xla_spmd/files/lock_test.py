"""Locks for files that only one process at a time may write."""

import subprocess
import sys

import pytest

from xla_spmd.files import atomic_file, lock

_HOLDS = """
import sys
from xla_spmd.files import lock
with lock.held(sys.argv[1], "writes this"):
    print("held", flush=True)
    sys.stdin.read()
"""


def _holder(target):
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDS, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"held\n"
    return process


def test_one_process_at_a_time_through_any_link(tmp_path):
    target = tmp_path / "out [1]"
    link = tmp_path / "link"
    link.symlink_to(target)
    with _holder(target) as other:
        refused = pytest.raises(ValueError, match=r"link: another process writes this; wait for it")
        with refused, lock.held(link, "writes this"):
            pass
        other.stdin.close()
        other.wait()

    assert list(tmp_path.iterdir()) == [link]
    with lock.held(link, "writes this"):
        assert (tmp_path / "out [1].lock").exists()


def test_a_killed_process_releases_its_lock(tmp_path):
    target = tmp_path / "folder"
    with _holder(target) as other:
        other.kill()
        other.wait()
    assert (tmp_path / "folder.lock").exists()
    with lock.held(target, "writes this"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_being_replaced_is_not_replaced_by_another(tmp_path):
    target = tmp_path / "bundle"
    with _holder(target) as other:
        refused = pytest.raises(ValueError, match="bundle: another process writes this folder")
        with refused, atomic_file.replacing_folder(target):
            pytest.fail("it is locked")
        other.kill()
    with atomic_file.replacing_folder(target) as partial:
        (partial / "file").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["bundle", "file"]
