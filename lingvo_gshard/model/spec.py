"""The modes of a model_fn, and its result."""

import dataclasses
import enum
from collections.abc import Mapping

import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap


class ModeKeys(enum.Enum):
    """The mode in which a model_fn is called."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "predict"


@dataclasses.dataclass(frozen=True)
class TPUEstimatorSpec:
    """The result of a model_fn. Raises ValueError if it lacks an attribute that the mode requires.

    Attributes:
      mode: the mode it was called with.
      loss: float scalar; required in TRAIN.
      train_op: the new state, of the old one's structure, with `step` increased by one; required
        in TRAIN. (In TensorFlow's TPUEstimator it is an op that changes variables.)
      metrics: scalars and small tensors to record in TRAIN; `num_tokens` gives tokens/s.
      eval_metrics: name -> (weighted sum, weight), a scalar or small tensor and a scalar; required
        in EVAL.
      predictions: tensors whose dim 0 is the batch's rows; required in PREDICT.
    """

    mode: ModeKeys
    loss: tf.Tensor | None = None
    train_op: NestedMap | None = None
    metrics: NestedMap = dataclasses.field(default_factory=NestedMap)
    eval_metrics: Mapping[str, tuple[tf.Tensor, tf.Tensor]] | None = None
    predictions: NestedMap | None = None

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
