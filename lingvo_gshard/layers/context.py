"""What a call of FProp knows besides its inputs: the mode and the step's randomness."""

from __future__ import annotations

import dataclasses
import enum

import tensorflow as tf

from lingvo_gshard.core.base_layer import fold_seed


class Mode(enum.Enum):
    """What the program is for. Only TRAIN is random; DECODE routes each example by itself."""

    TRAIN = "train"
    EVAL = "eval"
    DECODE = "decode"


@dataclasses.dataclass(frozen=True)
class Context:
    """The mode and, when training, the seed of this step.

    Attributes:
      mode: what the program is for.
      seed: int32 [2], another one each step; None unless training.
    """

    mode: Mode
    seed: tf.Tensor | None = None

    def __post_init__(self) -> None:
        if (self.mode is Mode.TRAIN) != (self.seed is not None):
            raise ValueError(f"Context: a seed goes with TRAIN alone, got {self.mode}.")

    @property
    def training(self) -> bool:
        """Whether dropout and random routing are on."""
        return self.mode is Mode.TRAIN

    def seed_for(self, name: str) -> tf.Tensor:
        """The seed, int32 [2], of the one use that `name` stands for; training only."""
        assert self.seed is not None
        return fold_seed(self.seed, name)
