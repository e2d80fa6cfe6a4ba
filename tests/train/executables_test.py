"""Training with saved executables: training compiles nothing, and the losses are the same."""

import pathlib

import pytest

from lingvo_gshard.model.spec import Mode
from lingvo_gshard.spmd import saved_executable
from lingvo_gshard.train.hooks import TrainHook
from tests.train import regression


class _Losses(TrainHook):
    def __init__(self):
        self.losses = []

    def after_call(self, call):
        self.losses += call.metrics.loss.tolist()


def _losses(estimator, max_steps):
    hook = _Losses()
    estimator.train(lambda p: regression.Batches(), max_steps=max_steps, hooks=[hook])
    return hook.losses


@pytest.mark.slow
def test_training_loads_what_was_saved(tmp_path, compiled, caplog):
    folder = tmp_path / "executables"
    first = regression.make(tmp_path / "first", 4, steps_per_call=2)
    train_2 = first._programs.get(Mode.TRAIN, regression.batch_specs(), 2)
    saved_executable.save(train_2, folder)
    want = _losses(first, 5)
    compiled.clear()

    second = regression.make(tmp_path / "second", 4, steps_per_call=2, executables=folder)
    assert _losses(second, 4) == want[:4]
    assert len(compiled) == 1  # initialize
    assert not caplog.messages
    # The last call has one step.
    assert _losses(second, 5) == want[4:]
    assert len(compiled) == 2
    assert caplog.messages == [f"{folder}/train_1.json does not exist; train_1 is compiled."]
    second.evaluate(lambda p: regression.Batches(num_batches=1))
    assert len(compiled) == 3 and len(caplog.messages) == 1


def test_a_folder_without_executables_is_refused_at_once(tmp_path):
    with pytest.raises(
        ValueError, match="no saved executables there; `plan model --save` writes them"
    ):
        regression.make(tmp_path / "run", executables=tmp_path / "nowhere")
    assert not pathlib.Path(tmp_path, "run").exists()
