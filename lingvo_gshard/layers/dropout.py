"""Dropout. Each partition makes only its own part of the mask."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core.base_layer import BaseLayer
from lingvo_gshard.core.hyperparams import setting
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context
from lingvo_gshard.layers.random import random_mask


class DropoutLayer(BaseLayer):
    """When training, zeroes a random share of the elements and scales up the rest (A.2)."""

    class Params(BaseLayer.Params):
        rate: float = setting(0.1, "The share of elements that are zeroed, in [0, 1).")

    p: Params

    def __init__(self, params: Params, *args: Any) -> None:
        super().__init__(params, *args)
        self._check_setting("rate", 0 <= self.p.rate < 1, "in [0, 1)")

    def FProp(self, theta: NestedMap, x: tf.Tensor, dims: str, context: Context) -> tf.Tensor:
        """Drops elements of `x`; the mask is partitioned by the same `dims`."""
        if not context.training or not self.p.rate:
            return x

        keep_rate = 1.0 - self.p.rate
        is_kept = random_mask(tuple(x.shape), context.seed_for(self.path), keep_rate)
        # Scaled up, so that the expected value of an element stays the same.
        return tf.where(self.annotate(is_kept, dims), x * (1.0 / keep_rate), 0.0)
