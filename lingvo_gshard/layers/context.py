"""What a call of FProp knows besides its inputs: the mode and the step's randomness."""

from __future__ import annotations

import dataclasses
import enum

import tensorflow as tf

from lingvo_gshard.core.base_layer import fold_seed
from lingvo_gshard.layers.products import Products, computed

# Odd, so that multiples of it differ in int32, whose sums and products wrap around.
_INDEX_STRIDE = 0x3779B1B5


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
      scope: the path of the layer that the seed is of, empty for that of the whole model.
      product: gives products with large weights, `context.product(dims, function, *factors)`.
    """

    mode: Mode
    seed: tf.Tensor | None = None
    scope: str = ""
    product: Products = computed

    def __post_init__(self) -> None:
        if (self.mode is Mode.TRAIN) != (self.seed is not None):
            raise ValueError(f"Context: a seed goes with TRAIN alone, got {self.mode}.")

    @property
    def training(self) -> bool:
        """Whether dropout and random routing are on."""
        return self.mode is Mode.TRAIN

    def in_layer(self, stack: str, index: int | tf.Tensor, path: str) -> Context:
        """The context of one layer of a stack.

        The layer draws the same numbers whether it has a place of its own in the program or is
        one of many in a loop, whose path is the same: seeds depend on the index, an int32 scalar.
        """
        if self.seed is None:
            return self
        key, salt = tf.unstack(fold_seed(self.seed, stack))
        seed = tf.stack([key + tf.convert_to_tensor(index + 1) * _INDEX_STRIDE, salt])
        return dataclasses.replace(self, seed=seed, scope=path)

    def seed_for(self, path: str) -> tf.Tensor:
        """The seed, int32 [2], of the one use that `path` stands for; training only."""
        assert self.seed is not None and path.startswith(self.scope), (path, self.scope)
        return fold_seed(self.seed, path.removeprefix(self.scope))
