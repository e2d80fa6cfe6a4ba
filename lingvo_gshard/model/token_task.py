"""What tasks that predict tokens share: settings, arithmetic, and the softmax.

B batch, L length, M model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lingvo_gshard.core import hyperparams
from lingvo_gshard.core.hyperparams import REQUIRED, InstantiableParams
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context, LayerReport, Mode
from lingvo_gshard.layers.dropout import DropoutLayer
from lingvo_gshard.layers.products import Arithmetic
from lingvo_gshard.layers.stored_weights import Weight
from lingvo_gshard.model import token_loss
from lingvo_gshard.model.spec import MetricSums
from lingvo_gshard.model.task import Task

_ACTIVATION_DTYPES = ("float32", "bfloat16")
_PRODUCT_DTYPES = (*_ACTIVATION_DTYPES, "auto")


class TokenTask(Task):
    """Predicts packed sequences of tokens. A token attends only to its own example."""

    MODES = frozenset(Mode)
    UNIT = "target token"

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("dim", REQUIRED, "M, the model dimension.")
        p.Define("input_dropout", DropoutLayer.Params(), "Dropout of the embeddings.")

        # The loss.
        p.Define("label_smoothing", 0.0, "The target's probability mass spread over all pieces.")
        p.Define("aux_loss_weight", REQUIRED, "k / E^2, where k is the weight of a layer's l_aux.")

        # The arithmetic.
        p.Define("activation_dtype", "float32", "Or bfloat16. Weights and router stay float32.")
        p.Define(
            "product_dtype",
            "float32",
            "What products round float32 factors to; auto: bfloat16 in runs on CPUs fast at it.",
        )
        return p

    def __init__(self, params: InstantiableParams, *args: Any) -> None:
        super().__init__(params, *args)
        p = self.p
        _check_dtype("activation_dtype", p.activation_dtype, _ACTIVATION_DTYPES)
        _check_dtype("product_dtype", p.product_dtype, _PRODUCT_DTYPES)
        if not 0 <= p.label_smoothing < 1:
            raise ValueError(f"task.label_smoothing must be in [0, 1), got {p.label_smoothing}.")
        self._arithmetic = Arithmetic(p.product_dtype)
        # PREDICT chooses groups that divide the batch: any number and length of rows will do.
        decoding = Arithmetic(p.product_dtype, has_gradients=False)
        self._decoding_context = Context(Mode.PREDICT, arithmetic=decoding)

    @classmethod
    def ProductDtype(cls, p: hyperparams.Params) -> str:
        return "bfloat16" if "bfloat16" in (p.product_dtype, p.activation_dtype) else "float32"

    def EvalMetrics(self, metrics: NestedMap) -> MetricSums:
        return token_loss.eval_metrics(metrics)

    def _token_loss(
        self,
        logits: tf.Tensor,
        labels: tf.Tensor,
        weights: tf.Tensor,
        reports: dict[str, LayerReport],
        context: Context,
    ) -> tuple[tf.Tensor, NestedMap]:
        """Returns L and its metrics by the task's settings; see token_loss."""
        return token_loss.token_loss(
            logits,
            labels,
            weights,
            reports,
            context,
            label_smoothing=self.p.label_smoothing,
            aux_loss_weight=self.p.aux_loss_weight,
        )

    def _softmax(self, theta: NestedMap) -> Weight:
        """Returns the softmax's weights, [M, V]."""
        softmax: Weight = theta.softmax
        return softmax

    def _logits(self, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Returns float32 [B, L, V] of x [B, L, M]."""
        with tf.name_scope("softmax"):
            # The sums of products of 16-bit activations stay float32.
            arithmetic = Arithmetic("bfloat16") if x.dtype == tf.bfloat16 else self._arithmetic
            logits = arithmetic.project("BLM,MV->BLV", tf.cast(x, tf.float32), self._softmax(theta))
        return self.annotate(logits, "ULV")


def _check_dtype(setting: str, dtype: str, allowed: Sequence[str]) -> None:
    if dtype not in allowed:
        raise ValueError(f"task.{setting} must be {' or '.join(allowed)}, got {dtype!r}.")
