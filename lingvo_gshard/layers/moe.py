"""The position-wise Mixture-of-Experts layer: Algorithm 2.

B batch, L length, G groups, S tokens of a group, E experts, C capacity, M model, H hidden.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from lingvo_gshard.core import hyperparams
from lingvo_gshard.core.base_layer import BaseLayer, gaussian
from lingvo_gshard.core.hyperparams import REQUIRED, InstantiableParams, Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import gating
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.dispatch import Dispatch, make_dispatcher
from lingvo_gshard.layers.gating import Capacity, CapacityBy, Gating, Routing, SecondExpert
from lingvo_gshard.layers.projection import matmul, project
from lingvo_gshard.layers.ragged_experts import ragged_experts
from lingvo_gshard.layers.random import random_uniform


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
        p.Define(
            "group_size",
            None,
            "S, tokens of a group; None: as group_size() below says.",
            optional=int,
        )
        p.Define("train_capacity", Capacity.Params(), "C when training.")
        eval_capacity = Capacity.Params().Set(by=CapacityBy.TOKENS)
        p.Define("eval_capacity", eval_capacity, "C otherwise; by default drops no token.")
        p.Define("second_expert", SecondExpert.RANDOM, "When a token goes to it.")
        p.Define("second_threshold", 0.2, "Of THRESHOLD, which g2, at most 1/2, must exceed.")
        p.Define("dispatch", Dispatch.EINSUM, "How tokens reach experts of limited capacity.")
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
          ValueError: the group size does not divide the batch's tokens, or GATHER has groups that
            can't be dealt evenly to the partitions.
        """
        num_groups = self._num_groups(x, context)
        x_GSM = self.annotate(tf.reshape(x, [num_groups, -1, self.p.dim]), "GSM")
        real_GS = self.annotate(tf.reshape(real, [num_groups, -1]), "GS")
        capacity = self._capacity(x_GSM.shape[1], context)
        with tf.name_scope("gate"):
            gates = self._gate(theta, x_GSM, real_GS, capacity, context)
        if not context.training and capacity == x_GSM.shape[1]:  # Nothing can overflow.
            with tf.name_scope("experts"):
                y_GSM = ragged_experts(x_GSM, gates, theta.wi, theta.wo, self._annotator)
        else:
            y_GSM = self._dispatched(theta, x_GSM, gates, capacity, context)
        # A metric: every device shall have all of it.
        load_E = self.annotate(gates.routing.load_E, "_")
        routing = dataclasses.replace(gates.routing, load_E=load_E)
        return self.annotate(tf.reshape(y_GSM, x.shape), "BLM"), routing

    def _dispatched(
        self,
        theta: NestedMap,
        x_GSM: tf.Tensor,
        gates: Gating,
        capacity: int,
        context: Context,
    ) -> tf.Tensor:
        """Algorithm 2: to the experts' C places, through them, and back; [G, S, M]."""
        self._check_groups(x_GSM.shape[0])
        with tf.name_scope("gate"):
            dispatcher = make_dispatcher(
                self.p.dispatch, gates, self.p.num_experts, capacity, self._annotator
            )
        inputs_EGCM = context.product("EGCM", dispatcher.dispatch, x_GSM)
        inputs_EGCM = self.annotate(inputs_EGCM, "EGCM")
        outputs_GECM = self._experts(theta, inputs_EGCM, context)
        return self.annotate(dispatcher.combine(outputs_GECM), "GSM")

    def _num_groups(self, x: tf.Tensor, context: Context) -> int:
        batch, length, _ = x.shape
        if context.mode is Mode.DECODE:
            return batch  # The hypotheses of one example are a group.
        tokens = batch * length
        size = group_size(self.p, tokens)
        if tokens % size:
            raise ValueError(
                f"{self.path}: group_size {size} does not divide the batch's {tokens} tokens "
                f"({batch} x {length}); choose a divisor."
            )
        return tokens // size

    def _check_groups(self, num_groups: int) -> None:
        (ways,) = self._annotator.factor("G")
        if self.p.dispatch is Dispatch.GATHER and num_groups % ways:
            raise ValueError(
                f"{self.path}: dispatch GATHER moves each partition's own groups, and {num_groups} "
                f"groups can't be dealt to {ways} partitions; choose a smaller group_size, a "
                "larger batch, or EINSUM."
            )

    def _capacity(self, size: int, context: Context) -> int:
        p = self.p.train_capacity if context.training else self.p.eval_capacity
        return p.Instantiate().places(size, self.p.num_experts)

    def _gate(
        self,
        theta: NestedMap,
        x_GSM: tf.Tensor,
        real_GS: tf.Tensor,
        capacity: int,
        context: Context,
    ) -> Gating:
        # In 16 bits logits would tie.
        logits_GSE = project(tf.cast(x_GSM, tf.float32), theta.wg)
        logits_GSE = self.annotate(logits_GSE, "GSE")
        return gating.top2_gating(
            logits_GSE, real_GS, capacity, second_above=self._second_above(real_GS, context)
        )

    def _second_above(self, real_GS: tf.Tensor, context: Context) -> tf.Tensor | float:
        match self.p.second_expert:
            case SecondExpert.RANDOM if context.training:
                uniform_GS = random_uniform(tuple(real_GS.shape), context.seed_for(self.path))
                return self.annotate(0.5 * uniform_GS, "GS")
            case SecondExpert.THRESHOLD:
                return self.p.second_threshold
            case _:
                return gating.ALWAYS

    def _experts(self, theta: NestedMap, inputs_EGCM: tf.Tensor, context: Context) -> tf.Tensor:
        """[E, G, C, M] -> [G, E, C, M]: what the experts say, dealt back to the groups."""
        with tf.name_scope("experts"):
            # R = G * C rows of an expert: one dim to contract in the gradients; see `project`.
            inputs_ERM = tf.reshape(inputs_EGCM, [self.p.num_experts, -1, self.p.dim])
            hidden_ERH = tf.nn.relu(context.product("EGH", matmul, inputs_ERM, theta.wi))
            hidden_ERH = self.annotate(hidden_ERH, "EGH")

        def dealt(hidden_ERH: tf.Tensor, wo_EHM: tf.Tensor) -> tf.Tensor:
            with tf.name_scope("experts"):
                outputs_EGCM = tf.reshape(matmul(hidden_ERH, wo_EHM), inputs_EGCM.shape)
                # Still split over experts: over groups it would be cheaper to gather few
                # experts' weights.
                outputs_EGCM = self.annotate(outputs_EGCM, "EGCM")
            with tf.name_scope("combine"):
                return self.annotate(tf.transpose(outputs_EGCM, [1, 0, 2, 3]), "GECM")

        return context.product("GECM", dealt, hidden_ERH, theta.wo)


def group_size(p: Params, tokens: int) -> int:
    """S of a batch of so many tokens; p is MoELayer.Params(), whose own group_size goes first.

    Dispatch and combine by one-hot products take 4 * E * C * M flops a token together, the
    experts (E * C / S) * 4 * M * H: the one is S / H of the other. So the default is the largest
    divisor of the tokens that is at most H / 10. Where E is so large that such a group would give
    an expert less than one place, which the capacity rounds up, groups are of E / factor tokens.
    """
    if p.group_size is not None:
        return p.group_size
    most = max(1.0, p.hidden_dim / 10, p.num_experts / p.train_capacity.factor)
    return max(size for size in range(1, min(tokens, int(most)) + 1) if tokens % size == 0)
