"""The task of docs/extending.md: files in a folder of their own, which all programs know."""

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.docs import scripts
from xla_plan.machines import topology

_PAGE = (scripts.ROOT / "docs/extending.md").read_text()
_EXAMPLE = scripts.ROOT / "examples/shapes"
_COMMANDS = re.search(r"^```sh\n(.*?)^```$", _PAGE, re.MULTILINE | re.DOTALL)[1].splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy of the example's files, without the library."""
    copied = tmp_path_factory.mktemp("example") / "shapes"
    return shutil.copytree(_EXAMPLE, copied, ignore=shutil.ignore_patterns("__pyc*"))


def _run(folder, command):
    """Runs a command of the page in the folder."""
    name, *arguments = command.split()
    assert name in ("python", "gshard")
    if name == "gshard":
        arguments = ["-m", "lingvo_gshard.gshard", *arguments]
    path = os.pathsep.join([str(scripts.ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def _output(folder, command):
    done = _run(folder, command)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_page_names_the_files_of_the_example():
    named = set(re.findall(r"`examples/shapes/(\w+\.py)`", _PAGE))
    assert named == {path.name for path in _EXAMPLE.glob("*.py")}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_examples_own_test_passes(folder):
    for name in ("conftest.py", "quick_machine_code.py"):
        shutil.copy(scripts.ROOT / "tests" / name, folder)
    printed = _output(folder, "python -m pytest -q image_task_test.py")
    assert "6 passed" in printed


@pytest.mark.exhaustive
@pytest.mark.slow
def test_it_is_trained_resumed_evaluated_exported_planned_and_reported(folder):
    train, evaluate, export, plan, report = _COMMANDS
    run = folder / "RUN"

    # In two parts: the second one continues with the state and the next batch.
    first = _output(folder, f"{train} --set=train.max_steps=20")
    assert "shapes.ByRows: 0.01 M weights over 8 partitions, step 0 to 20" in first
    assert "step 20 to 40" in _output(folder, train)
    lines = [json.loads(line) for line in (run / "train_metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 20, 30, 40]
    assert lines[-1]["metrics"]["accuracy"] > 0.8 > lines[0]["metrics"]["accuracy"]

    printed = dict(line.rsplit(maxsplit=1) for line in _output(folder, evaluate).splitlines())
    assert float(printed["accuracy"]) > 0.8 and printed["step"] == "40"
    # 100 images are three batches of 32 and four images.
    assert printed["num_batches"] == "4"
    assert 100 * float(printed["accuracy"]) == pytest.approx(
        round(100 * float(printed["accuracy"])), abs=1e-3
    )

    assert "theta.first" in _output(folder, export)
    if topology.is_installed("v3"):
        assert "on v3:2x2: 8 cores" in _output(folder, plan)
        assert "collective-permute" in (run / "plan/plan.json").read_text()
    _output(folder, report)
    page = (run / "report.html").read_text()
    assert "Curves of loss, nats per image; accuracy; " in page
    assert "images per second" in page
    for absent in ("training examples", "By part", "Translations", "Routing", "padding of"):
        assert absent not in page
    assert ("plan for v3:2x2" in page) == topology.is_installed("v3")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_stopped_run_continues_as_if_undisturbed(folder):
    train = f"{_COMMANDS[0]} --mode=train --set=train.save_checkpoints_steps=10"
    part = f"{train} --set=train.max_steps=10"
    whole = train.replace("=RUN", "=WHOLE")
    parts = train.replace("=RUN", "=PARTS")
    _output(folder, f"{whole} --set=train.max_steps=20")
    _output(folder, part.replace("=RUN", "=PARTS"))
    _output(folder, f"{parts} --set=train.max_steps=20")
    losses = []
    for name in ("WHOLE", "PARTS"):
        lines = (folder / name / "train_metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["metrics"]["loss"] for line in lines])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["v3:2x2", "h100:1x8"])
def test_it_compiles_for_machines_that_are_not_here(folder, name):
    if not topology.is_installed(name.partition(":")[0]):
        pytest.skip(f"there is no compiler for {name}")
    where = f"--topology={name} --out={name.replace(':', '-')}"
    printed = _output(folder, f"gshard plan model --model=shapes.ByRows {where}")
    assert f"shapes.ByRows on {name}: 8 " in printed and "images a " in printed
    assert "decode" not in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("trainer --data_dir=DATA --logdir=X --model=shapes.ByRows", "reads no data"),
        ("trainer --verify_data --logdir=X --model=shapes.ByRows", "reads no data"),
        ("trainer --mode=decode --logdir=X --model=shapes.ByRows", "trained and evaluated alone"),
        ("trainer --logdir=X --model=shapes.ByRows --set=input.split=all", "expected one of train"),
        ("plan_search --topology=v3:2x2 --out=X --model=shapes.ByRows", "has no stacks"),
    ],
)
def test_unsupported_work_of_such_a_task_is_reported_in_one_line(folder, command, message):
    done = _run(folder, f"python -m lingvo_gshard.{command}")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert message in line
