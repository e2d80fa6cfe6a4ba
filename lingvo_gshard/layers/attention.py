"""Multi-head attention. The softmax is float32; everything else has the input's dtype.

B batch, L queries, T keys, M model, N heads, D head size.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from lingvo_gshard.core.base_layer import BaseLayer, Use, constant, gaussian
from lingvo_gshard.core.hyperparams import REQUIRED, InstantiableParams
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.dropout import DropoutLayer
from lingvo_gshard.layers.positions import NoPositions
from lingvo_gshard.layers.products import FLOAT32, Arithmetic, Rounded, with_bias

# Makes a masked key's probability exactly 0, yet is well within float32's range.
_MASKED_LOGIT = -1e9


@dataclasses.dataclass(frozen=True)
class KeysValues:
    """Projected keys and values, each [B, N, T, D].

    The heads come before the tokens because that is the layout that the matrix products need. In
    any other layout the compiler would transpose most operands, and again for the gradients.
    """

    keys: tf.Tensor
    values: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Positions:
    """The positions of queries [B, L] and keys [B, T], int32; None where no scheme reads them."""

    queries: tf.Tensor | None = None
    keys: tf.Tensor | None = None


_UNKNOWN = Positions()


class MultiHeadAttention(BaseLayer):
    """Scaled dot-product attention: split over the batch, with replicated weights (section 3.2)."""

    dropout: DropoutLayer
    positions: NoPositions

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("dim", REQUIRED, "M, the model dimension.")
        p.Define("num_heads", REQUIRED, "N, the number of heads.")
        p.Define("head_dim", REQUIRED, "D, the size of a head.")
        p.Define("scaled", True, "Whether products are divided by sqrt(D); not in T5.")
        p.Define("biases", False, "Whether a vector is added to each projection.")
        p.Define("positions", NoPositions.Params(), "What it knows of positions; positions.py.")
        p.Define("dropout", DropoutLayer.Params(), "Dropout of the attention probabilities.")
        kept = "Whether remat ALL_BUT_PRODUCTS also keeps the queries, keys and values."
        p.Define("keeps_projected", False, kept)
        return p

    def __init__(self, params: InstantiableParams, *args: Any) -> None:
        super().__init__(params, *args)
        m = self.p.dim
        n = self.p.num_heads
        d = self.p.head_dim

        for name in ("wq", "wk", "wv"):
            weight = gaussian((m, n, d), "MND", fan_in=m, columns=2, use=Use.FACTOR)
            self.CreateVariable(name, weight)
        wo = gaussian((n, d, m), "NDM", fan_in=n * d, rows=2, use=Use.FACTOR)
        self.CreateVariable("wo", wo)

        if self.p.biases:
            for name in ("wq", "wk", "wv"):
                self.CreateVariable(f"{name}_bias", constant((n, d), "ND", 0.0))
            self.CreateVariable("wo_bias", constant((m,), "M", 0.0))

        self.CreateChild("positions", self.p.positions.Copy().Set(num_heads=n))
        self.CreateChild("dropout", self.p.dropout)

    def Project(
        self, theta: NestedMap, x: tf.Tensor, context: Context, positions: Positions = _UNKNOWN
    ) -> KeysValues:
        """Projects x [B, T, M] to its keys and values."""

        def project(name: str) -> tf.Tensor:
            x_BTND = self._projected("BTM,MND->BTND", x, theta[name], context)
            return _swap_heads_and_tokens(with_bias(x_BTND, theta, name))

        keys_BNTD = self.positions.Rotated(project("wk"), positions.keys)
        keys_BNTD = self.annotate(keys_BNTD, "BNTD")
        return KeysValues(keys_BNTD, self.annotate(project("wv"), "BNTD"))

    def FProp(
        self,
        theta: NestedMap,
        x: tf.Tensor,
        memory: KeysValues,
        mask: tf.Tensor,
        context: Context,
        positions: Positions = _UNKNOWN,
    ) -> tf.Tensor:
        """Attends from x [B, L, M] to a memory of T tokens, from Project; returns [B, L, M].

        `mask` is float32 [B, L, T], 1 where the query may attend to the key, else 0. A query that
        may attend to no key gets the mean of all values.
        """
        weights_BNLT = self.Weights(theta, x, memory, mask, context, positions)
        weights_BNLT = tf.cast(weights_BNLT, x.dtype)
        weights_BNLT = self.dropout.FProp(theta.dropout, weights_BNLT, "BNLT", context)

        # Each query's mean of the values, by head.
        mixed_BNLD = _activation_arithmetic(context).einsum(
            "BNLT,BNTD->BNLD",
            weights_BNLT,
            memory.values,
            name="mixed",
            rounded=Rounded.RESULT | Rounded.RIGHT,
        )
        mixed_BLND = self.annotate(_swap_heads_and_tokens(mixed_BNLD), "BLND")

        y_BLM = context.einsum("BLND,NDM->BLM", mixed_BLND, theta.wo, rounded=Rounded.LEFT)
        y_BLM = with_bias(y_BLM, theta, "wo")
        return self.annotate(y_BLM, "BLM")

    def Weights(
        self,
        theta: NestedMap,
        x: tf.Tensor,
        memory: KeysValues,
        mask: tf.Tensor,
        context: Context,
        positions: Positions = _UNKNOWN,
    ) -> tf.Tensor:
        """Returns the attention probabilities before dropout, float32 [B, N, L, T]."""
        q_BLND = self._projected("BLM,MND->BLND", x, theta.wq, context)
        q_BNLD = _swap_heads_and_tokens(with_bias(q_BLND, theta, "wq"))
        q_BNLD = self.annotate(self.positions.Rotated(q_BNLD, positions.queries), "BNLD")
        if self.p.scaled:
            q_BNLD *= self.p.head_dim**-0.5

        logits_BNLT = _activation_arithmetic(context).einsum(
            "BNLD,BNTD->BNLT",
            q_BNLD,
            memory.keys,
            name="logits",
            rounded=Rounded.LEFT | Rounded.RIGHT,
        )
        logits_BNLT = tf.cast(logits_BNLT, tf.float32)
        bias_BNLT = self.positions.Bias(theta.positions, positions.queries, positions.keys)
        if bias_BNLT is not None:
            logits_BNLT += bias_BNLT
        logits_BNLT += (1.0 - mask[:, None]) * _MASKED_LOGIT
        return tf.nn.softmax(logits_BNLT)

    def _projected(
        self, equation: str, x: tf.Tensor, weight: tf.Tensor, context: Context
    ) -> tf.Tensor:
        """Returns the product of x and a weight, which is recorded if the experiment wants it."""
        project = context.einsum if self.p.keeps_projected else context.arithmetic.project
        return project(equation, x, weight, rounded=_if_rounded_later(Rounded.RESULT, context))


def _activation_arithmetic(context: Context) -> Arithmetic:
    """Returns the arithmetic of products of queries, keys and values."""
    # A step of decoding has few queries: rounding the cache would take longer than its products.
    return FLOAT32 if context.mode is Mode.PREDICT else context.arithmetic


def _if_rounded_later(rounded: Rounded, context: Context) -> Rounded:
    """Returns `rounded` if the arithmetic of queries, keys and values rounds them."""
    return rounded if _activation_arithmetic(context) is context.arithmetic else Rounded.NOTHING


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
