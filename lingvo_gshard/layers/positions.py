"""How attention uses the positions of its queries and keys.

In the paper's model it does not: only the embeddings know positions. Other schemes override one of
two methods: `Rotated` turns queries and keys before their product, and `Bias` is added to it.

B batch, N heads, L queries, T keys, D head size.
"""

from __future__ import annotations

import math
from typing import Any

from lingvo_gshard.core.base_layer import BaseLayer, gaussian
from lingvo_gshard.core.hyperparams import REQUIRED, setting
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap


class NoPositions(BaseLayer):
    """Attention without positions: only the embeddings may know them."""

    class Params(BaseLayer.Params):
        num_heads: int = setting(REQUIRED, "N; set by the attention.")

    p: Params

    def Rotated(self, x: tf.Tensor, positions: tf.Tensor | None) -> tf.Tensor:
        """Returns queries or keys x [B, N, L, D] of tokens at `positions`, int32 [B, L]."""
        return x

    def Bias(
        self, theta: NestedMap, queries: tf.Tensor | None, keys: tf.Tensor | None
    ) -> tf.Tensor | None:
        """Returns a bias of the logits, float32 [B, N, L, T], or None.

        `queries` [B, L] and `keys` [B, T] are int32 positions.
        """
        return None


class RotaryPositions(NoPositions):
    """Rotates pairs of a head's elements by angles that grow with the position (Su et al. 2021).

    Element i is paired with element i + D / 2, as in Llama. So a product of a query and a key
    depends only on how far apart they are.
    """

    class Params(NoPositions.Params):
        max_timescale: float = setting(
            10_000.0, "The longest wavelength over 2 pi, not quite reached."
        )

    p: Params

    def __init__(self, params: Params, *args: Any) -> None:
        super().__init__(params, *args)
        self._check_setting("max_timescale", self.p.max_timescale > 0, "above 0")

    def Rotated(self, x: tf.Tensor, positions: tf.Tensor | None) -> tf.Tensor:
        assert positions is not None, self.path
        half = x.shape[-1] // 2
        if x.shape[-1] % 2:
            raise ValueError(f"{self.path}: the head size must be even, got {x.shape[-1]}.")

        # theta_i = position / max_timescale^(i / half), in float32: [B, 1, L, D / 2].
        rates = [self.p.max_timescale ** (-i / half) for i in range(half)]
        angles_BLD = tf.cast(positions, tf.float32)[..., None] * tf.constant(rates, tf.float32)
        sin_B1LD = tf.cast(tf.sin(angles_BLD), x.dtype)[:, None]
        cos_B1LD = tf.cast(tf.cos(angles_BLD), x.dtype)[:, None]

        first, second = tf.split(x, 2, -1)
        rotated_first = first * cos_B1LD - second * sin_B1LD
        rotated_second = second * cos_B1LD + first * sin_B1LD
        return tf.concat([rotated_first, rotated_second], -1)


class RelativeBias(NoPositions):
    """A learned number by head and bucket of the distance from query to key (T5; Raffel et al.).

    Half of the buckets hold one distance each; the others grow logarithmically up to
    `max_distance`, and all that are farther share the last one.
    """

    class Params(NoPositions.Params):
        num_buckets: int = setting(32, "The number of buckets.")
        max_distance: int = setting(128, "The distance from which all are alike, in tokens.")
        looks_ahead: bool = setting(
            False, "Whether half of the buckets are for keys after the query."
        )

    p: Params

    def __init__(self, params: Params, *args: Any) -> None:
        super().__init__(params, *args)
        p = self.p
        buckets = p.num_buckets // 2 if p.looks_ahead else p.num_buckets
        if buckets < 2 or p.max_distance <= buckets // 2:
            raise ValueError(
                f"{self.path}: num_buckets must be 2 or more (4 with looks_ahead) and max_distance "
                f"above half of one side's, got {p.num_buckets} and {p.max_distance}."
            )
        # Biases of heads, whose rows no product contracts.
        table = gaussian((p.num_buckets, p.num_heads), "_N", fan_in=1, rows=0)
        self.CreateVariable("table", table)

    def Bias(
        self, theta: NestedMap, queries: tf.Tensor | None, keys: tf.Tensor | None
    ) -> tf.Tensor | None:
        assert queries is not None and keys is not None, self.path
        distance_BLT = keys[:, None, :] - queries[:, :, None]
        bias_BLTN = tf.gather(theta.table, self._buckets(distance_BLT))
        return self.annotate(tf.transpose(bias_BLTN, [0, 3, 1, 2]), "BNLT")

    def _buckets(self, distance: tf.Tensor) -> tf.Tensor:
        """Returns the bucket of each distance, key minus query, both int32."""
        p = self.p
        num_buckets = p.num_buckets
        bucket = tf.zeros_like(distance)

        # One half for the keys ahead; without it, they all count as distance 0.
        if p.looks_ahead:
            num_buckets //= 2
            bucket += tf.where(distance > 0, num_buckets, 0)
            distance = tf.abs(distance)
        else:
            distance = -tf.minimum(distance, 0)

        # Near ones exactly, far ones by their logarithm.
        num_exact = num_buckets // 2
        ratio = tf.cast(tf.maximum(distance, 1), tf.float32) / num_exact
        scale = (num_buckets - num_exact) / math.log(p.max_distance / num_exact)
        far = num_exact + tf.cast(tf.math.log(ratio) * scale, tf.int32)
        far = tf.minimum(far, num_buckets - 1)
        return bucket + tf.where(distance < num_exact, distance, far)
