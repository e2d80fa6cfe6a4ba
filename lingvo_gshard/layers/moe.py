"""The position-wise Mixture-of-Experts layer: Algorithm 2.

B batch, L length, G groups, S tokens of a group, E experts, C capacity, M model, H hidden.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from lingvo_gshard.core import hyperparams
from lingvo_gshard.core.base_layer import BaseLayer, gaussian
from lingvo_gshard.core.hyperparams import REQUIRED, InstantiableParams
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import gating
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.gating import Gating, SecondExpert
from lingvo_gshard.layers.random import random_uniform


@dataclasses.dataclass(frozen=True)
class Routing:
    """How one layer routed its tokens; see Gating for the meaning of each."""

    aux_loss: tf.Tensor
    load_E: tf.Tensor
    overflow: tf.Tensor


class MoELayer(BaseLayer):
    """Dispatches each token to at most two of E feed-forward experts and combines what they say.

    Groups are split over the devices, then experts, then groups again: the partitioner makes
    each of the two changes an all-to-all.
    """

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("dim", REQUIRED, "M.")
        p.Define("hidden_dim", REQUIRED, "H.")
        p.Define("num_experts", REQUIRED, "E.")
        p.Define("group_size", REQUIRED, "S, tokens of a group, when training and evaluating.")
        p.Define("capacity_factor", 2.0, "C = factor * S / E when training (2 is the paper's).")
        p.Define("eval_capacity_factor", None, "The same otherwise; None drops no token.")
        p.Define("second_expert", SecondExpert.RANDOM, "When training; otherwise ALL.")
        return p

    def __init__(self, params: hyperparams.Params, *args) -> None:
        super().__init__(params, *args)
        m, h, e = self.p.dim, self.p.hidden_dim, self.p.num_experts
        # Its experts are not split: the gate is replicated (section 3.2).
        self.CreateVariable("wg", gaussian((m, e), "M_", fan_in=m))
        self.CreateVariable("wi", gaussian((e, m, h), "EMH", fan_in=m))
        self.CreateVariable("wo", gaussian((e, h, m), "EHM", fan_in=h))

    def FProp(
        self, theta: NestedMap, x: tf.Tensor, real: tf.Tensor, context: Context
    ) -> tuple[tf.Tensor, Routing]:
        """Routes a batch through the experts.

        Args:
          theta: the weights.
          x: [B, L, M]; the experts compute in its dtype, the router in float32.
          real: float32 [B, L], 1 for a token, 0 for padding.
          context: the mode, and the seed of the second expert's draw.

        Returns:
          [B, L, M], zero where a token overflowed, and how the tokens were routed.

        Raises:
          ValueError: the group size does not divide the batch's tokens.
        """
        num_groups = self._num_groups(x, context)
        x_GSM = self.annotate(tf.reshape(x, [num_groups, -1, self.p.dim]), "GSM")
        real_GS = self.annotate(tf.reshape(real, [num_groups, -1]), "GS")
        with tf.name_scope("gate"):
            gates = self._gate(theta, x_GSM, real_GS, context)
        y_GSM = self._experts(theta, x_GSM, gates.combine_GSEC)
        y = self.annotate(tf.reshape(y_GSM, x.shape), "BLM")
        load = self.annotate(gates.load_E, "_")  # A metric: every device shall have all of it.
        return y, Routing(gates.aux_loss, load, gates.overflow)

    def _num_groups(self, x: tf.Tensor, context: Context) -> int:
        batch, length, _ = x.shape
        if context.mode is Mode.DECODE:
            return batch  # The hypotheses of one example are a group.
        tokens, size = batch * length, self.p.group_size
        if tokens % size:
            raise ValueError(
                f"{self.path}: group_size {size} does not divide the batch's {tokens} tokens "
                f"({batch} x {length}); choose a divisor."
            )
        return tokens // size

    def _gate(
        self, theta: NestedMap, x_GSM: tf.Tensor, real_GS: tf.Tensor, context: Context
    ) -> Gating:
        p, uniform_GS = self.p, None
        # In 16 bits logits would tie.
        logits_GSE = tf.einsum("GSM,ME->GSE", tf.cast(x_GSM, tf.float32), theta.wg)
        logits_GSE = self.annotate(logits_GSE, "GSE")
        factor = p.capacity_factor if context.training else p.eval_capacity_factor
        if context.training and p.second_expert is SecondExpert.RANDOM:
            uniform_GS = random_uniform(tuple(real_GS.shape), context.seed_for(self.path))
            uniform_GS = self.annotate(uniform_GS, "GS")
        capacity = gating.capacity(factor, x_GSM.shape[1], p.num_experts)
        return gating.top2_gating(logits_GSE, real_GS, capacity, uniform_GS=uniform_GS)

    def _experts(self, theta: NestedMap, x_GSM: tf.Tensor, combine_GSEC: tf.Tensor) -> tf.Tensor:
        dtype = x_GSM.dtype
        wi, wo = tf.cast(theta.wi, dtype), tf.cast(theta.wo, dtype)
        combine_GSEC = self.annotate(combine_GSEC, "GSEC")
        dispatch_GSEC = tf.cast(combine_GSEC > 0.0, dtype)
        combine_GSEC = tf.cast(combine_GSEC, dtype)
        inputs_EGCM = tf.einsum("GSEC,GSM->EGCM", dispatch_GSEC, x_GSM, name="dispatch")
        inputs_EGCM = self.annotate(inputs_EGCM, "EGCM")
        hidden_EGCH = tf.nn.relu(tf.einsum("EGCM,EMH->EGCH", inputs_EGCM, wi))
        hidden_EGCH = self.annotate(hidden_EGCH, "EGCH")
        outputs_GECM = self.annotate(tf.einsum("EGCH,EHM->GECM", hidden_EGCH, wo), "GECM")
        y_GSM = tf.einsum("GSEC,GECM->GSM", combine_GSEC, outputs_GECM, name="combine")
        return self.annotate(y_GSM, "GSM")
