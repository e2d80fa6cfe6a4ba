"""Evaluates checkpoints while a model trains: in the same process, or in another that follows."""

import logging
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from lingvo_gshard.checkpoints.saved_steps import whole_steps
from lingvo_gshard.checkpoints.stored import DamagedCheckpointError
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.spmd import processes
from lingvo_gshard.train import metrics_files
from lingvo_gshard.train.early_stopping import EarlyStop
from lingvo_gshard.train.estimator import Estimator, EvalSpec, InputFn
from lingvo_gshard.train.hooks import TrainHook


def train_and_evaluate(
    estimator: Estimator,
    input_fn: InputFn,
    evaluation: EvalSpec,
    *,
    max_steps: int,
    hooks: Sequence[TrainHook] = (),
) -> dict[str, Any] | None:
    """Trains and evaluates each checkpoint; returns the last metrics, or None if a hook stopped it.

    If train.early_stop_patience and _min_gain end training early, prints the reason. Raises
    ValueError if these are set, but the evaluation lacks `best_by`.
    """
    # The state is evaluated on the devices, so no checkpoint is read back.
    evaluator = EvaluationHook(estimator, evaluation)
    estimator.train(input_fn, max_steps=max_steps, hooks=[*hooks, evaluator])
    return evaluator.metrics()


class EvaluationHook(TrainHook):
    """Evaluates each saved state while it is still on the devices."""

    def __init__(self, estimator: Estimator, spec: EvalSpec) -> None:
        self._estimator = estimator
        self._spec = spec
        self._early_stop = EarlyStop.of(
            estimator.params.train, spec.name, spec.best_by, spec.higher_is_better
        )
        self._is_complete = False
        self._last: dict[str, Any] | None = None
        self._is_stopped = False

    def metrics(self) -> dict[str, Any] | None:
        """Returns the last metrics, or None if another hook stopped training."""
        if self._is_stopped:
            return None
        if self._last is not None:
            return self._last

        # max_steps was reached, or training ended early, before this run began.
        restored = self._estimator.restore()
        return self._estimator.evaluate_state(restored.state, restored.step, self._spec)

    def begin(self, step: int) -> None:
        # A run that has ended early stays ended at another start.
        self._decide(step)

    def after_save(self, step: int, state: NestedMap) -> None:
        self._last = self._estimator.evaluate_state(state, step, self._spec)
        self._decide(step)

    def is_complete(self) -> bool:
        return self._is_complete

    def _decide(self, step: int) -> None:
        """Decides whether training ends at this step; the first process decides for all."""
        if self._early_stop is None:
            return
        reason = None
        if processes.is_first():
            reason = self._early_stop.recorded(self._estimator.model_dir, step)
            if reason is not None:
                print(f"Training ends early, after step {step}: {reason}.", flush=True)
        self._is_complete = bool(processes.of_first(int(reason is not None)))

    def on_stop(self, step: int) -> None:
        self._is_stopped = True


def evaluate_continuously(
    estimator: Estimator, spec: EvalSpec, *, until_step: int, poll_secs: float = 5.0
) -> dict[str, Any] | None:
    """Evaluates the newest checkpoint again and again while another process trains.

    Skips a checkpoint if a newer one overtakes it, if it is deleted while it is read, if it is
    damaged, or if it was evaluated before. Returns the last metrics; None if it evaluated nothing.
    """
    # Evaluations of an earlier process are not repeated.
    lines = metrics_files.read_lines(pathlib.Path(estimator.model_dir, metrics_files.EVAL_METRICS))
    seen = {int(line["step"]) for line in lines if line["name"] == spec.name}

    metrics = None
    while max(seen, default=-1) < until_step:
        # All processes evaluate the checkpoint that the first one sees.
        step = processes.of_first(max(whole_steps(estimator.model_dir), default=-1))
        if step < 0 or step in seen:
            time.sleep(poll_secs)
            continue

        seen.add(step)
        try:
            metrics = estimator.evaluate_state(estimator.restore(step).state, step, spec)
        except Exception as error:
            if step not in whole_steps(estimator.model_dir):  # It was deleted in the meantime.
                continue
            if not isinstance(error, DamagedCheckpointError):
                raise
            logging.warning("%s It is not evaluated.", error)
    return metrics
