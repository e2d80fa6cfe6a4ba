"""Benchmarks report a user's mistakes as the project's other commands do."""

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("bench.first_answer", "first_answer: --logdir is missing; see --help."),
        (
            "bench.step --model=toy.Nope",
            "step: No model 'toy.Nope'. Did you mean ",
        ),
        (
            "bench.collectives --mib=8,0",
            "collectives: --mib=8,0: expected whole numbers from 1",
        ),
        (
            "bench.decode --decoders=flat,ctranslate2",
            "decode: --decoders=ctranslate2: for toy.MoE8E4L, expected flat, flat_laid_out, ",
        ),
    ],
)
def test_a_mistake_ends_with_one_line(command, line):
    words = [sys.executable, "-m", *command.split()]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(line)
