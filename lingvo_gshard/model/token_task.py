"""The common parts of tasks that predict tokens: settings, arithmetic, and the softmax.

B batch, L length, M model, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from lingvo_gshard.core.hyperparams import REQUIRED, setting
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.dropout import DropoutLayer
from lingvo_gshard.layers.numerics import Numerics
from lingvo_gshard.layers.vocabulary import capped, check_cap
from lingvo_gshard.layers.weight import Weight
from lingvo_gshard.model import token_loss
from lingvo_gshard.model.spec import MetricSums
from lingvo_gshard.model.task import Task

_ACTIVATION_DTYPES = ("float32", "bfloat16")
_PRODUCT_DTYPES = (*_ACTIVATION_DTYPES, "auto")


class TokenTask(Task):
    """Predicts packed sequences of tokens. A token attends only to its own example."""

    MODES = frozenset(Mode)
    UNIT = "target token"
    DIMS = "BLTGSMECHNDVRU"

    class Params(Task.Params):
        dim: int = setting(REQUIRED, "M, the model dimension.")
        input_dropout: DropoutLayer.Params = setting(
            DropoutLayer.Params(), "Dropout of the embeddings."
        )

        # The loss.
        label_smoothing: float = setting(
            0.0, "The target's probability mass spread over all pieces."
        )
        aux_loss_weight: float = setting(
            REQUIRED, "k / E^2, where k is the weight of a layer's l_aux."
        )

        z_loss_weight: float = setting(0.0, "The weight of the softmax's z-loss; 1e-4 in Lingvo.")
        logit_cap: float | None = setting(
            None, "A bound of the softmax's logits z, as cap * tanh(z / cap); None for no bound."
        )

        # The arithmetic.
        activation_dtype: str = setting("float32", "Or bfloat16. Weights and router stay float32.")
        product_dtype: str = setting(
            "float32",
            "What products round float32 factors to; auto: bfloat16 in runs on CPUs fast at it.",
        )

    p: Params

    def __init__(self, params: Params, *args: Any) -> None:
        super().__init__(params, *args)
        p = self.p
        _check_dtype("activation_dtype", p.activation_dtype, _ACTIVATION_DTYPES)
        _check_dtype("product_dtype", p.product_dtype, _PRODUCT_DTYPES)
        if not 0 <= p.label_smoothing < 1:
            raise ValueError(f"task.label_smoothing must be in [0, 1), got {p.label_smoothing}.")
        if p.z_loss_weight < 0:
            raise ValueError(f"task.z_loss_weight must be 0 or more, got {p.z_loss_weight}.")
        check_cap("task.logit_cap", p.logit_cap)

        # PREDICT chooses groups that divide the batch, so any number and length of rows works.
        decoding = Numerics(p.product_dtype, is_decoding=True)
        self._decoding_context = Context(Mode.PREDICT, numerics=decoding)

    @classmethod
    def ProductDtype(cls, p: Params) -> str:
        return "bfloat16" if "bfloat16" in (p.product_dtype, p.activation_dtype) else "float32"

    def Metrics(self, terms: NestedMap) -> NestedMap:
        return token_loss.metrics(terms)

    def EvalMetrics(self, metrics: NestedMap) -> MetricSums:
        return token_loss.eval_metrics(metrics)

    def _softmax(self, theta: NestedMap) -> Weight:
        """Returns the softmax's weights, [M, V]."""
        return Weight.of(theta.softmax)

    def _with_numerics(self, context: Context) -> Context:
        """Returns the context with the settings' dtype of products."""
        numerics = dataclasses.replace(context.numerics, dtype=self.p.product_dtype)
        return dataclasses.replace(context, numerics=numerics)

    def _logits(self, theta: NestedMap, x: tf.Tensor, context: Context) -> tf.Tensor:
        """Returns float32 [B, L, V] of x [B, L, M]."""
        with tf.name_scope("softmax"):
            logits_ULV = context.einsum("ULM,MV->ULV", x, self._softmax(theta), wide=True)
            logits_ULV *= self._logit_scale
        return capped(self.annotate(logits_ULV, "ULV"), self.p.logit_cap)

    @property
    def _logit_scale(self) -> float:
        """What the products of the softmax's weights are multiplied by."""
        return 1.0


def known_size(setting: str, size: int | None) -> int:
    """Returns a vocabulary's size. Raises ValueError if it is None, as it is without any data."""
    if size is None:
        raise ValueError(f"task.{setting}: set the number of pieces, or give the data: --data_dir.")
    return size


def _check_dtype(setting: str, dtype: str, allowed: Sequence[str]) -> None:
    if dtype not in allowed:
        raise ValueError(f"task.{setting} must be {' or '.join(allowed)}, got {dtype!r}.")
