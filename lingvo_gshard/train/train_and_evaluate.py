"""Evaluation at every checkpoint, during training or in a process of its own."""

import logging
import pathlib
import time
from collections.abc import Sequence

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.spmd import processes
from lingvo_gshard.train import summaries
from lingvo_gshard.train.estimator import EvalSpec, InputFn, TPUEstimator
from lingvo_gshard.train.hooks import TrainHook
from lingvo_gshard.train.stored import DamagedCheckpointError


def train_and_evaluate(
    estimator: TPUEstimator,
    input_fn: InputFn,
    evaluation: EvalSpec,
    *,
    max_steps: int,
    hooks: Sequence[TrainHook] = (),
) -> dict[str, float] | None:
    """Trains as `TPUEstimator.train` does, and evaluates every checkpoint on the way.

    The hooks are called before each evaluation. Returns the last checkpoint's metrics, as
    TPUEstimator.evaluate; None if a hook stopped training.
    """
    evaluator = _EvaluationHook(estimator, evaluation)
    estimator.train(input_fn, max_steps=max_steps, hooks=[*hooks, evaluator])
    if evaluator.stopped:
        return None
    if evaluator.last is not None:
        return evaluator.last
    # max_steps was reached before this run began.
    return estimator.evaluate(evaluation.input_fn, steps=evaluation.steps, name=evaluation.name)


def evaluate_continuously(
    estimator: TPUEstimator, spec: EvalSpec, *, until_step: int, poll_secs: float = 5.0
) -> dict[str, float] | None:
    """Evaluates the newest checkpoint again and again while another process trains.

    It looks for a new one every `poll_secs` until it comes to `until_step`. It skips checkpoints
    that a newer one overtakes, that are deleted while it reads them, that are damaged, or that were
    evaluated before. Returns the last evaluation's metrics; None if there was none.
    """
    lines = summaries.read_lines(pathlib.Path(estimator.model_dir, summaries.EVAL_METRICS))
    seen = {int(line["step"]) for line in lines if line["name"] == spec.name}
    metrics = None
    while max(seen, default=-1) < until_step:
        newest = processes.of_first(max(estimator.checkpoint_steps(), default=-1))
        if newest >= 0 and newest not in seen:
            metrics = _evaluate_if_whole(estimator, spec, newest) or metrics
            seen.add(newest)
        else:
            time.sleep(poll_secs)
    return metrics


def _evaluate_if_whole(
    estimator: TPUEstimator, spec: EvalSpec, step: int
) -> dict[str, float] | None:
    try:
        return estimator.evaluate_state(estimator.restore(step).state, step, spec)
    except Exception as error:
        if step not in estimator.checkpoint_steps():  # It was deleted in the meantime.
            return None
        if not isinstance(error, DamagedCheckpointError):
            raise
        logging.warning("%s It is not evaluated.", error)
        return None


class _EvaluationHook(TrainHook):
    """Evaluates each state that is saved, while it is still on the devices."""

    def __init__(self, estimator: TPUEstimator, spec: EvalSpec) -> None:
        self._estimator, self._spec = estimator, spec
        self.last: dict[str, float] | None = None
        self.stopped = False

    def after_save(self, step: int, state: NestedMap) -> None:
        self.last = self._estimator.evaluate_state(state, step, self._spec)

    def on_stop(self, step: int) -> None:
        self.stopped = True
