"""The way down: how much a reader meets between `gshard train` and the einsum of Algorithm 2."""

import json
import os
import subprocess
import sys

import pytest

from tests import trainer_test

pytestmark = pytest.mark.slow

_MOST_FRAMES = 25
_MOST_CLASSES = 25


@pytest.fixture(scope="module")
def way(tmp_path_factory):
    """The frames of toy.MoE8E4L: file, function, and the classes of the arguments."""
    folder = tmp_path_factory.mktemp("way")
    data_dir = trainer_test.prepare(folder)
    command = [sys.executable, "-m", "tests.way_down", "--model=toy.MoE8E4L"]
    command += [f"--data_dir={data_dir}", f"--logdir={folder / 'run'}", "--num_partitions=2"]
    environment = os.environ | {"LINGVO_GSHARD_COMPILATION_CACHE": "off"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_way_to_the_einsum_is_short(way):
    text = "\n".join(f"{file} {function}" for file, function, _ in way)
    assert len(way) <= _MOST_FRAMES, text


def test_few_classes_are_met_on_it(way):
    met = {kind for _, _, kinds in way for kind in kinds}
    assert len(met) <= _MOST_CLASSES, sorted(met)


def test_it_leads_from_the_trainer_through_the_paper_s_layers(way):
    assert way[1][:2] == ["lingvo_gshard/trainer.py", "main"]
    *_, layer, buffers, product = [file for file, _, _ in way]
    assert layer == buffers == "lingvo_gshard/layers/moe.py"
    assert product == "lingvo_gshard/layers/numerics.py"


def test_function_names_on_the_way_are_distinct(way):
    """Except FProp, which each layer has, and the programs' run and train."""
    names = [function for _, function, _ in way if function not in ("FProp", "run", "train")]
    assert len(names) == len(set(names)), names
