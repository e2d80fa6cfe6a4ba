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
        ("bench.moe_layer --tokens=8", "moe_layer: --tokens: --shapes is missing."),
        (
            "bench.moe_layer --shapes=qwen3 --experts=7",
            "moe_layer: --experts=7: expected from 8 to 128.",
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
