"""The dense feed-forward layer. B batch, L length, M model, H hidden."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from lingvo_gshard.core.base_layer import BaseLayer, Use, constant, gaussian
from lingvo_gshard.core.hyperparams import REQUIRED, setting
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.activations import Activation, hidden_units
from lingvo_gshard.layers.context import Context
from lingvo_gshard.layers.dropout import DropoutLayer


class FeedForwardLayer(BaseLayer):
    """wo · relu(wi · x): equation (2) of the paper with a single expert.

    Other models have another activation, a gate, or biases.
    """

    hidden_dropout: DropoutLayer

    class Params(BaseLayer.Params):
        dim: int = setting(REQUIRED, "M, the model dimension.")
        hidden_dim: int = setting(REQUIRED, "H, the hidden dimension.")
        activation: Activation = setting(Activation.RELU, "The activation of the hidden units.")
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
        self.CreateChild("hidden_dropout", self.p.hidden_dropout)
        create_weights(self, self.p)

    def FProp(self, theta: NestedMap, x: tf.Tensor, context: Context) -> tf.Tensor:
        """Maps x [B, L, M] to [B, L, M], computed in the dtype of x."""
        # The hidden units, which tensor parallelism splits by H.
        project = functools.partial(context.numerics.project, "BLM,MH->BLH", x, theta)
        h_BLH = hidden_units(self.p.activation, self.p.gated, project)
        h_BLH = self.annotate(h_BLH, "BLH")
        h_BLH = self.hidden_dropout.FProp(theta.hidden_dropout, h_BLH, "BLH", context)

        # If H is split, this is a sum over partitions: an all-reduce.
        y_BLM = context.numerics.project("BLH,HM->BLM", h_BLH, theta, "wo")
        return self.annotate(y_BLM, "BLM")


def create_weights(
    layer: BaseLayer,
    p: FeedForwardLayer.Params,
    num_experts: int | None = None,
    share_used: float = 1.0,
) -> None:
    """Declares wi, wo and, by the settings, wi_gate and the bias of each.

    With `num_experts`, E, each expert has its own, and a token uses `share_used` of them. A bias is
    then a row for each expert, [E, 1, ...], which is added to all of its rows.
    """
    matrices = {"wi": (p.dim, p.hidden_dim, "MH"), "wo": (p.hidden_dim, p.dim, "HM")}
    if p.gated:
        matrices["wi_gate"] = matrices["wi"]

    for name, (rows, columns, dims) in matrices.items():
        weight = gaussian((rows, columns), dims, fan_in=rows, share_used=share_used, use=Use.FACTOR)
        bias = constant((columns,), dims[-1], 0.0, share_used=share_used)
        if num_experts is not None:
            weight = dataclasses.replace(
                weight, shape=(num_experts, rows, columns), dims=f"E{dims}"
            )
            bias = dataclasses.replace(bias, shape=(num_experts, 1, columns), dims=f"E_{dims[-1]}")

        layer.CreateVariable(name, weight)
        if p.biases:
            layer.CreateVariable(f"{name}_bias", bias)
