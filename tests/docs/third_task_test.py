"""The task of docs/extending.md: two new files in a copy of the tree; all programs know it."""

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from lingvo_gshard.spmd import topology
from tests.docs import scripts

_PAGE = (scripts.ROOT / "docs/extending.md").read_text()
_FILE = re.compile(r'^```python title="([\w/.]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_COMMANDS = re.search(r"^```sh\n(.*?)^```$", _PAGE, re.MULTILINE | re.DOTALL)[1].splitlines()
_COPIED = ("lingvo_gshard", "params", "tests/conftest.py", "tests/quick_machine_code.py")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the library and the experiments, with the files that the page adds."""
    folder = tmp_path_factory.mktemp("tree")
    for name in _COPIED:
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        if target.suffix:
            shutil.copy(scripts.ROOT / name, target)
        else:
            shutil.copytree(scripts.ROOT / name, target, ignore=shutil.ignore_patterns("__pyc*"))

    for name, content in _FILE.findall(_PAGE):
        path = folder / name
        assert not path.exists()
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    return folder


def _run(tree, command):
    """Runs a command of the page in the tree."""
    name, *arguments = command.split()
    assert name == "python"
    path = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": path, "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def _output(tree, command):
    done = _run(tree, command)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_task_is_a_file_of_model_and_one_of_params():
    assert [name for name, _ in _FILE.findall(_PAGE)] == [
        "lingvo_gshard/model/image_task.py",
        "params/shapes.py",
        "tests/model/image_task_test.py",
    ]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_pages_own_test_passes(tree):
    printed = _output(tree, "python -m pytest -q tests/model/image_task_test.py")
    assert "6 passed" in printed


@pytest.mark.slow
def test_it_is_trained_resumed_evaluated_exported_planned_and_reported(tree):
    train, evaluate, export, plan, report = _COMMANDS
    run = tree / "RUN"

    # In two parts: the second one goes on with the state and the next batch.
    first = _output(tree, f"{train} --set=train.max_steps=20")
    assert "shapes.ByRows: 0.01 M weights over 8 partitions, step 0 to 20" in first
    assert "step 20 to 40" in _output(tree, train)
    lines = [json.loads(line) for line in (run / "train_metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 20, 30, 40]
    assert lines[-1]["metrics"]["accuracy"] > 0.8 > lines[0]["metrics"]["accuracy"]

    printed = dict(line.rsplit(maxsplit=1) for line in _output(tree, evaluate).splitlines())
    assert float(printed["accuracy"]) > 0.8 and printed["step"] == "40"
    # 100 images are three batches of 32 and four images.
    assert printed["num_batches"] == "4"
    assert 100 * float(printed["accuracy"]) == pytest.approx(
        round(100 * float(printed["accuracy"])), abs=1e-3
    )

    assert "theta.first" in _output(tree, export)
    if topology.is_installed("v3"):
        assert "collective-permute" in _output(tree, plan)
    _output(tree, report)
    page = (run / "report.html").read_text()
    assert "Curves of loss, nats per image; accuracy; " in page
    assert "images per second" in page
    for absent in ("training examples", "By part", "Translations", "Routing", "padding of"):
        assert absent not in page
    assert ("plan for v3:2x2" in page) == topology.is_installed("v3")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not(tree):
    train = f"{_COMMANDS[0]} --mode=train --set=train.save_checkpoints_steps=10"
    part = f"{train} --set=train.max_steps=10"
    whole = train.replace("=RUN", "=WHOLE")
    parts = train.replace("=RUN", "=PARTS")
    _output(tree, f"{whole} --set=train.max_steps=20")
    _output(tree, part.replace("=RUN", "=PARTS"))
    _output(tree, f"{parts} --set=train.max_steps=20")
    losses = []
    for name in ("WHOLE", "PARTS"):
        lines = (tree / name / "train_metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["metrics"]["loss"] for line in lines])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["v3:2x2", "h100:1x8"])
def test_it_compiles_for_machines_that_are_not_here(tree, name):
    if not topology.is_installed(name.partition(":")[0]):
        pytest.skip(f"there is no compiler for {name}")
    where = f"--topology={name} --out={name.replace(':', '-')}"
    printed = _output(tree, f"python -m lingvo_gshard.plan --model=shapes.ByRows {where}")
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
        ("plan --search --topology=v3:2x2 --out=X --model=shapes.ByRows", "has no stacks"),
    ],
)
def test_what_such_a_task_lacks_is_told_in_one_line(tree, command, message):
    done = _run(tree, f"python -m lingvo_gshard.{command}")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert message in line
