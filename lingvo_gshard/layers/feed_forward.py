"""The dense feed-forward layer. B batch, L length, M model, H hidden."""

import tensorflow as tf

from lingvo_gshard.core import hyperparams
from lingvo_gshard.core.base_layer import BaseLayer, gaussian
from lingvo_gshard.core.hyperparams import REQUIRED, InstantiableParams
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context
from lingvo_gshard.layers.projection import project


class FeedForwardLayer(BaseLayer):
    """wo · relu(wi · x): equation (2) of the paper with a single expert."""

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("dim", REQUIRED, "M, the model dimension.")
        p.Define("hidden_dim", REQUIRED, "H, the hidden dimension.")
        return p

    def __init__(self, params: hyperparams.Params, *args) -> None:
        super().__init__(params, *args)
        m, h = self.p.dim, self.p.hidden_dim
        self.CreateVariable("wi", gaussian((m, h), "MH", fan_in=m))
        self.CreateVariable("wo", gaussian((h, m), "HM", fan_in=h))

    def FProp(self, theta: NestedMap, x: tf.Tensor, context: Context) -> tf.Tensor:
        """Maps x [B, L, M] to [B, L, M], computed in the dtype of x."""
        hidden = self.annotate(tf.nn.relu(context.product("BLH", project, x, theta.wi)), "BLH")
        return self.annotate(context.product("BLM", project, hidden, theta.wo), "BLM")
