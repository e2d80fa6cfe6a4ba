"""Every registered experiment: its text, its weights, its launch command."""

import re

import pytest

from lingvo_gshard import registry
from lingvo_gshard.model import placement
from tests.params import write_goldens
from tests.params.write_goldens import docstring, module_docstring, params_with_vocabularies

NAMES = registry.registered_names()
_REWRITE = "python -m tests.params.write_goldens"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name.startswith("toy.") else pytest.mark.slow)
        for name in NAMES
    ],
)
def test_params_weights_and_shardings_equal_the_golden(name):
    path = write_goldens.GOLDEN / f"{name}.txt"
    assert path.exists(), f"no golden for {name}: {_REWRITE}"
    assert write_goldens.golden(name) == path.read_text(), f"intended? then {_REWRITE}"


def test_every_golden_belongs_to_an_experiment():
    assert {path.stem for path in write_goldens.GOLDEN.iterdir()} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_counts_the_weights(name):
    stated = re.search(r"(\d+(?:\.(\d+))?) ([MBT]) weights", docstring(name))
    assert stated, f"{name}: the docstring states no weights"
    unit = {"M": 1e6, "B": 1e9, "T": 1e12}[stated[3]]
    half_a_digit = 0.5 * 10 ** -len(stated[2] or "")
    got = placement.num_weights(params_with_vocabularies(name)) / unit
    assert got == pytest.approx(float(stated[1]), abs=half_a_digit)


@pytest.mark.parametrize("name", NAMES)
def test_the_modules_docstring_holds_the_launch_command_of_one_experiment(name):
    command = " ".join(module_docstring(name).replace("\\\n", " ").split())
    trainer = r"gshard train --model=(\S+) .*--num_partitions=(\d+)"
    found = re.search(trainer, command)
    assert found, f"{name}: no launch command"
    launched, partitions = found.groups()
    assert launched.partition(".")[0] == name.partition(".")[0]
    assert write_goldens.num_partitions(launched) == int(partitions)


@pytest.mark.parametrize("name", NAMES)
def test_the_stated_partitions_divide_the_model(name):
    params = params_with_vocabularies(name)
    parts = placement.partitioning(params, write_goldens.num_partitions(name))
    placement.check_divisible(params, parts)


@pytest.mark.parametrize("name", NAMES)
def test_params_are_new_objects_each_time(name):
    registry.get_params(name).train.max_steps = -1
    assert registry.get_params(name).train.max_steps > 0
