"""What `translate` reads and writes; trainer_test and bundle_test run it whole."""

import io
import os
import pathlib
import subprocess
import sys

import pytest
from absl import flags
from absl.testing import flagsaver

from lingvo_gshard import cli, line_program
from lingvo_gshard.decoding.text_decoder import Hypothesis

_ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"ab", ["ab"]),
        (b"ab\n\ncd\n", ["ab", "", "cd"]),
        (b"a\xe2\x80\xa8b\x0cc\x85d\n", ["a\u2028b\x0cc\ufffdd"]),  # One newline, one line.
        (b"\xff\xfe\n\xc3", ["\ufffd\ufffd", "\ufffd"]),
        (b"a\r\nb", ["a\r", "b"]),
    ],
)
def test_lines_end_at_newlines_alone_and_any_bytes_are_read(data, lines):
    assert [line for some in line_program.read_lines(io.BytesIO(data)) for line in some] == lines


def test_lines_are_there_as_soon_as_they_have_come(monkeypatch):
    monkeypatch.setattr(line_program, "_READ_BYTES", 4)
    stream = io.BytesIO("ab\nc\u00e4d e\n\nf".encode())
    assert list(line_program.read_lines(stream)) == [["ab"], ["c\u00e4d e", ""], ["f"]]


def test_translations_of_a_line_stand_between_tabs():
    found = (Hypothesis("good day", -0.25, 3), Hypothesis("hello", -1.5, 2))
    flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(nbest=2):
        assert line_program._line(found) == "good day\thello"
    with flagsaver.flagsaver(nbest=2, scores=True):
        assert line_program._line(found) == "-0.2500\tgood day\t-1.5000\thello"
    assert line_program._line(found) == "good day"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give either --logdir or --bundle"),
        (["--logdir=a", "--export=b"], "--export: exporting is a program, lingvo_gshard.export_b"),
        (["--logdir=a", "--attention"], "--attention is for lingvo_gshard.serve and export_bundle"),
        (["--logdir=a", "--nbest=many"], "flag --nbest=many: invalid literal"),
        (["--bundle=b", "--nbest=0"], "translate: --nbest must be 1 or more, got 0; see"),
        (["--bundle=b", "--beam_size=0"], "translate: --beam_size must be 1 or more, got 0; see"),
    ],
)
def test_flags_that_make_no_sense_are_refused_in_one_line(flags, message):
    command = [sys.executable, "-m", "lingvo_gshard.translate", *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=_ROOT, timeout=60)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("translate: ") and message in done.stderr


def test_a_closed_standard_input_is_refused():
    command = [sys.executable, "-m", "lingvo_gshard.translate", "--bundle=b"]
    closed = ["bash", "-c", 'exec "$@" <&-', "bash", *command]
    done = subprocess.run(closed, capture_output=True, text=True, cwd=_ROOT, timeout=60)
    assert done.stderr == "translate: standard input is closed; give --input and --output.\n"
    assert done.returncode == 1


def test_a_lack_of_memory_is_told_in_one_line():
    """As JAX raises it; any other RuntimeError is ours, and shows where."""
    code = "from lingvo_gshard import cli\ndef main(): raise RuntimeError({!r})\ncli.run('x', main)"
    told = []
    for message in ("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.", "INTERNAL: oh"):
        command = [sys.executable, "-c", code.format(message)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=_ROOT, timeout=60)
        assert done.returncode == 1
        told.append(done.stderr)
    assert told[0] == "x: RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\n"
    assert "Traceback" in told[1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input": "here.txt"}, "give both --input and --output"),
        ({"output": "out.txt"}, "give both --input and --output"),
        ({"num_processes": 2, "coordinator": "a:1"}, "both .*; several processes need them"),
        ({"input": "gone.txt", "output": "out.txt"}, "--input=gone.txt: there is no such file"),
        ({"input": "here.txt", "output": "gone/out.txt"}, "--output=gone/out.txt: expected a file"),
        ({"input": "here.txt", "output": "pipe"}, "--output=pipe: expected a file, and this"),
        ({"input": "here.txt", "output": "./here.txt"}, "--output=here.txt is the file of --input"),
        ({"input": "here.txt", "output": "link.txt"}, "--output=link.txt is the file of --input"),
        ({"input": "here.txt", "output": "."}, "--output=.: expected a file, and this"),
    ],
)
def test_files_that_cannot_be_read_or_written_are_refused(tmp_path, monkeypatch, given, message):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("here.txt").touch()
    pathlib.Path("link.txt").symlink_to("here.txt")
    os.mkfifo("pipe")
    flags.FLAGS.mark_as_parsed()
    cli.processes.cache_clear()
    with (
        flagsaver.flagsaver(bundle="b", **given),
        pytest.raises(ValueError, match=message),
    ):
        line_program._check_files()
