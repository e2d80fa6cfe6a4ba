"""Multi-head attention. The softmax is float32; everything else has the input's dtype.

B batch, L queries, T keys, M model, N heads, D head size. Keys and values may have fewer heads than
queries, each for a group of theirs: then N is the number of these in their tensors.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from lingvo_gshard.core.base_layer import BaseLayer, Use, constant, gaussian
from lingvo_gshard.core.hyperparams import REQUIRED, setting
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context
from lingvo_gshard.layers.dropout import DropoutLayer
from lingvo_gshard.layers.norms import NoHeadNorm
from lingvo_gshard.layers.positions import NoPositions
from lingvo_gshard.layers.vocabulary import capped, check_cap

# Makes a masked key's probability exactly 0, yet is well within float32's range.
_MASKED_LOGIT = -1e9


@dataclasses.dataclass(frozen=True)
class KeysValues:
    """Projected keys and values, each [B, N, T, D], and the keys' positions.

    The heads come before the tokens because that is the layout that the matrix products need. In
    any other layout the compiler would transpose most operands, and again for the gradients.
    """

    keys: tf.Tensor
    values: tf.Tensor
    positions: tf.Tensor | None = None  # int32 [B, T]; None where no scheme reads them.


class MultiHeadAttention(BaseLayer):
    """Scaled dot-product attention: split over the batch, with replicated weights (section 3.2)."""

    query_norm: NoHeadNorm
    key_norm: NoHeadNorm
    dropout: DropoutLayer
    positions: NoPositions

    class Params(BaseLayer.Params):
        dim: int = setting(REQUIRED, "M, the model dimension.")
        num_heads: int = setting(REQUIRED, "N, the number of heads.")
        num_kv_heads: int | None = setting(
            None, "Heads of keys and values, a divisor of num_heads; None for as many (GQA)."
        )
        head_dim: int = setting(REQUIRED, "D, the size of a head.")
        scaled: bool = setting(True, "Whether products are divided by sqrt(D); not in T5.")
        logit_cap: float | None = setting(
            None, "A bound of the logits z, as cap * tanh(z / cap); None for no bound."
        )
        biases: bool = setting(False, "Whether a vector is added to each projection.")
        head_norm: NoHeadNorm.Params = setting(
            NoHeadNorm.Params(), "The norm of queries and of keys; norms.py."
        )
        positions: NoPositions.Params = setting(
            NoPositions.Params(), "What it knows of positions; positions.py."
        )
        dropout: DropoutLayer.Params = setting(
            DropoutLayer.Params(), "Dropout of the attention probabilities."
        )

    p: Params

    def __init__(self, params: Params, *args: Any) -> None:
        super().__init__(params, *args)
        m = self.p.dim
        n = self.p.num_heads
        d = self.p.head_dim

        kv = self._num_kv_heads
        check_cap(f"{self.path}: logit_cap", self.p.logit_cap)

        # One matrix for all heads each, as wide as the heads are together.
        heads = {"wq": n, "wk": kv, "wv": kv}
        for name, count in heads.items():
            weight = gaussian((m, count, d), "MND", fan_in=m, columns=2, use=Use.FACTOR)
            self.CreateVariable(name, weight)
        wo = gaussian((n, d, m), "NDM", fan_in=n * d, rows=2, use=Use.FACTOR)
        self.CreateVariable("wo", wo)

        if self.p.biases:
            for name, count in heads.items():
                self.CreateVariable(f"{name}_bias", constant((count, d), "ND", 0.0))
            self.CreateVariable("wo_bias", constant((m,), "M", 0.0))

        head_norm = self.p.head_norm.Copy().Set(head_dim=d)
        self.CreateChild("query_norm", head_norm.Copy().Set(num_heads=n))
        self.CreateChild("key_norm", head_norm.Copy().Set(num_heads=kv))

        # A scheme of positions may have a weight for each head.
        self.CreateChild("positions", self.p.positions.Copy().Set(num_heads=n))
        self.CreateChild("dropout", self.p.dropout)

    @property
    def _num_kv_heads(self) -> int:
        """The heads of keys and values; ValueError unless each is for as many of the queries'."""
        heads = self.p.num_heads
        kv_heads = heads if self.p.num_kv_heads is None else self.p.num_kv_heads
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(
                f"{self.path}: num_kv_heads must be a divisor of num_heads {heads}, got {kv_heads}."
            )
        return kv_heads

    def Project(
        self,
        theta: NestedMap,
        x: tf.Tensor,
        context: Context,
        positions: tf.Tensor | None = None,
    ) -> KeysValues:
        """Projects x [B, T, M], at int32 positions [B, T], to its keys and values."""
        project = functools.partial(context.numerics.project, "BTM,MND->BTND", x, theta)
        keys_BTND = self.key_norm.FProp(theta.key_norm, project("wk"))
        keys_BNTD = self.positions.Rotated(_swap_heads_and_tokens(keys_BTND), positions)
        keys_BNTD = self.annotate(keys_BNTD, "BNTD")
        values_BNTD = _swap_heads_and_tokens(project("wv"))
        return KeysValues(keys_BNTD, self.annotate(values_BNTD, "BNTD"), positions)

    def FProp(
        self,
        theta: NestedMap,
        x: tf.Tensor,
        memory: KeysValues,
        mask: tf.Tensor,
        context: Context,
        positions: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Attends from x [B, L, M] to a memory of T tokens, from Project; returns [B, L, M].

        `mask` is float32 [B, L, T], 1 where the query may attend to the key, else 0. A query that
        may attend to no key gets the mean of all values. `positions` of x are int32 [B, L].
        """
        # softmax(Q K^T / sqrt(D)), in the dtype of x for the product that follows.
        weights_BNLT = self.Weights(theta, x, memory, mask, context, positions)
        weights_BNLT = tf.cast(weights_BNLT, x.dtype)
        weights_BNLT = self.dropout.FProp(theta.dropout, weights_BNLT, "BNLT", context)

        # Each query's mean of the values, by head.
        weights_BNLT = self._grouped(weights_BNLT, "BNLT")
        mixed_BNLD = context.einsum("BNLT,BNTD->BNLD", weights_BNLT, memory.values)
        mixed_BNLD = self._ungrouped(mixed_BNLD, "BNLD")
        mixed_BLND = self.annotate(_swap_heads_and_tokens(mixed_BNLD), "BLND")

        # The sum over all heads and their elements, back to the model dimension.
        y_BLM = context.numerics.project("BLND,NDM->BLM", mixed_BLND, theta, "wo")
        return self.annotate(y_BLM, "BLM")

    def Weights(
        self,
        theta: NestedMap,
        x: tf.Tensor,
        memory: KeysValues,
        mask: tf.Tensor,
        context: Context,
        positions: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Returns the attention probabilities before dropout, float32 [B, N, L, T]."""
        # The queries. They are scaled, not the logits, since they are fewer.
        q_BLND = context.numerics.project("BLM,MND->BLND", x, theta, "wq")
        q_BLND = self.query_norm.FProp(theta.query_norm, q_BLND)
        q_BNLD = _swap_heads_and_tokens(q_BLND)
        q_BNLD = self.annotate(self.positions.Rotated(q_BNLD, positions), "BNLD")
        if self.p.scaled:
            q_BNLD *= self.p.head_dim**-0.5

        # A logit for each query and key. Softmax is float32, whatever the dtype of x is.
        q_BNLD = self._grouped(q_BNLD, "BNLD")
        logits_BNLT = context.einsum("BNLD,BNTD->BNLT", q_BNLD, memory.keys)
        logits_BNLT = tf.cast(self._ungrouped(logits_BNLT, "BNLT"), tf.float32)
        logits_BNLT = capped(logits_BNLT, self.p.logit_cap)
        bias_BNLT = self.positions.Bias(theta.positions, positions, memory.positions)
        if bias_BNLT is not None:
            logits_BNLT += bias_BNLT
        logits_BNLT += (1.0 - mask[:, None]) * _MASKED_LOGIT
        return tf.nn.softmax(logits_BNLT)

    def _grouped(self, x: tf.Tensor, dims: str) -> tf.Tensor:
        """Returns x [B, N, L, ...] by the heads of keys and values.

        Queries of all heads that share a head of keys and values follow one another along L, so
        that a product reads each key and value once for all of them.
        """
        batch, heads, length, last = x.shape
        kv_heads = self._num_kv_heads
        if kv_heads == heads:  # Each has its own.
            return x
        x = tf.reshape(x, [batch, kv_heads, heads // kv_heads * length, last])
        return self.annotate(x, dims)

    def _ungrouped(self, x: tf.Tensor, dims: str) -> tf.Tensor:
        """Returns x, by the heads of keys and values, as [B, N, L, ...] again."""
        batch, kv_heads, _, last = x.shape
        if kv_heads == self.p.num_heads:
            return x
        return self.annotate(tf.reshape(x, [batch, self.p.num_heads, -1, last]), dims)


def _swap_heads_and_tokens(x: tf.Tensor) -> tf.Tensor:
    """Transposes [B, L, N, D] to [B, N, L, D], and back."""
    return tf.transpose(x, [0, 2, 1, 3])


def segment_mask(queries: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
    """Returns float32 [B, L, T]: 1 where the segment ids [B, L] and [B, T] are equal, else 0."""
    return tf.cast(queries[:, :, None] == keys[:, None, :], tf.float32)


def causal_mask(length: int) -> tf.Tensor:
    """Returns float32 [1, L, L]: 1 where the key is not after the query, else 0."""
    index = tf.range(length)
    return tf.cast(index[None, :, None] >= index[None, None, :], tf.float32)
