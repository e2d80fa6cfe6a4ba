"""A program's texts about its command line, and the home folder in its flags."""

import os
import subprocess
import sys

import pytest

from xla_spmd.files import storage
from xla_spmd.runtime import usage

_PROGRAM = """
from absl import flags
from xla_spmd.runtime import command_line

flags.DEFINE_string("out", "here", "A folder.")
flags.DEFINE_multi_string("run", [], "NAME=PATH; repeatable.")
flags.DEFINE_list("parts", None, "Some paths.")
flags.DEFINE_enum("kind", "a", ["a", "b"], "A kind.")
flags.DEFINE_bool("deep", True, "Whether.")
flags.DEFINE_integer("hidden", 3, "Not shown.")

def main(*words):
    values = flags.FLAGS
    print(values.out, *values.run, *(values.parts or []), *words)

command_line.run("tells", main, ["[WORD]", "[MORE...]"], unused=["hidden"])
"""


@pytest.fixture
def tells(tmp_path):
    """Runs a program in an empty folder, with the home folder /home/me."""
    script = tmp_path / "tells.py"
    script.write_text(f'"""Tells its flags."""\n{_PROGRAM}')

    def run(*args):
        return subprocess.run(
            [sys.executable, str(script), *args],
            env=os.environ | {"PYTHONPATH": os.getcwd(), "HOME": "/home/me"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


def test_a_home_folder_takes_the_place_of_a_tilde(tells):
    done = tells("--out=~/x", "--run=A=~/a", "--run=B=b~", "--parts=~,c", "~/word")
    assert done.stdout == "/home/me/x A=/home/me/a B=b~ /home/me c /home/me/word\n", done.stderr


def test_a_user_without_a_home_is_refused_and_makes_no_folder(tells, tmp_path):
    done = tells("--out=~nobody-has-it/x")
    assert done.returncode == 1 and done.stderr == (
        "tells: --out=~nobody-has-it/x: ~nobody-has-it has no home folder here; for a "
        "file of that name, ./~nobody-has-it/x.\n"
    )
    assert os.listdir(tmp_path) == ["tells.py"]


def test_the_help_has_each_flag_with_its_default(tells):
    done = tells("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: tells [WORD] [MORE...] [FLAGS]\n\nTells its flags.\n")
    for flag in ("--[no]deep\n      Whether. (default: true)\n", "--kind=a|b\n", "--parts=A,B\n"):
        assert f"  {flag}" in done.stdout
    assert "hidden" not in done.stdout


def test_help_after_two_dashes_is_a_word():
    assert usage.asks_for_help(["tells", "--out=x", "-h"])
    assert not usage.asks_for_help(["tells", "--", "--help"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "<", "in.txt"], "unexpected <: only a shell redirects"),
        (["a", "out=x"], "unexpected out=x: a flag begins with --, as in --out=x"),
        (["a", "b"], r"unexpected arguments \['b'\]"),
    ],
)
def test_words_that_a_program_does_not_take(words, message):
    with pytest.raises(ValueError, match=message):
        usage.check_words(words, ["WORD"])
    usage.check_words(words[:1], ["WORD"])
    usage.check_words(words, ["WORD..."])


def test_paths_in_buckets_and_plain_ones_are_left_alone(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    for path in ("gs://b/~x", "/a/~", "a~", "./~", ""):
        assert storage.expanded(path) == path
    assert storage.expanded("~") == "/home/me"
