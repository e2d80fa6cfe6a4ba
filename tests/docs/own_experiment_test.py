"""The page on experiments of one's own: its files in an empty folder."""

import os
import re
import subprocess
import sys

import pytest

from lingvo_gshard import registry
from tests.docs import scripts

_PAGE = (scripts.ROOT / "docs/own_experiment.md").read_text()
_COMMANDS = re.findall(r"^gshard (train|plan model) (.*)$", _PAGE, re.MULTILINE)


@pytest.fixture
def folder(tmp_path):
    for name, content in scripts.files_of_own_experiment().items():
        (tmp_path / name).write_text(content)
    return tmp_path


def _run(folder, *arguments):
    """Runs Python in the folder as the script `gshard` would: the folder is not on its path."""
    command = [sys.executable, "-P", *arguments]
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(scripts.ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.slow
def test_the_classes_are_found_by_their_paths(folder):
    code = """
import sys
import lingvo_gshard as gshard
p = gshard.experiment("mine.Gated", settings={"train.max_steps": 9}).params
print(p.task.encoder.moe.num_experts, p.task.encoder.dense.cls.__name__, p.train.max_steps)
print("tensorflow" in sys.modules)
"""
    done = _run(folder, "-c", code)
    assert done.stdout == "16 GatedFeedForward 9\nFalse\n", done.stderr


@pytest.mark.slow
def test_programs_find_them_before_anything_slow(folder):
    for program, flags in _COMMANDS:
        flags = flags.replace("mine.Gated", "mine.Gate").split()
        done = _run(folder, "-m", "lingvo_gshard.gshard", *program.split(), *flags)
        assert done.returncode == 1 and "its experiments are Wide, Gated." in done.stderr
        assert done.stderr.count("\n") == 1


def test_another_folder_does_not_have_them(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    done = _run(elsewhere, "-m", "lingvo_gshard.gshard", "train", "--logdir=R", "--model=mine.Wide")
    assert f"there is no module mine in {elsewhere} or among the installed" in done.stderr


@pytest.mark.slow
def test_it_is_traced_trained_and_decoded(folder, tmp_path):
    from tests import trainer_test

    data_dir = trainer_test.prepare(tmp_path / "corpus")
    small = [s for s in trainer_test._SMALL if "max_steps" not in s]
    settings = [f"--set={setting}" for setting in (*small, "train.max_steps=2")]
    flags = [f"--data_dir={data_dir}", "--logdir=RUN", "--platform=cpu", *settings]
    done = _run(folder, "-m", "lingvo_gshard.gshard", "train", "--model=mine.Gated", *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    code = "import lingvo_gshard as g; print(g.load('RUN').translate(['ba', 'ke']))"
    done = _run(folder, "-c", code)
    assert done.returncode == 0 and done.stdout.startswith("["), done.stderr[-3000:]


def test_the_base_that_the_page_takes_is_registered():
    assert "toy.MoE8E4L" in registry.registered_names()
