"""The position-wise Mixture-of-Experts layer: Algorithm 2.

B batch, L length, G groups, S tokens of a group, E experts, C capacity, M model, H hidden.
"""

from __future__ import annotations

import dataclasses
import math

from lingvo_gshard.core.base_layer import BaseLayer, gaussian
from lingvo_gshard.core.hyperparams import REQUIRED, InstantiableParams, Params
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import gating
from lingvo_gshard.layers.context import Context, Mode, computed
from lingvo_gshard.layers.dispatch import Dispatch, IndexedDispatcher, OneHotDispatcher
from lingvo_gshard.layers.dropout import DropoutLayer
from lingvo_gshard.layers.gating import Capacity, CapacityBy, Gating, Routing, SecondExpert
from lingvo_gshard.layers.products import FLOAT32
from lingvo_gshard.layers.ragged_experts import moves_less, ragged_experts
from lingvo_gshard.layers.random import random_uniform


class MoELayer(BaseLayer):
    """Sends each token through at most two of E feed-forward experts and combines their outputs.

    Tensors are split by group, by expert, and by group again; each change is an all-to-all.
    """

    hidden_dropout: DropoutLayer

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("dim", REQUIRED, "M, the model dimension.")
        p.Define("hidden_dim", REQUIRED, "H, the hidden dimension of an expert.")
        dropout = DropoutLayer.Params().Set(rate=0.0)
        p.Define("hidden_dropout", dropout, "Dropout within the experts, after the ReLU.")
        p.Define("num_experts", REQUIRED, "E, the number of experts.")
        p.Define("group_size", None, "S, tokens of a group; None for the default.", optional=int)
        p.Define("train_capacity", Capacity.Params(), "C when training.")
        eval_capacity = Capacity.Params().Set(by=CapacityBy.TOKENS)
        p.Define("eval_capacity", eval_capacity, "C otherwise. By default no token is dropped.")
        p.Define("second_expert", SecondExpert.RANDOM, "Which tokens ask for their second expert.")
        p.Define("dispatch", Dispatch.EINSUM, "How tokens reach the buffers of their experts.")
        return p

    def __init__(self, params: InstantiableParams, *args) -> None:
        super().__init__(params, *args)
        m, h, e = self.p.dim, self.p.hidden_dim, self.p.num_experts
        self.CreateChild("hidden_dropout", self.p.hidden_dropout)
        # `_`, not E: the gate is replicated, although experts are split (section 3.2).
        self.CreateVariable("wg", gaussian((m, e), "M_", fan_in=m))
        self.CreateVariable("wi", gaussian((e, m, h), "EMH", fan_in=m))
        self.CreateVariable("wo", gaussian((e, h, m), "EHM", fan_in=h))

    def FProp(
        self, theta: NestedMap, x: tf.Tensor, valid_mask: tf.Tensor, context: Context
    ) -> tuple[tf.Tensor, Routing]:
        """Routes x [B, L, M] through the experts, in its dtype; the router computes in float32.

        `valid_mask` is float32 [B, L], 1 for a token, 0 for padding. The result, [B, L, M], is zero
        where a token overflowed. Raises ValueError if the group size does not divide the batch's
        tokens, or the partitions do not divide the number of groups that GATHER trains on.
        """
        batch, length, _ = x.shape
        count = self._num_groups(batch, length, context.mode)
        x_GSM = self.annotate(tf.reshape(x, [count, -1, self.p.dim]), "GSM")
        valid_GS = self.annotate(tf.reshape(valid_mask, [count, -1]), "GS")
        p = self.p.train_capacity if context.training else self.p.eval_capacity
        capacity = p.Instantiate().places(x_GSM.shape[1], self.p.num_experts)
        with tf.name_scope("gate"):
            # In float32, because in 16 bits many logits would tie.
            logits_GSE = FLOAT32.project(tf.cast(x_GSM, tf.float32), theta.wg)
            logits_GSE = self.annotate(logits_GSE, "GSE")
            second_above = self._second_above(valid_GS, context)
            counted = self.p.second_expert is SecondExpert.COUNTED
            gates = gating.top2_gating(
                logits_GSE, valid_GS, capacity, second_above=second_above, all_counted=counted
            )
        if not context.training and capacity == x_GSM.shape[1]:  # Nothing can overflow.
            y_GSM = self._exact(theta, x_GSM, gates, context)
        else:
            y_GSM = self._dispatched(theta, x_GSM, gates, capacity, context)
        # This is a metric, which every device must hold in full.
        load_E = self.annotate(gates.routing.load_E, "_")
        routing = dataclasses.replace(gates.routing, load_E=load_E)
        return self.annotate(tf.reshape(y_GSM, x.shape), "BLM"), routing

    def _num_groups(self, batch: int, length: int, mode: Mode) -> int:
        """G for a batch [B, L], which may be one step of decoding."""
        if mode is not Mode.PREDICT:
            return num_groups(self.p, f"{self.path}: group_size", batch, length)
        if self.p.eval_capacity.by is not CapacityBy.TOKENS:
            return batch  # So that no example takes the places of another.
        parts = math.gcd(batch, *self._annotator.factor("G"))
        tokens = batch * length
        return tokens // default_group_size(self.p, tokens // parts)

    def _exact(
        self, theta: NestedMap, x_GSM: tf.Tensor, gates: Gating, context: Context
    ) -> tf.Tensor:
        """The outputs of all tokens, as if C were S, in whichever way moves less; [G, S, M]."""
        num_groups, size, _ = x_GSM.shape
        capacity = self.p.eval_capacity.Instantiate().even_places(size, self.p.num_experts)
        buffer_rows = self.p.num_experts * num_groups * capacity
        if not moves_less(num_groups * size, buffer_rows, self._annotator):
            return self._in_rounds(theta, x_GSM, gates, capacity, context)
        with tf.name_scope("experts"):
            return ragged_experts(
                x_GSM, gates, theta.wi, theta.wo, self._annotator, context.arithmetic
            )

    def _in_rounds(
        self, theta: NestedMap, x_GSM: tf.Tensor, gates: Gating, capacity: int, context: Context
    ) -> tf.Tensor:
        """Dispatches the next C positions of every buffer in each round; [G, S, M].

        The fullest buffer decides how many; memory does not grow with the number of partitions.
        """
        occupied = gates.occupied()
        context = dataclasses.replace(context, product=computed)  # No gradient needs a record.

        def next_round(first: tf.Tensor, y_GSM: tf.Tensor) -> list[tf.Tensor]:
            now = gates.window(first, capacity)
            y_GSM += self._dispatched(theta, x_GSM, now, capacity, context)
            return [first + capacity, self.annotate(y_GSM, "GSM")]

        start = [tf.constant(0), self.annotate(tf.zeros_like(x_GSM), "GSM")]
        return tf.while_loop(lambda first, _: first < occupied, next_round, start)[1]

    def _dispatched(
        self, theta: NestedMap, x_GSM: tf.Tensor, gates: Gating, capacity: int, context: Context
    ) -> tf.Tensor:
        """Algorithm 2: dispatches the tokens, applies the experts and combines; [G, S, M]."""
        (count, *_), (ways,) = x_GSM.shape, self._annotator.factor("G")
        is_even = count % ways == 0  # Otherwise an evaluation dispatches by EINSUM.
        if self.p.dispatch is Dispatch.GATHER and context.training and not is_even:
            raise ValueError(
                f"{self.path}: dispatch GATHER needs the same number of groups on each of {ways} "
                f"partitions, got {count} groups in all; choose a smaller group_size, a larger "
                "batch, or EINSUM."
            )
        dispatcher: IndexedDispatcher | OneHotDispatcher
        with tf.name_scope("gate"):
            if self.p.dispatch is Dispatch.GATHER and is_even:
                dispatcher = IndexedDispatcher(gates, capacity, self._annotator)
            else:
                dispatcher = OneHotDispatcher(gates, capacity, self._annotator, context.arithmetic)
        inputs_EGCM = context.product("EGCM", dispatcher.dispatch, x_GSM)
        inputs_EGCM = self.annotate(inputs_EGCM, "EGCM")
        outputs_GECM = self._experts(theta, inputs_EGCM, context)
        return self.annotate(dispatcher.combine(outputs_GECM), "GSM")

    def _second_above(self, valid_GS: tf.Tensor, context: Context) -> tf.Tensor | float:
        """What g2 must exceed for a token to ask for its second expert; see top2_gating."""
        if self.p.second_expert is SecondExpert.ALL or not context.training:
            return gating.ALWAYS
        uniform_GS = random_uniform(tuple(valid_GS.shape), context.seed_for(self.path))
        return self.annotate(0.5 * uniform_GS, "GS")

    def _experts(self, theta: NestedMap, inputs_EGCM: tf.Tensor, context: Context) -> tf.Tensor:
        """Applies the experts to [E, G, C, M]; returns their outputs by group, [G, E, C, M]."""
        multiply = context.arithmetic.matmul_weight
        with tf.name_scope("experts"):
            # R = G * C rows of an expert: a single dim to contract in the gradients; see `project`.
            inputs_ERM = tf.reshape(inputs_EGCM, [self.p.num_experts, -1, self.p.dim])
            hidden_ERH = tf.nn.relu(context.product("EGH", multiply, inputs_ERM, theta.wi))
            hidden_ERH = self.annotate(hidden_ERH, "EGH")
            dropout = self.hidden_dropout
            hidden_ERH = dropout.FProp(theta.hidden_dropout, hidden_ERH, "EGH", context)

        def outputs(hidden_ERH: tf.Tensor, wo_EHM: tf.Tensor) -> tf.Tensor:
            with tf.name_scope("experts"):
                outputs_EGCM = tf.reshape(multiply(hidden_ERH, wo_EHM), inputs_EGCM.shape)
                # Without this annotation the partitioner may split the product over groups and
                # gather the weights, which costs less where experts are few.
                outputs_EGCM = self.annotate(outputs_EGCM, "EGCM")
            with tf.name_scope("combine"):
                return self.annotate(tf.transpose(outputs_EGCM, [1, 0, 2, 3]), "GECM")

        return context.product("GECM", outputs, hidden_ERH, theta.wo)


