"""Evaluation at every checkpoint: of the run that trains, or of one that another process trains."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.spmd import processes
from lingvo_gshard.train import summaries
from lingvo_gshard.train.digests import DamagedCheckpointError
from lingvo_gshard.train.estimator import InputFn, TPUEstimator
from lingvo_gshard.train.hooks import TrainHook
from lingvo_gshard.train.retention import BestBy


@dataclasses.dataclass(frozen=True)
class TrainSpec:
    """What to train on, and up to which step; as TPUEstimator.train."""

    input_fn: InputFn
    max_steps: int
    hooks: Sequence[TrainHook] = ()


@dataclasses.dataclass(frozen=True)
class EvalSpec:
    """What to evaluate on.

    Attributes:
      input_fn: given params, returns an Input that ends.
      steps: how many batches at most; all by default.
      name: names the results, as TPUEstimator.evaluate.
      best_by: the metric by which the best checkpoint is kept; None keeps none for that.
    """

    input_fn: InputFn
    steps: int | None = None
    name: str = "eval"
    best_by: BestBy | None = None


def train_and_evaluate(
    estimator: TPUEstimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> dict[str, float] | None:
    """Trains to max_steps and evaluates at every checkpoint on the way.

    Returns:
      The last checkpoint's metrics, as TPUEstimator.evaluate; None if a hook stopped training.
    """
    evaluation = _EvaluationHook(estimator, eval_spec)
    estimator.train(
        train_spec.input_fn,
        max_steps=train_spec.max_steps,
        hooks=[*train_spec.hooks, evaluation],
    )
    if evaluation.stopped:
        return None
    if evaluation.last is not None:
        return evaluation.last
    # max_steps was reached before this run began.
    return estimator.evaluate(eval_spec.input_fn, steps=eval_spec.steps, name=eval_spec.name)


def evaluate_continuously(
    estimator: TPUEstimator,
    spec: EvalSpec,
    *,
    until_step: int,
    poll_secs: float = 5.0,
    idle_timeout_secs: float | None = None,
) -> dict[str, float] | None:
    """Evaluates the newest checkpoint again and again, while another process trains.

    Checkpoints that it is too slow for, that are deleted before it has read them, or that are
    damaged are passed over; so are those evaluated before, by an evaluator that was stopped.

    Args:
      estimator: of the model_dir that is trained in.
      spec: what to evaluate on.
      until_step: the last checkpoint to wait for.
      poll_secs: how often to look for a new one.
      idle_timeout_secs: how long to wait for one; None: for ever.

    Returns:
      The last evaluation's metrics; None if there was none.
    """
    seen = set(summaries.evaluated_steps(estimator.config.model_dir, spec.name))
    metrics, last_news = None, time.monotonic()
    while max(seen, default=-1) < until_step:
        newest = processes.of_first(max(estimator.checkpoint_steps(), default=-1))
        idle_secs = time.monotonic() - last_news
        if newest >= 0 and newest not in seen:
            metrics = _evaluate_if_there(estimator, spec, newest) or metrics
            seen.add(newest)
            last_news = time.monotonic()
        elif idle_timeout_secs is not None and _of_any(idle_secs >= idle_timeout_secs):
            logging.warning("evaluate: no new checkpoint for %g s; it ends", idle_timeout_secs)
            break
        else:
            time.sleep(poll_secs)
    return metrics


def _of_any(here: bool) -> bool:
    """Whether it is so in any process."""
    return bool(processes.largest([here])[0])


def _evaluate_if_there(
    estimator: TPUEstimator, spec: EvalSpec, step: int
) -> dict[str, float] | None:
    try:
        metrics = estimator.evaluate(
            spec.input_fn, steps=spec.steps, checkpoint_step=step, name=spec.name
        )
    except Exception as error:
        if step not in estimator.checkpoint_steps():  # Deleted while it was read.
            return None
        if not isinstance(error, DamagedCheckpointError):
            raise
        logging.warning("%s It is not evaluated.", error)
        return None
    _note_best(estimator, spec, step, metrics)
    return metrics


def _note_best(
    estimator: TPUEstimator, spec: EvalSpec, step: int, metrics: dict[str, float]
) -> None:
    if spec.best_by is not None:
        estimator.note_best(spec.best_by, step, metrics)


class _EvaluationHook(TrainHook):
    """Evaluates the state that is being saved, where it lies."""

    def __init__(self, estimator: TPUEstimator, spec: EvalSpec) -> None:
        self._estimator, self._spec = estimator, spec
        self.last: dict[str, float] | None = None
        self.stopped = False

    def after_save(self, step: int, state: NestedMap) -> None:
        spec = self._spec
        self.last = self._estimator.evaluate_state(
            state, step, spec.input_fn, steps=spec.steps, name=spec.name
        )
        _note_best(self._estimator, spec, step, self.last)

    def on_stop(self, step: int) -> None:
        self.stopped = True
