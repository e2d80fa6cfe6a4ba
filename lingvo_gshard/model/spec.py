"""What a model_fn is asked for and what it gives back."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap


class ModeKeys(enum.Enum):
    """What the model is to do."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "predict"


@dataclasses.dataclass(frozen=True)
class TPUEstimatorSpec:
    """The result of a model_fn.

    Attributes:
      mode: the mode it was called with.
      loss: float scalar; needed in TRAIN.
      train_op: the new state, in the old one's structure, `step` counted on by one; needed in
        TRAIN. (TPUEstimator's is an op that changes variables. Here there are none: the state
        comes as an argument and goes as a result.)
      metrics: scalars and small tensors to record in TRAIN; `num_tokens` gives tokens/s.
      eval_metrics: name -> (weighted sum, weight), two scalars; needed in EVAL.
      predictions: tensors whose dim 0 is the batch's rows; needed in PREDICT.

    Raises:
      ValueError: what the mode needs is missing.
    """

    mode: ModeKeys
    loss: tf.Tensor | None = None
    train_op: NestedMap | None = None
    metrics: NestedMap = dataclasses.field(default_factory=NestedMap)
    eval_metrics: Mapping[str, tuple[tf.Tensor, tf.Tensor]] | None = None
    predictions: NestedMap | None = None

    def __post_init__(self) -> None:
        needed = {
            ModeKeys.TRAIN: ("loss", "train_op"),
            ModeKeys.EVAL: ("eval_metrics",),
            ModeKeys.PREDICT: ("predictions",),
        }[self.mode]
        missing = [name for name in needed if not _given(getattr(self, name))]
        if missing:
            raise ValueError(f"TPUEstimatorSpec: mode {self.mode.name} needs {', '.join(missing)}.")


def _given(value: object) -> bool:
    return bool(value) if isinstance(value, Mapping) else value is not None