def group_size(p: Params, tokens: int) -> int:
    """S for a batch of `tokens` tokens with padding: p.group_size if set, or a default."""
    return default_group_size(p, tokens) if p.group_size is None else p.group_size


def default_group_size(p: Params, tokens: int) -> int:
    """S for `tokens` tokens, a divisor of them, so that dispatch costs little.

    Per token, dispatch and combine by einsum take 4 * E * C * M flops, and the experts take
    (E * C / S) * 4 * M * H: the former are S / H of the latter. So the default is the largest
    divisor of `tokens` that is at most H / 10. With so many experts that C would be below 1, and
    be rounded up, the default is the largest divisor that is at most E / factor.
    """
    factor = p.train_capacity.Instantiate().p.factor
    most = max(1.0, p.hidden_dim / 10, p.num_experts / factor)
    return max(size for size in range(1, min(tokens, int(most)) + 1) if tokens % size == 0)


def num_groups(p: Params, name: str, batch: int, length: int) -> int:
    """G for a batch [B, L]. Raises ValueError if S, called `name`, does not divide its tokens."""
    tokens = batch * length
    if tokens < 1:
        raise ValueError(f"{name}: a batch of {batch} rows of {length} tokens has no groups.")
    size = group_size(p, tokens)
    if size < 1 or tokens % size:
        raise ValueError(
            f"{name} {size} does not divide the batch's {tokens} tokens "
            f"({batch} x {length}); choose a divisor."
        )
    return tokens // size
