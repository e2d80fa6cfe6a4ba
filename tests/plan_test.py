"""The binary: mistakes in one line, and whole plans."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from lingvo_gshard.plans.request import make_request
from tests import exhaustive
from tests.hugging_face import decoders
from tests.xla_plan import samples
from tests.xla_spmd import compilers

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


def _planned(topology, out):
    flags = ["--model=toy.MoE8E4L", f"--topology={topology}", f"--out={out}"]
    return ["model", *flags, *_flagged(_TINY)]


def _run(*args, timeout=120):
    command = [sys.executable, "-m", "lingvo_gshard.plan_programs", *args]
    return subprocess.run(
        command, cwd=_ROOT, capture_output=True, text=True, timeout=timeout, env=os.environ.copy()
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["table"], "plan: no program 'table'; expected one of model, search,"),
        (["compare", "/nowhere"], "plan compare: expected the folders of two or more plans, got 1"),
        (["model", "--model=toy.MoE8E4L"], "plan model: --topology is missing; see --help."),
        (["machines", "--model=toy.MoE8E4L"], "plan machines: --out is missing; see --help."),
        (
            ["machines", "--model=toy.MoE8E4L", "--out=/nowhere", "--programs=decode"],
            "plan machines: machines are compared by training steps; expected train in --programs.",
        ),
        (
            ["machines", "--model=toy.MoE8E4L", "--out=/nowhere", "--num_devices=12"],
            "plan machines: --num_devices=12: expected a power of two.",
        ),
        (
            ["model", "--from=/nowhere"],
            "plan model: /nowhere/config.json is missing: give the folder of a model",
        ),
        (
            ["model", "--from=/nowhere", "--model=toy.MoE8E4L"],
            "plan model: give --model, or a config.json by --from, not both.",
        ),
        (["program"], "plan program: --program is missing; see --help."),
        (["search_program", "--program=x"], "plan search_program: --topology is missing"),
    ],
)
def test_a_mistake_is_reported_in_one_line(args, message):
    run = _run(*args)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith(f"gshard {message}")


@pytest.mark.slow
def test_an_impossible_plan_is_reported_in_one_line(tmp_path):
    run = _run(*_planned("v9:2x2", tmp_path))
    assert run.returncode == 1
    assert "topology 'v9:2x2' is unknown; known are v2:" in run.stderr.splitlines()[-1]
    assert not list(tmp_path.glob("plan.json"))


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
    ],
)
def test_an_impossible_plan_is_refused(machine, settings, batch_tokens, message):
    compilers.need("v3")
    with pytest.raises(ValueError, match=re.escape(message)):
        make_request("toy.MoE8E4L", machine, settings, batch_tokens).check_sizes()


@pytest.mark.slow
def test_a_comparison_is_printed(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, secs in zip(folders, (0.5, 0.25), strict=True):
        samples.save(samples.plan(samples.cost(secs)), folder)
    run = _run("compare", *map(str, folders))
    assert run.returncode == 0, run.stderr
    assert "roofline step ms" in run.stdout and "0.500" in run.stdout


@pytest.mark.slow
def test_a_plan_is_printed_and_written_and_kept(tmp_path):
    compilers.need("v3")
    args = _planned("v3:2x2", tmp_path)
    first = _run(*args, timeout=900)
    assert first.returncode == 0, first.stderr
    assert "toy.MoE8E4L on v3:2x2: 8 cores" in first.stdout and "fits; a step" in first.stdout
    values = json.loads((tmp_path / "plan.json").read_text())
    assert values["programs"]["train"]["cost"]["xla_optimal_secs"] > 0
    assert values["host_peak_gib"] > 0.5
    assert {path.name for path in tmp_path.iterdir()} >= {"report.md", "memory.png", "time.png"}
    programs = values["programs"]
    assert programs["train"]["mesh"] == {"d": 8}
    assert values["all_fit"] and set(programs) == {"train", "initialize", "evaluate", "decode"}
    slots = {
        name: program["memory_gib"]["roles"]["optimizer slots"]["gib"]
        for name, program in programs.items()
    }
    assert slots["evaluate"] == slots["train"] > 0
    assert slots["decode"] == 0  # It holds the weights alone.
    again = _run(*args)
    assert again.stdout == first.stdout  # Including the seconds: it was not made again.


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_plan_of_decoding_is_extended_by_the_other_programs(tmp_path):
    compilers.need("v3")
    args = _planned("v3:2x2", tmp_path)
    run = _run(*args, "--programs=decode", timeout=900)
    assert run.returncode == 0, run.stderr
    assert "fits; a call of decode needs" in run.stdout and "a step" not in run.stdout
    decode = samples.load(tmp_path).programs
    assert list(decode) == ["decode"]
    assert not (tmp_path / "memory.png").exists()

    run = _run(*args, "--programs=decode,train", timeout=900)
    assert run.returncode == 0, run.stderr
    both = samples.load(tmp_path).programs
    assert list(both) == ["train", "decode"] and both["decode"] == decode["decode"]
    assert "fits; a step needs" in run.stdout and (tmp_path / "memory.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.json", *exhaustive.only("")])
def test_an_open_model_is_planned_from_only_its_config(tmp_path, name):
    """Its folder lacks weights."""
    compilers.need("v3")
    theirs = _ROOT / "tests/hugging_face/models/hy_v3/config.json"
    folder = tmp_path / "theirs"
    folder.mkdir()
    shutil.copy(theirs, folder)
    small = ["input.batch_size=8", "input.row_len=16", "decode.max_target_len=8"]
    flags = [f"--from={folder / name}", "--topology=v3:2x2", f"--out={tmp_path / 'out'}"]
    run = _run("model", *flags, "--programs=train,decode", *_flagged(small), timeout=900)
    assert run.returncode == 0, run.stderr
    assert "open_moe.HyMT2MoE30B on v3:2x2: 8 cores" in run.stdout and "fits" in run.stdout
    values = json.loads((tmp_path / "out/plan.json").read_text())
    assert values["weights"] == decoders.counts("hy_v3")["all"]
