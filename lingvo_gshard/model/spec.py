"""The result of a model_fn, and `Mode`, which determines the result's required fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap, nested
from lingvo_gshard.layers.context import Mode

# The arguments of a function, by position or by name.
Tensors: TypeAlias = "Sequence[tf.Tensor] | Mapping[str, tf.Tensor]"
# Name -> (weighted sum, weight), a scalar or small tensor and a scalar.
MetricSums: TypeAlias = "Mapping[str, tuple[tf.Tensor, tf.Tensor]]"
# The fields that a model_fn must fill in, by mode.
_REQUIRED = {
    Mode.TRAIN: ("loss", "train_op"),
    Mode.EVAL: ("eval_metrics",),
    Mode.PREDICT: ("predictions",),
}


@dataclasses.dataclass(frozen=True)
class TPUEstimatorSpec:
    """The result of a model_fn. Raises ValueError if it lacks a field that the mode requires.

    It has the fields of TensorFlow's TPUEstimatorSpec, whose ModeKeys are `Mode` here.
    """

    mode: Mode

    # Trees may be plain dicts.

    # A float scalar; required in TRAIN.
    loss: tf.Tensor | None = None

    # The new state, of the old one's structure, with `step` increased by one; required in TRAIN.
    # (In TensorFlow's TPUEstimator it is an op that changes variables.)
    train_op: NestedMap | None = None

    # Scalars and small tensors to record in TRAIN; `num_tokens` gives tokens/s.
    metrics: NestedMap = dataclasses.field(default_factory=NestedMap)

    # The metrics of a batch, or (fn, tensors), where fn(*tensors) or fn(**tensors) returns them;
    # required in EVAL. The function is a part of the program, and model/metrics.py has some of its
    # metrics. (TensorFlow's TPUEstimator calls it on the host.)
    eval_metrics: MetricSums | tuple[Callable[..., MetricSums], Tensors] | None = None

    # (fn, tensors) in TRAIN: process 0 calls fn(*tensors) or fn(**tensors) for each step, with
    # NumPy arrays, after the end of the step's call. It returns None, or names and numbers, which
    # are written for TensorBoard at that step.
    host_call: tuple[Callable[..., Mapping[str, float] | None], Tensors] | None = None

    # Tensors whose dim 0 is the batch's rows; required in PREDICT.
    predictions: NestedMap | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mode, Mode):
            known = ", ".join(f"Mode.{mode.name}" for mode in Mode)
            raise ValueError(f"TPUEstimatorSpec: mode {self.mode!r}: expected one of {known}.")
        for name in ("train_op", "metrics", "predictions"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, nested(f"TPUEstimatorSpec: {name}", value))

        missing = [name for name in _REQUIRED[self.mode] if self._is_missing(name)]
        if missing:
            raise ValueError(f"TPUEstimatorSpec: mode {self.mode.name} needs {', '.join(missing)}.")
        if self.train_op is not None and "step" not in self.train_op:
            raise ValueError("TPUEstimatorSpec: train_op lacks step: add step=state.step + 1.")
        if self.loss is not None and tf.convert_to_tensor(self.loss).shape.rank != 0:
            shape = tuple(self.loss.shape)
            raise ValueError(f"TPUEstimatorSpec: loss has shape {shape}; expected a scalar.")
        if self.host_call is not None and self.mode is not Mode.TRAIN:
            raise ValueError(f"TPUEstimatorSpec: host_call needs mode TRAIN, got {self.mode.name}.")

    @property
    def metric_sums(self) -> MetricSums:
        """The metrics of EVAL, and the loss, if any, as a mean over batches."""
        assert self.eval_metrics is not None
        metrics = self.eval_metrics
        if isinstance(metrics, tuple):
            metrics = called(*metrics)
        if self.loss is None:
            return metrics
        return {"loss": (self.loss, tf.constant(1.0)), **metrics}

    def _is_missing(self, name: str) -> bool:
        value = getattr(self, name)
        if isinstance(value, Mapping):
            return not value
        return value is None


def as_sums(metrics: MetricSums) -> NestedMap:
    """Returns metrics as `sums` and `weights` by name: unlike means, their sums are exact."""
    sums = {name: total for name, (total, _) in metrics.items()}
    weights = {name: weight for name, (_, weight) in metrics.items()}
    return NestedMap(sums=NestedMap(sums), weights=NestedMap(weights))


def called(fn: Callable[..., Any], tensors: Tensors | Sequence[Any] | Mapping[str, Any]) -> Any:
    """Returns fn(*tensors), or fn(**tensors) if they have names."""
    return fn(**tensors) if isinstance(tensors, Mapping) else fn(*tensors)
