"""How a run spent its time, by hand and as measured by a run."""

import json

import pytest

from lingvo_gshard.train.hooks import TrainHook
from lingvo_gshard.train.run_times import Category, goodput
from tests.train import regression


def _line(began, from_step, step, **secs):
    return {"began": began, "from_step": from_step, "step": step, "secs": secs}


def test_steps_that_restarts_repeat_are_lost():
    lines = [
        # Killed at step 30; the checkpoint is of step 20.
        _line(100.0, 0, 10, START=5.0, STEPS=10.0),
        _line(100.0, 0, 20, START=5.0, STEPS=20.0, CHECKPOINTS=1.0),
        _line(100.0, 0, 30, START=5.0, STEPS=30.0, CHECKPOINTS=2.0),
        # Killed before it saved a checkpoint.
        _line(200.0, 20, 30, START=4.0, STEPS=9.0, INPUT=0.5),
        # Continued to the end.
        _line(300.0, 20, 30, START=3.0, STEPS=11.0),
        _line(300.0, 20, 40, START=3.0, STEPS=22.0, EVALUATION=2.0),
    ]
    result = goodput(lines)
    assert {category.name: secs for category, secs in result.secs.items() if secs} == {
        "STEPS": 20.0 + 22.0,
        "START": 5.0 + 3.0,
        "CHECKPOINTS": 1.0,
        "EVALUATION": 2.0,
        "LOST": 11.0 + 13.5,
    }
    assert result.total_secs == 37.0 + 13.5 + 27.0
    assert result.share == pytest.approx(42.0 / 77.5)
    assert goodput([]) is None


def test_an_older_checkpoint_loses_the_steps_of_several_processes():
    lines = [
        _line(1.0, 0, 10, STEPS=10.0),
        _line(2.0, 10, 20, STEPS=8.0),
        _line(3.0, 5, 20, STEPS=15.0),
    ]
    result = goodput(lines)
    assert result.secs[Category.STEPS] == 15.0 and result.secs[Category.LOST] == 18.0


class _Killed(TrainHook):
    def after_call(self, call):
        if call.step == 5:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_a_run_measures_itself(tmp_path):
    estimator = regression.make(tmp_path, save_checkpoints_steps=2)

    with pytest.raises(KeyboardInterrupt):
        estimator.train(lambda p: regression.Batches(), max_steps=6, hooks=[_Killed()])
    estimator.train(lambda p: regression.Batches(), max_steps=6)

    lines = [json.loads(line) for line in (tmp_path / "run_times.jsonl").open()]
    assert [(line["from_step"], line["step"]) for line in lines] == [
        *((0, step) for step in (1, 2, 3, 4, 5, 5)),
        *((4, step) for step in (5, 6, 6)),
    ]
    result = goodput(lines)
    for category in (Category.START, Category.STEPS, Category.CHECKPOINTS, Category.LOST):
        assert result.secs[category] > 0.0, category
    # Compiling takes longer than these steps.
    assert 0.0 < result.share < 0.5
