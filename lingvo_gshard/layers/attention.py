"""Multi-head attention, computed in its input's dtype but for the softmax, which is float32.

B batch, L queries, T keys, M model, N heads, D head size, k beam.
"""

from __future__ import annotations

import dataclasses
import functools

import tensorflow as tf

from lingvo_gshard.core import hyperparams
from lingvo_gshard.core.base_layer import BaseLayer, gaussian
from lingvo_gshard.core.hyperparams import REQUIRED, InstantiableParams
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context
from lingvo_gshard.layers.dropout import DropoutLayer
from lingvo_gshard.layers.projection import project

# Large enough that exp() of it is 0 beside any logit, small enough to add in float32.
_MASKED = -1e9


@dataclasses.dataclass(frozen=True)
class KeysValues:
    """Projected keys and values, each [B, N, T, D].

    Heads are a dim before tokens wherever heads are multiplied: else the compiler would transpose
    most factors twice, once more for the gradients.
    """

    keys: tf.Tensor
    values: tf.Tensor


class MultiHeadAttention(BaseLayer):
    """Scaled dot-product attention, split over the batch, with its weights replicated (3.2)."""

    dropout: DropoutLayer

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("dim", REQUIRED, "M.")
        p.Define("num_heads", REQUIRED, "N.")
        p.Define("head_dim", REQUIRED, "D.")
        p.Define("dropout", DropoutLayer.Params(), "Of the attention probabilities.")
        return p

    def __init__(self, params: hyperparams.Params, *args) -> None:
        super().__init__(params, *args)
        m, n, d = self.p.dim, self.p.num_heads, self.p.head_dim
        for name in ("wq", "wk", "wv"):
            self.CreateVariable(name, gaussian((m, n, d), "MND", fan_in=m))
        self.CreateVariable("wo", gaussian((n, d, m), "NDM", fan_in=n * d))
        self.CreateChild("dropout", self.p.dropout)

    def Project(self, theta: NestedMap, x: tf.Tensor) -> KeysValues:
        """Keys and values of x [B, T, M]."""
        return KeysValues(
            self.annotate(_swapped(project(x, theta.wk)), "BNTD"),
            self.annotate(_swapped(project(x, theta.wv)), "BNTD"),
        )

    def FProp(
        self,
        theta: NestedMap,
        x: tf.Tensor,
        memory: KeysValues,
        mask: tf.Tensor,
        context: Context,
    ) -> tf.Tensor:
        """Attends from x to a memory.

        Args:
          theta: the weights.
          x: [B, L, M], where the queries come from.
          memory: what Project gave of the keys' source, of T tokens.
          mask: float32 [B, L, T], 1 where query L may attend to key T, else 0. A query that may
            attend to nothing gets the mean of all values.
          context: the mode, the seed of the dropout, and what the last product is asked of.

        Returns:
          [B, L, M].
        """
        weights = tf.cast(self.Weights(theta, x, memory, mask), x.dtype)
        weights = self.dropout.FProp(theta.dropout, weights, "BNLT", context)
        mixed = tf.matmul(weights, memory.values, name="mixed")
        mixed = self.annotate(_swapped(mixed), "BLND")
        project_heads = functools.partial(project, num_axes=2)
        return self.annotate(context.product("BLM", project_heads, mixed, theta.wo), "BLM")

    def Weights(
        self, theta: NestedMap, x: tf.Tensor, memory: KeysValues, mask: tf.Tensor
    ) -> tf.Tensor:
        """What FProp weighs the values by, before dropout: float32 [B, N, L, T]."""
        q = self.annotate(_swapped(project(x, theta.wq)), "BNLD")
        q *= self.p.head_dim**-0.5
        logits = tf.matmul(q, memory.keys, transpose_b=True, name="logits")
        logits = tf.cast(logits, tf.float32) + (1.0 - mask[:, None]) * _MASKED
        return tf.nn.softmax(logits)


def _swapped(x: tf.Tensor) -> tf.Tensor:
    """[B, L, N, D] as [B, N, L, D], and back."""
    return tf.transpose(x, [0, 2, 1, 3])


def segment_mask(queries: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
    """float32 [B, L, T]: 1 where query [B, L] and key [B, T] have the same segment id."""
    return tf.cast(queries[:, :, None] == keys[:, None, :], tf.float32)


def causal_mask(length: int) -> tf.Tensor:
    """float32 [1, L, L]: 1 where the key is not after the query."""
    index = tf.range(length)
    return tf.cast(index[None, :, None] >= index[None, None, :], tf.float32)
