"""Known greetings of the libraries are dropped, and nothing else."""

import os
import re
import subprocess
import sys

import pytest

from xla_spmd.runtime import greeting_filter, log_lines

# The lines of TensorFlow 2.21 and JAX 0.12.
_GREETINGS = """\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795744946.941126    4733 port.cc:153] oneDNN custom operations are on. You may see
I1127 02:02:45.309961    5124 pjrt_api.cc:119] GetPjrtApi was found for cuda at /plugin.so
To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with the
E0000 00:00:1795744976.054836    4647 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA er
W1127 06:02:04.675951   22747 utils.cc:471] This branch is not expected as JAX is not known to use
W1127 02:23:56.332813   29081 coordination_service.cc:185] [9] Using experimental recoverable task
"""
_OTHERS = """\
W1127 02:03:50.167440    5858 py_client.cc:492] Module has GSPMD attrs or ops, but Shardy is enabled
W1127 02:03:24.234873    4433 sharding_propagation.cc:3202] GSPMD sharding propagation is going to
E0000 00:00:1795744976.054836    4647 cuda_platform.cc:52] another failure
F1127 01:50:24.526253    9123 parse_flags_from_env.cc:234] Unknown flags in XLA_FLAGS: --xla_no=3
W1127 02:02:23.020839 139803945900928 too_long.py:95] split train: 0.8% of the pairs are longer

In this project, all is well.
Importing
"""


@pytest.fixture(autouse=True)
def filtered(monkeypatch):
    monkeypatch.delenv(log_lines.VARIABLE, raising=False)


def test_greetings_are_known_by_their_text():
    for line in _GREETINGS.splitlines():
        assert log_lines.is_greeting(line), line
    for line in _OTHERS.splitlines():
        assert not log_lines.is_greeting(line), line


def test_all_output_is_available_on_request(monkeypatch):
    monkeypatch.setenv(log_lines.VARIABLE, "0")
    assert not any(log_lines.is_greeting(line) for line in _GREETINGS.splitlines())


@pytest.fixture
def running():
    """Starts the filter, unbuffered."""
    command = [sys.executable, "-I", "-S", greeting_filter.__file__, log_lines.GREETING]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, bufsize=0, **pipes) as process:
        yield process
        process.stdin.close()


def _rest(process):
    process.stdin.close()
    return process.stdout.read().decode()


def test_the_filter_keeps_the_order_of_lines_however_they_are_cut(running):
    mixed = []
    for greeting, other in zip(_GREETINGS.splitlines() * 2, _OTHERS.splitlines() * 2, strict=False):
        mixed += [greeting, other]
    text = "\n".join(mixed).encode()
    for i in range(0, len(text), 7):
        running.stdin.write(text[i : i + 7])
    kept = [line for line in mixed if line not in _GREETINGS.splitlines()]
    assert _rest(running) == "\n".join(kept)


@pytest.mark.parametrize("text", [b"train:   0%|", b"\r 50%|", b"E1\rE2", b"\x1b[1mbold"])
def test_the_filter_lets_a_bar_pass_before_its_line_ends(running, text):
    running.stdin.write(text)
    assert os.read(running.stdout.fileno(), 100) == text
    # The rest of that line is part of the bar, even if it looks like a log line.
    running.stdin.write(b"I0000 00:00:1795744946.941126    4733 port.cc:153] news\nI am\n")
    assert _rest(running).endswith("] news\nI am\n")


def test_the_filter_passes_an_unfinished_line_when_the_writer_ends(running):
    running.stdin.write(b"F0000 00:00:1.0 1 cpu.cc:1] no AVX\xff")
    running.stdin.close()
    assert running.stdout.read() == b"F0000 00:00:1.0 1 cpu.cc:1] no AVX\xff"


def test_each_greeting_begins_like_a_line_of_a_log():
    """This lets the filter pass all other text before its line ends."""
    for line in _GREETINGS.splitlines():
        assert re.match("[A-Z]", line)
