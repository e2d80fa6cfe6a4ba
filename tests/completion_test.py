"""Completion in bash: of programs, of the programs of `gshard plan`, and of flags."""

import os
import shutil
import subprocess
import sys

import pytest

from lingvo_gshard import completion

_COMPLETE = """
{script}
COMP_WORDS=({words})
COMP_CWORD={index}
_gshard
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def offered(tmp_path):
    """Returns what bash offers for a command line whose last word is to be completed."""
    command = tmp_path / "gshard"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m lingvo_gshard.gshard "$@"\n')
    command.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": os.getcwd()}

    def run(line):
        words = line.split(" ")
        quoted = " ".join(f"'{word}'" for word in words)
        source = _COMPLETE.format(script=completion._SCRIPT, words=quoted, index=len(words) - 1)
        done = subprocess.run(
            [shutil.which("bash"), "-c", source],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout.split()

    return run


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("gshard tra", ["train", "translate"]),
        ("gshard train --logdir=R --num_pa", ["--num_partitions="]),
        ("gshard settings toy.MoE8E4L --to", ["--toml"]),
        ("gshard serve --num_proc", []),
    ],
)
def test_completions_are_those_of_the_help(offered, line, expected):
    assert offered(line) == expected


def test_the_program_prints_the_script():
    command = [sys.executable, "-m", "lingvo_gshard.gshard", "completion"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == completion._SCRIPT + "\n", done.stderr
