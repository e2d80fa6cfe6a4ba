"""The result of a model_fn, and `Mode`, which says what that result must have."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Mode

# What a model_fn must fill in, by mode.
_REQUIRED = {
    Mode.TRAIN: ("loss", "train_op"),
    Mode.EVAL: ("eval_metrics",),
    Mode.PREDICT: ("predictions",),
}


@dataclasses.dataclass(frozen=True)
class TPUEstimatorSpec:
    """The result of a model_fn. Raises ValueError if it lacks what the mode requires.

    It has the fields of TensorFlow's TPUEstimatorSpec, whose ModeKeys are `Mode` here.
    """

    mode: Mode

    # A float scalar; required in TRAIN.
    loss: tf.Tensor | None = None

    # The new state, of the old one's structure, with `step` increased by one; required in TRAIN.
    # (In TensorFlow's TPUEstimator it is an op that changes variables.)
    train_op: NestedMap | None = None

    # Scalars and small tensors to record in TRAIN; `num_tokens` gives tokens/s.
    metrics: NestedMap = dataclasses.field(default_factory=NestedMap)

    # Name -> (weighted sum, weight), a scalar or small tensor and a scalar; required in EVAL.
    eval_metrics: Mapping[str, tuple[tf.Tensor, tf.Tensor]] | None = None

    # Tensors whose dim 0 is the batch's rows; required in PREDICT.
    predictions: NestedMap | None = None

    def __post_init__(self) -> None:
        missing = [name for name in _REQUIRED[self.mode] if self._is_missing(name)]
        if missing:
            raise ValueError(f"TPUEstimatorSpec: mode {self.mode.name} needs {', '.join(missing)}.")

    def _is_missing(self, name: str) -> bool:
        value = getattr(self, name)
        if isinstance(value, Mapping):
            return not value
        return value is None
