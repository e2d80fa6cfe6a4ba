"""Which entries of params.txt tell a folder's model, and that one process trains in it."""

import subprocess
import sys

import pytest

from lingvo_gshard.train import model_dir


def test_prefixes_are_whole_path_components(tmp_path):
    with model_dir.claimed(tmp_path, "task.dim : 4\ntasks.dim : 5\n", ("task",)):
        pass
    model_dir.check(tmp_path, "task.dim : 4\ntasks.dim : 6\n", ("task",))
    with pytest.raises(ValueError, match=r"tasks.dim: 6, not 5\.$"):
        model_dir.check(tmp_path, "task.dim : 4\ntasks.dim : 6\n", ())
    with pytest.raises(ValueError, match=r"task.dim: absent, not 4\.$"):
        model_dir.check(tmp_path, "tasks.dim : 5\n", ("task",))


def test_settings_of_earlier_versions_are_ignored(tmp_path):
    removed = "task.moe.second_threshold : 0.2\ntask.moe.train_capacity.number : 1\n"
    (tmp_path / "params.txt").write_text("task.dim : 4\n" + removed)
    model_dir.check(tmp_path, "task.dim : 4\n", ("task",))


_CLAIMS = """
import sys
from lingvo_gshard.train import model_dir
with model_dir.claimed(sys.argv[1], "task.dim : 4\\n", ("task",)):
    print("claimed", flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_one_process_until_that_ends(tmp_path):
    """It is killed, and leaves the file behind."""
    command = [sys.executable, "-c", _CLAIMS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"claimed\n"
        with (
            pytest.raises(ValueError, match="another process trains in this folder"),
            model_dir.claimed(tmp_path, "task.dim : 4\n", ("task",)),
        ):
            pass
        other.kill()
    with model_dir.claimed(tmp_path, "task.dim : 4\n", ("task",)):
        assert (tmp_path / "train.lock").exists()
