"""An experiment whose input does not read a folder, and whose task is not decoded."""

import json
import types

import pytest

from lingvo_gshard import registry
from lingvo_gshard.input.base_input import BaseInput, DataFacts
from lingvo_gshard.model.task import Task
from lingvo_gshard.plans import candidates, plan, remedies
from lingvo_gshard.plans.request import Request, programs_of
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs import modes
from lingvo_gshard.runs.launch import Launch
from params.experiment import Experiment
from tests.runs import data_folder

_MODEL = f"{__name__}.Drawn"


class Drawn(Experiment):
    MAX_STEPS = 4

    def Task(self):
        return Task.Params()

    def Train(self):
        return BaseInput.Params().Set(batch_size=8)


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setitem(registry._experiments, _MODEL, Drawn)


def test_it_is_launched_and_recorded_without_data(tmp_path):
    logdir = str(tmp_path / "run")
    launch = launches.launch_of(_MODEL, ("train.max_steps=3",), None, logdir)
    assert launch == Launch(_MODEL, ("train.max_steps=3",), None, DataFacts(kind=None))
    bound, params = launches.with_product_dtype(launch, logdir)
    assert bound == launch and params.task.cls.ProductDtype(params.task) == "float32"

    launches.record(launch, logdir)
    assert launches.launch_of(None, (), None, logdir) == launch
    assert not (tmp_path / "run/vocab").exists()
    assert launches.check_data(launch, logdir) == {}
    assert json.loads((tmp_path / "run/experiment.json").read_text())["files"] == []

    test = launches.evaluated_input(launch, params, "test")
    assert (test.split, test.repeat, test.batch_size) == ("test", False, 8)
    assert test.cls.Parts(test) == {}


def test_data_that_it_would_not_read_is_refused(tmp_path):
    message = f"--data_dir=/data: {_MODEL} reads no data; leave the flag out"
    with pytest.raises(ValueError, match=message):
        launches.launch_of(_MODEL, (), "/data", str(tmp_path))
    run = types.SimpleNamespace(launch=Launch(_MODEL, (), None, DataFacts(kind=None)))
    with pytest.raises(ValueError, match=f"--verify_data: {_MODEL} reads no data"):
        modes.verify_data(run)


def test_another_model_does_not_take_its_data_from_such_a_run(tmp_path):
    launches.record(Launch(_MODEL, (), None, DataFacts(kind=None)), str(tmp_path))
    with pytest.raises(ValueError, match=r"a run without data: give --data_dir for toy\.Dense4L"):
        launches.launch_of("toy.Dense4L", (), None, str(tmp_path))


def test_a_model_of_text_does_not_take_pairs_from_the_run_before_it(tmp_path):
    launch = Launch("toy.Dense4L", (), "/data", DataFacts(8, 8, ("de",)))
    launch = data_folder.prepare(tmp_path / "data", b"ours", b"english", launch)
    launches.record(launch, str(tmp_path / "run"))
    with pytest.raises(
        ValueError, match=r"LmDense4L learns from data of kind text, but .* parallel"
    ):
        launches.launch_of("toy.LmDense4L", (), None, str(tmp_path / "run"))


def test_it_leaves_the_data_of_the_run_before_it(tmp_path):
    launch = Launch("toy.Dense4L", (), "/data", DataFacts(8, 8, ("de",)))
    launch = data_folder.prepare(tmp_path / "data", b"ours", b"english", launch)
    launches.record(launch, str(tmp_path / "run"))
    again = launches.launch_of(_MODEL, (), None, str(tmp_path / "run"))
    assert (again.data_dir, again.facts) == (None, DataFacts(kind=None))


def test_unsupported_modes_are_refused_or_left_out():
    params = registry.get_params(_MODEL)
    with pytest.raises(ValueError, match=f"{_MODEL}: Task is trained and evaluated alone"):
        launches.check_decoded(_MODEL, params)
    assert params.task.cls.Lengths(params.input) == (0, 1)
    assert list(remedies.batch_keeping_changes(params)) == []

    programs = programs_of(params)
    assert programs == (plan.TRAIN, plan.INITIALIZE, plan.EVALUATE)
    request = Request(_MODEL, (), params, "v3:2x2", None, programs)
    assert request.batches == ["input", "eval_input"]
    with pytest.raises(ValueError, match=f"{_MODEL} has no stacks of Transformer layers"):
        candidates.candidates(request)
