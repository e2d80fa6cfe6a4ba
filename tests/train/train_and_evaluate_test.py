"""Evaluation during training: at every checkpoint, or in another process that follows."""

import json
import threading
import time

import pytest

from lingvo_gshard.checkpoints import checkpoints
from lingvo_gshard.checkpoints.checkpoints import Checkpoints
from lingvo_gshard.train.estimator import EvalSpec
from lingvo_gshard.train.hooks import TrainHook
from lingvo_gshard.train.train_and_evaluate import evaluate_continuously, train_and_evaluate
from tests.train import regression

_DEV = EvalSpec(lambda p: regression.Batches(num_batches=2), name="dev", best_by="error")


def _evaluated(folder):
    lines = [json.loads(line) for line in (folder / "eval_metrics.jsonl").open()]
    return {line["step"]: line["error"] for line in lines}


def _estimator(folder, **options):
    return regression.make(folder, steps_per_call=2, save_checkpoints_steps=2, **options)


def _train(folder, max_steps, hooks=()):
    estimator = _estimator(folder, keep_checkpoint_max=2)
    estimator.train(lambda p: regression.Batches(), max_steps=max_steps, hooks=hooks)


@pytest.mark.slow
def test_the_best_checkpoint_is_kept(tmp_path):
    estimator = _estimator(tmp_path, keep_checkpoint_max=1)
    last = train_and_evaluate(estimator, lambda p: regression.Batches(), _DEV, max_steps=12)
    errors = _evaluated(tmp_path)
    assert sorted(errors) == [2, 4, 6, 8, 10, 12] and last["error"] == errors[12]
    best = min(errors, key=errors.get)
    assert checkpoints.read_best(tmp_path).step == best
    with Checkpoints(tmp_path) as saved:
        assert saved.steps() == sorted({best, 12})
    # A run that was stopped before the last evaluation notes the best checkpoint later.
    (tmp_path / "checkpoints/best.json").unlink()
    train_and_evaluate(estimator, lambda p: regression.Batches(), _DEV, max_steps=12)
    assert checkpoints.read_best(tmp_path).step == 12


class _Slowly(TrainHook):
    """Gives an evaluator time between the steps."""

    def __init__(self, folder):
        self._folder = folder

    def after_save(self, step, state):
        for _ in range(600):
            if step in (_evaluated(self._folder) if self._has_begun() else ()):
                return
            time.sleep(0.05)

    def _has_begun(self):
        return (self._folder / "eval_metrics.jsonl").exists()


@pytest.mark.slow
def test_an_evaluator_follows_a_run_to_its_end(tmp_path):
    """The evaluator starts before the folder exists."""
    last = []
    follower = threading.Thread(
        target=lambda: last.append(
            evaluate_continuously(_estimator(tmp_path), _DEV, until_step=6, poll_secs=0.05)
        )
    )
    follower.start()
    _train(tmp_path, 6, [_Slowly(tmp_path)])
    follower.join(timeout=60)
    errors = _evaluated(tmp_path)
    assert sorted(errors) == [2, 4, 6] and last[0]["error"] == errors[6]
    # Another evaluator finds that everything is done.
    assert evaluate_continuously(_estimator(tmp_path), _DEV, until_step=6) is None
    assert sorted(_evaluated(tmp_path)) == [2, 4, 6]


@pytest.mark.slow
def test_an_evaluator_passes_over_a_damaged_checkpoint(tmp_path, caplog):
    _train(tmp_path, 4)
    (tmp_path / "checkpoints/4/about/metadata").write_text("{}")
    assert evaluate_continuously(_estimator(tmp_path), _DEV, until_step=4) is None
    assert not (tmp_path / "eval_metrics.jsonl").exists()
    assert "checkpoints/4: the checkpoint is damaged: " in caplog.text


@pytest.mark.slow
def test_an_evaluators_own_mistake_is_raised(tmp_path):
    _train(tmp_path, 2)
    nothing = EvalSpec(lambda p: regression.Batches(num_batches=0))
    with pytest.raises(ValueError, match="the input has no batches"):
        evaluate_continuously(_estimator(tmp_path), nothing, until_step=2)
