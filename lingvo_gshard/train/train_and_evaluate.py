"""Training with an evaluation at every checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.train.estimator import InputFn, TPUEstimator
from lingvo_gshard.train.hooks import TrainHook


@dataclasses.dataclass(frozen=True)
class TrainSpec:
    """What to train on, and up to which step; as TPUEstimator.train."""

    input_fn: InputFn
    max_steps: int
    hooks: Sequence[TrainHook] = ()


@dataclasses.dataclass(frozen=True)
class EvalSpec:
    """What to evaluate on; `steps` batches at most, all by default."""

    input_fn: InputFn
    steps: int | None = None
    name: str = "eval"


def train_and_evaluate(
    estimator: TPUEstimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> dict[str, float]:
    """Trains to max_steps and evaluates at every checkpoint on the way.

    Returns:
      The last checkpoint's metrics, as TPUEstimator.evaluate.
    """
    evaluation = _EvaluationHook(estimator, eval_spec)
    estimator.train(
        train_spec.input_fn,
        max_steps=train_spec.max_steps,
        hooks=[*train_spec.hooks, evaluation],
    )
    if evaluation.last is not None:
        return evaluation.last
    # max_steps was reached before this run began.
    return estimator.evaluate(eval_spec.input_fn, steps=eval_spec.steps, name=eval_spec.name)


class _EvaluationHook(TrainHook):
    """Evaluates the state that was just saved, where it lies."""

    def __init__(self, estimator: TPUEstimator, spec: EvalSpec) -> None:
        self._estimator, self._spec = estimator, spec
        self.last: dict[str, float] | None = None

    def after_save(self, step: int, state: NestedMap) -> None:
        spec = self._spec
        self.last = self._estimator.evaluate_state(
            state, step, spec.input_fn, steps=spec.steps, name=spec.name
        )
