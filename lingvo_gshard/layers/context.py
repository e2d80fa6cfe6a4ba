"""The context of an FProp call: the mode, the step's seed, and how to compute large products."""

from __future__ import annotations

import dataclasses
import enum

import tensorflow as tf

from lingvo_gshard.core.base_layer import fold_seed
from lingvo_gshard.layers.products import Products, computed

# Odd, so that its multiples are all distinct in int32, whose arithmetic wraps around.
_INDEX_STRIDE = 0x3779B1B5


class Mode(enum.Enum):
    """What the program is for. Only TRAIN is random. DECODE makes each example its own group."""

    TRAIN = "train"
    EVAL = "eval"
    DECODE = "decode"


@dataclasses.dataclass(frozen=True)
class Context:
    """What FProp needs besides weights and inputs.

    Attributes:
      mode: what the program is for.
      seed: int32 [2], different at every step; None unless training.
      scope: the path of the layer that the seed belongs to; empty for the whole model's seed.
      product: computes products with large weights: `context.product(dims, function, *factors)`.
    """

    mode: Mode
    seed: tf.Tensor | None = None
    scope: str = ""
    product: Products = computed

    def __post_init__(self) -> None:
        if (self.mode is Mode.TRAIN) != (self.seed is not None):
            raise ValueError(
                "Context: a seed is required in mode TRAIN and not allowed in any other, got "
                f"{self.mode.name} and seed {self.seed}."
            )

    @property
    def training(self) -> bool:
        """Whether dropout and random routing are on."""
        return self.mode is Mode.TRAIN

    def in_layer(self, stack: str, index: int | tf.Tensor, path: str) -> Context:
        """The context of one layer of a stack.

        The seed depends on the layer's index in the stack, not on its path. So a layer draws the
        same numbers whether the stack is unrolled or a loop, in which layers share one path.

        Args:
          stack: the path of the stack.
          index: the layer's index, an int or an int32 scalar.
          path: the path of the layer.
        """
        if self.seed is None:
            return self
        key, salt = tf.unstack(fold_seed(self.seed, stack))
        seed = tf.stack([key + tf.convert_to_tensor(index + 1) * _INDEX_STRIDE, salt])
        return dataclasses.replace(self, seed=seed, scope=path)

    def seed_for(self, path: str) -> tf.Tensor:
        """The seed, int32 [2], for the layer at `path`; only when training."""
        assert self.seed is not None and path.startswith(self.scope), (path, self.scope)
        return fold_seed(self.seed, path.removeprefix(self.scope))
