"""The dense feed-forward layer. B batch, L length, M model, H hidden."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core.base_layer import BaseLayer, Use, constant, gaussian
from lingvo_gshard.core.hyperparams import REQUIRED, setting
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.activations import Activation, hidden_units
from lingvo_gshard.layers.context import Context
from lingvo_gshard.layers.dropout import DropoutLayer
from lingvo_gshard.layers.products import with_bias


class FeedForwardLayer(BaseLayer):
    """wo · relu(wi · x): equation (2) of the paper with a single expert.

    Other models have another activation, a gate, or biases.
    """

    hidden_dropout: DropoutLayer

    class Params(BaseLayer.Params):
        dim: int = setting(REQUIRED, "M, the model dimension.")
        hidden_dim: int = setting(REQUIRED, "H, the hidden dimension.")
        activation: Activation = setting(Activation.RELU, "Of the hidden units.")
        gated: bool = setting(
            False, "Whether a second product multiplies them: see activations.py."
        )
        biases: bool = setting(False, "Whether a vector is added to each product.")
        hidden_dropout: DropoutLayer.Params = setting(
            DropoutLayer.Params().Set(rate=0.0), "Dropout after the activation."
        )

    p: Params

    def __init__(self, params: Params, *args: Any) -> None:
        super().__init__(params, *args)
        m = self.p.dim
        h = self.p.hidden_dim
        self.CreateChild("hidden_dropout", self.p.hidden_dropout)
        wi = gaussian((m, h), "MH", fan_in=m, use=Use.FACTOR)
        self.CreateVariable("wi", wi)
        self.CreateVariable("wo", gaussian((h, m), "HM", fan_in=h, use=Use.FACTOR))
        if self.p.gated:
            self.CreateVariable("wi_gate", wi)

        if self.p.biases:
            self.CreateVariable("wi_bias", constant((h,), "H", 0.0))
            self.CreateVariable("wo_bias", constant((m,), "M", 0.0))
            if self.p.gated:
                self.CreateVariable("wi_gate_bias", constant((h,), "H", 0.0))

    def FProp(self, theta: NestedMap, x: tf.Tensor, context: Context) -> tf.Tensor:
        """Maps x [B, L, M] to [B, L, M], computed in the dtype of x."""

        # The hidden units, which tensor parallelism splits by H.
        def project(name: str) -> tf.Tensor:
            h_BLH = context.einsum("BLM,MH->BLH", x, theta[name])
            return with_bias(h_BLH, theta, name)

        h_BLH = hidden_units(self.p.activation, self.p.gated, project)
        h_BLH = self.annotate(h_BLH, "BLH")
        h_BLH = self.hidden_dropout.FProp(theta.hidden_dropout, h_BLH, "BLH", context)

        # If H is split, this is a sum over partitions: an all-reduce.
        y_BLM = context.einsum("BLH,HM->BLM", h_BLH, theta.wo)
        y_BLM = with_bias(y_BLM, theta, "wo")
        return self.annotate(y_BLM, "BLM")
