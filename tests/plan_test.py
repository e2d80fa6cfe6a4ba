"""The binary: mistakes in one line, and whole plans."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from lingvo_gshard.model.translation import TranslationTask
from lingvo_gshard.planning import plan
from lingvo_gshard.planning.request import make_request
from tests.planning import plans
from tests.spmd import compilers

_STACKS = tuple(TranslationTask.STACKS)
_ROOT = pathlib.Path(__file__).parent.parent
_TINY = [
    "task.source_vocab_size=64",
    "task.target_vocab_size=32",
    "input.batch_size=16",
    "input.source_len=16",
    "input.target_len=16",
    "task.dim=16",
    "task.encoder.num_layers=2",
    "task.decoder.num_layers=2",
    "task.encoder.moe.group_size=32",
    "task.decoder.moe.group_size=32",
]


def _flagged(settings):
    return [f"--set={each}" for each in settings]


def _run(*args, timeout=120):
    command = [sys.executable, "-m", "lingvo_gshard.plan", *args]
    return subprocess.run(
        command, cwd=_ROOT, capture_output=True, text=True, timeout=timeout, env=os.environ.copy()
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "plan: give exactly one of --model, --program, --compare and --table; see --help."),
        (
            ["--table=scaling", "--model=x.Y"],
            "plan: give exactly one of --model, --program, --compare and --table",
        ),
        (["--table=scaling"], "plan: --out is missing; see --help."),
        (["--table=paper", "--out=/dev/null"], "plan: /dev/null is a file; a folder is expected"),
        (["--table=paper", "--plans=/nowhere"], "plan: /nowhere: no plan of m4.MoE128E12L or"),
        (["--table=compile", "--plans=/no"], "plan: --plans goes with --table=paper, --"),
        (["--table=lm"], "plan: --out is missing; see --help."),
        (["--table=lm", "--plans=/nowhere"], "plan: /nowhere: no plan of lm.DenseLm8B2x2 or"),
        (["--table=paper", "--both_readings"], "plan: --both_readings goes with --table=scaling"),
        (["--compare=/nowhere"], "plan: --compare=/nowhere: expected two or more plans, got one."),
        (["--compare=/nowhere,/no"], "plan: /nowhere: no plan.json there; `plan --out=/nowhere`"),
        (
            ["--table=machines", "--model=toy.MoE8E4L", "--search"],
            "plan: --search needs --model or --program, and excludes --table and --compare.",
        ),
        (
            ["--table=layers", "--topology=v3:2x2"],
            "plan: --topology needs --model, --program or --table",
        ),
        (["--model=toy.MoE8E4L"], "plan: --topology is missing; see --help."),
        (
            ["--table=machines", "--model=toy.MoE8E4L", "--programs=decode"],
            "plan: --table=machines compares training steps; expected train in --programs.",
        ),
        (["--table=compile", "--save"], "plan: --save needs --model, --topology and --out"),
        (
            ["--model=toy.MoE8E4", "--topology=v3:2x2", "--out=/nowhere"],
            "plan: No model 'toy.MoE8E4'. Did you mean toy.MoE8E4L?",
        ),
    ],
)
def test_a_mistake_is_reported_in_one_line(args, message):
    run = _run(*args)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith(message)


@pytest.mark.slow
def test_an_impossible_plan_is_reported_in_one_line(tmp_path):
    run = _run("--model=toy.MoE8E4L", "--topology=v9:2x2", f"--out={tmp_path}", *_flagged(_TINY))
    assert run.returncode == 1
    assert "topology 'v9:2x2' is unknown; known are v2:" in run.stderr.splitlines()[-1]
    assert not list(tmp_path.glob("plan.json"))


_VOCABULARIES = ["task.source_vocab_size=512", "task.target_vocab_size=512"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "settings", "batch_tokens", "message"),
    [
        ("v3:3", _TINY, None, "topology 'v3:3' is unknown; known are v2:"),
        (
            "v3:2x2",
            [],
            None,
            "A plan has no data to take task.source_vocab_size and task.target_vocab_size from",
        ),
        ("v3:2x2", [], 100, "--batch_tokens=100: expected a multiple of 48"),
        (
            "v3:2x2",
            ["input.batch_size=10"],
            480,
            "give --batch_tokens or --set=input.batch_size, not both",
        ),
        (
            "v3:4x4",
            [
                *_VOCABULARIES,
                *(f"task.{each}.moe.num_experts=12" for each in _STACKS),
            ],
            None,
            "The 32 partitions along mesh axis d, which splits E, do not divide task.encoder.moe",
        ),
    ],
)
def test_an_impossible_plan_is_refused(machine, settings, batch_tokens, message):
    compilers.need("v3")
    with pytest.raises(ValueError, match=re.escape(message)):
        make_request("toy.MoE8E4L", machine, settings, batch_tokens).check_sizes()


def test_a_comparison_is_printed(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, secs in zip(folders, (0.5, 0.25), strict=True):
        plan.save(plans.plan(plans.cost(secs)), folder)
    run = _run(f"--compare={folders[0]},{folders[1]}")
    assert run.returncode == 0, run.stderr
    assert "roofline step ms" in run.stdout and "0.500" in run.stdout


@pytest.mark.slow
def test_a_plan_is_printed_and_written_and_kept(tmp_path):
    compilers.need("v3")
    args = ["--model=toy.MoE8E4L", "--topology=v3:2x2", f"--out={tmp_path}", *_flagged(_TINY)]
    first = _run(*args, timeout=900)
    assert first.returncode == 0, first.stderr
    assert "toy.MoE8E4L on v3:2x2: 8 cores" in first.stdout and "fits; a step" in first.stdout
    values = json.loads((tmp_path / "plan.json").read_text())
    assert values["fits"] and values["xla_optimal_secs"] > 0 and values["host_peak_gib"] > 0.5
    assert {path.name for path in tmp_path.iterdir()} >= {"report.md", "memory.png", "time.png"}
    assert values["mesh"] == {"d": 8}
    programs = values["programs"]
    assert values["all_fit"] and set(programs) == {"train", "initialize", "evaluate", "decode"}
    memory = {name: program["memory_gib"] for name, program in programs.items()}
    assert memory["evaluate"]["optimizer_slots"] == memory["train"]["optimizer_slots"] > 0
    assert memory["decode"]["optimizer_slots"] == 0  # It holds the weights alone.
    again = _run(*args)
    assert again.stdout == first.stdout  # Including the seconds: it was not made again.


@pytest.mark.slow
def test_decoding_is_planned_alone_and_the_rest_is_added(tmp_path):
    compilers.need("v3")
    args = ["--model=toy.MoE8E4L", "--topology=v3:2x2", f"--out={tmp_path}", *_flagged(_TINY)]
    run = _run(*args, "--programs=decode", timeout=900)
    assert run.returncode == 0, run.stderr
    assert "fits; a call of decode needs" in run.stdout and "a step" not in run.stdout
    decode = plan.load(tmp_path).programs
    assert list(decode) == ["decode"]
    assert not (tmp_path / "memory.png").exists()

    run = _run(*args, "--programs=decode,train", timeout=900)
    assert run.returncode == 0, run.stderr
    both = plan.load(tmp_path).programs
    assert list(both) == ["train", "decode"] and both["decode"] == decode["decode"]
    assert "fits; a step needs" in run.stdout and (tmp_path / "memory.png").exists()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_fewer_experts_than_cores_are_replicated_as_in_the_trainer(tmp_path):
    compilers.need("v3")
    settings = _flagged([*_TINY, "input.batch_size=64"])
    args = ["--model=toy.MoE8E4L", "--topology=v3:4x4", f"--out={tmp_path}", *settings]
    args.append("--programs=train")
    run = _run(*args, timeout=900)
    assert run.returncode == 0, run.stderr
    made = plan.load(tmp_path)
    assert made.all_fit and made.cores == 32 and made.mesh == {"r": 4, "d": 8}
    assert made.sharding == {"B": "r+d", "E": "d", "G": "r+d"}
