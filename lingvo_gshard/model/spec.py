"""The modes of a model_fn, and its result."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Mode as ModeKeys


@dataclasses.dataclass(frozen=True)
class TPUEstimatorSpec:
    """The result of a model_fn. Raises ValueError if it lacks what the mode requires."""

    mode: ModeKeys
    loss: tf.Tensor | None = None  # A float scalar; required in TRAIN.
    # The new state, of the old one's structure, with `step` increased by one; required in TRAIN.
    # (In TensorFlow's TPUEstimator it is an op that changes variables.)
    train_op: NestedMap | None = None
    # Scalars and small tensors to record in TRAIN; `num_tokens` gives tokens/s.
    metrics: NestedMap = dataclasses.field(default_factory=NestedMap)
    # Name -> (weighted sum, weight), a scalar or small tensor and a scalar; required in EVAL.
    eval_metrics: Mapping[str, tuple[tf.Tensor, tf.Tensor]] | None = None
    predictions: NestedMap | None = None  # Their dim 0 is the batch's rows; required in PREDICT.

    def __post_init__(self) -> None:
        required = {
            ModeKeys.TRAIN: ("loss", "train_op"),
            ModeKeys.EVAL: ("eval_metrics",),
            ModeKeys.PREDICT: ("predictions",),
        }[self.mode]
        given = {name: getattr(self, name) for name in required}
        missing = [k for k, v in given.items() if v is None or (isinstance(v, Mapping) and not v)]
        if missing:
            raise ValueError(f"TPUEstimatorSpec: mode {self.mode.name} needs {', '.join(missing)}.")
