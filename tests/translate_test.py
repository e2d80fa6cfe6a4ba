"""What `translate` reads and writes; trainer_test and bundle_test run it whole."""

import io
import os
import pathlib
import subprocess
import sys
import types

import pytest
from absl import flags
from absl.testing import flagsaver

from lingvo_gshard import cli, line_program
from lingvo_gshard.decoding.outcomes import Finish, Line
from lingvo_gshard.decoding.text_decoder import Hypothesis, Token
from lingvo_gshard.decoding.translator import Translator
from tests.decoding.reverser import Letters, Reverser

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
def test_lines_end_only_at_newlines_and_any_bytes_are_read(data, lines):
    assert [line for some in line_program.read_lines(io.BytesIO(data)) for line in some] == lines


def test_lines_are_yielded_on_arrival(monkeypatch):
    monkeypatch.setattr(line_program, "_READ_BYTES", 4)
    stream = io.BytesIO("ab\nc\u00e4d e\n\nf".encode())
    assert list(line_program.read_lines(stream)) == [["ab"], ["c\u00e4d e", ""], ["f"]]


def test_translations_of_a_line_are_separated_by_tabs():
    cut = Hypothesis("hello", -1.5, 2, finish=Finish.LENGTH)
    found = (Hypothesis("good day", -0.25, 3), cut)
    flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(nbest=2):
        assert line_program._line(found) == Line("good day\thello", Finish.LENGTH)
    with flagsaver.flagsaver(nbest=2, scores=line_program._Scores.LINES):
        assert line_program._line(found).text == "-0.2500\tgood day\t-1.5000\thello"
    with flagsaver.flagsaver(nbest=2, scores=line_program._Scores.LINES, finish=True):
        written = line_program._line(found).text
        assert written == "-0.2500\tstop\tgood day\t-1.5000\tlength\thello"
    assert line_program._line(found) == Line("good day", Finish.STOP)


def test_the_scores_of_tokens_follow_the_lines():
    tokens = (Token(4, "▁good", -0.125), Token(2, "</s>", -0.5))
    flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(scores=line_program._Scores.TOKENS):
        written = line_program._line((Hypothesis("good", -0.25, 2, tokens=tokens),)).text
    assert written == "-0.2500\t▁good -0.1250 </s> -0.5000\tgood"


@pytest.mark.parametrize(
    ("flag", "scores"),
    [
        ("--scores", "LINES"),
        ("--noscores", "NONE"),
        ("--scores=TOKENS", "TOKENS"),
        ("--scores=tokens", "TOKENS"),
        ("--scores=true", "LINES"),
    ],
)
def test_scores_needs_no_value(flag, scores):
    own = flags.FlagValues()
    flags.DEFINE_flag(line_program._ScoresFlag("scores"), own)
    own(["translate", flag])
    assert own.scores is line_program._Scores[scores]
    with pytest.raises(flags.Error, match="--scores=x: expected one of NONE, LINES, TOKENS"):
        own(["translate", "--scores=x"])


class _UnlikelyEnds(Reverser):
    """Sources of four letters fill their rows, where EOS is forced."""

    def __call__(self, features):
        found = super().__call__(features)
        return {**found, "token_log_probs": found["token_log_probs"] - 1.0}


@pytest.fixture(params=["standard input", "a file"])
def translated(request, tmp_path, monkeypatch):
    """Returns a function that translates bytes with either way of reading, and returns bytes."""
    flags.FLAGS.mark_as_parsed()
    translator = Translator(_UnlikelyEnds(2, (5,)), Letters(), Letters())
    reader = line_program.Reader(translator, str)

    def from_stdin(text):
        output = io.BytesIO()
        monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(text)))
        monkeypatch.setattr(sys, "stdout", types.SimpleNamespace(buffer=output))
        try:
            line_program._decode_stdin(reader, 0)
        finally:
            monkeypatch.undo()
        return output.getvalue()

    def from_file(text):
        source = tmp_path / "in.txt"
        source.write_bytes(text)
        line_program._decode_file(reader, source, tmp_path / "out.txt", 0)
        return (tmp_path / "out.txt").read_bytes()

    return from_file if request.param == "a file" else from_stdin


def test_cut_lines_are_reported_with_the_first_one(translated, caplog):
    text = b"ab\nabcd\n\nabc\nabce\n"
    assert translated(text) == b"ba\ndcba\n\ncba\necba\n"
    (warning,) = caplog.messages
    assert warning.startswith("2 of 5 lines were cut at the maximum length")
    assert "the first is line 2." in warning


def test_complete_lines_cause_no_warning(translated, caplog):
    assert translated(b"ab\nabc") == b"ba\ncba\n" and not caplog.messages


def test_a_line_without_a_result_is_named(translated):
    with pytest.raises(ValueError, match="^line 3 has no translation: .* not finite"):
        translated(b"ab\n\na!b\nab\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give either --logdir or --bundle"),
        (["--bundle=b", "--nbest=0"], "translate: --nbest must be 1 or more, got 0; see"),
    ],
)
def test_mistaken_flags_are_refused_in_one_line(flags, message):
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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input": "here.txt"}, "give both --input and --output"),
        ({"num_processes": 2, "coordinator": "a:1"}, "both .*; several processes need them"),
        ({"input": "gone.txt", "output": "out.txt"}, "--input=gone.txt: there is no such file"),
        ({"input": "here.txt", "output": "gone/out.txt"}, "--output=gone/out.txt: expected a file"),
        ({"input": "here.txt", "output": "pipe"}, "--output=pipe: expected a regular file"),
        ({"input": "here.txt", "output": "./here.txt"}, "--output=here.txt is the file of --input"),
        ({"input": "here.txt", "output": "."}, "--output=.: expected a regular file"),
    ],
)
def test_files_that_cannot_be_read_or_written_are_refused(tmp_path, monkeypatch, given, message):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("here.txt").touch()
    pathlib.Path("link.txt").symlink_to("here.txt")
    os.mkfifo("pipe")
    flags.FLAGS.mark_as_parsed()
    cli.processes.cache_clear()
    with flagsaver.flagsaver(bundle="b", **given), pytest.raises(ValueError, match=message):
        line_program._check_files()
