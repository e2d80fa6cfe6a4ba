"""Every registered experiment: its text, its weights, its launch command."""

import inspect
import re
import sys

import pytest

from lingvo_gshard import registry, runs
from tests.params import write_goldens

NAMES = registry.registered_names()
_REWRITE = "python -m tests.params.write_goldens"


@pytest.mark.parametrize("name", NAMES)
def test_text_equals_the_golden(name):
    path = write_goldens.golden_path(name)
    assert path.exists(), f"no golden for {name}: {_REWRITE}"
    assert registry.get_params(name).ToText() == path.read_text(), f"meant? then {_REWRITE}"


def test_no_golden_is_left_of_an_experiment_that_is_no_more():
    assert sorted(path.stem for path in write_goldens.GOLDEN.glob("*.txt")) == NAMES


def _doc(name):
    return inspect.getdoc(registry.get_class(name)) or ""


def _with_vocabularies(name):
    """The experiment's Params with the vocabularies that its module's docstring states."""
    p = registry.get_params(name)
    if p.task.source_vocab_size is None:
        module_doc = sys.modules[registry.get_class(name).__module__].__doc__ or ""
        stated = re.search(r"vocabularies of\s+(\d+)\s+and\s+(\d+)", module_doc)
        assert stated, f"{name}: the module states no vocabularies"
        source, target = map(int, stated.groups())
        p.task.Set(source_vocab_size=source, target_vocab_size=target)
    return p


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_counts_the_weights(name):
    stated = re.search(r"(\d+(?:\.(\d+))?) ([MBT]) weights", _doc(name))
    assert stated, f"{name}: the docstring states no weights"
    unit = {"M": 1e6, "B": 1e9, "T": 1e12}[stated[3]]
    half_a_digit = 0.5 * 10 ** -len(stated[2] or "")
    got = runs.num_weights(_with_vocabularies(name)) / unit
    assert got == pytest.approx(float(stated[1]), abs=half_a_digit)


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_holds_the_launch_command(name):
    command = " ".join(_doc(name).replace("\\\n", " ").split())
    found = re.search(
        rf"python -m lingvo_gshard\.(trainer|plan) .*--model={re.escape(name)}\b", command
    )
    assert found, f"{name}: no launch command"


@pytest.mark.parametrize("name", NAMES)
def test_the_launch_commands_partitions_divide_the_model(name):
    stated = re.search(r"--num_partitions=(\d+)", _doc(name))
    if stated:  # A command of the planner names a topology instead.
        runs.check_divisible(_with_vocabularies(name), int(stated[1]))
    else:
        assert "lingvo_gshard.plan" in _doc(name)


@pytest.mark.parametrize("name", NAMES)
def test_params_are_made_anew_each_time(name):
    registry.get_params(name).train.max_steps = -1
    assert registry.get_params(name).train.max_steps > 0
