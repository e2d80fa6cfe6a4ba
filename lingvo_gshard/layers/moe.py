"""The position-wise Mixture-of-Experts layer: Algorithm 2, as MoELayer.FProp.

B batch, L length, G groups, S tokens of a group, E experts, C capacity, M model, H hidden: the
letters of sharding/layout.py. A name's suffix gives its dims. `(GC)` in an equation is a single dim
of G * C elements, which is annotated by its first letter: the rows of an expert in all groups.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from lingvo_gshard.core.base_layer import BaseLayer, Use, constant, gaussian
from lingvo_gshard.core.hyperparams import REQUIRED, InstantiableParams, Params
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import slices
from lingvo_gshard.layers.activations import Activation, hidden_units
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.dispatch import Dispatch, IndexedDispatcher, OneHotDispatcher
from lingvo_gshard.layers.dropout import DropoutLayer
from lingvo_gshard.layers.expert_tiles import Experts
from lingvo_gshard.layers.feed_forward import FeedForwardLayer
from lingvo_gshard.layers.gating import Capacity, CapacityBy
from lingvo_gshard.layers.gating_layers import GatingLayer, Top2Gating
from lingvo_gshard.layers.moe_inference import without_overflow
from lingvo_gshard.layers.products import FLOAT32, Arithmetic, Rounded, with_bias
from lingvo_gshard.layers.routing import Gates, Routing
from lingvo_gshard.layers.stored_weights import Weight


class MoELayer(BaseLayer):
    """Sends each token through at most k of E feed-forward experts and combines their outputs.

    y_s = sum_e G_s,e * FFN_e(x_s), where FFN_e(x) = wo_e * relu(wi_e * x), and G_s,e are gates, of
    which at most k, 2 in the paper, are not 0 (equations 1 to 3).

    Tensors are split by group, by expert, and by group again; each change is an all-to-all.

    By default only training has a capacity. Otherwise a token could lose its experts to others of
    its batch, and a translation would depend on what it is batched with.
    """

    hidden_dropout: DropoutLayer
    output_dropout: DropoutLayer
    gate: GatingLayer
    shared: FeedForwardLayer

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        # The experts.
        p.Define("dim", REQUIRED, "M, the model dimension.")
        p.Define("hidden_dim", REQUIRED, "H, the hidden dimension of an expert.")
        p.Define("activation", Activation.RELU, "Of an expert's hidden units.")
        p.Define("gated", False, "Whether a second product multiplies them: see activations.py.")
        p.Define("biases", False, "Whether a vector is added to each product of an expert.")
        dropout = DropoutLayer.Params().Set(rate=0.0)
        p.Define("hidden_dropout", dropout, "Dropout within the experts, after the activation.")
        # NLLB's expert output masking (2022, arXiv:2207.04672).
        whole = "Dropout of experts' whole outputs: a choice's gate is zeroed, or scaled up."
        p.Define("output_dropout", dropout.Copy(), whole)
        p.Define("num_experts", REQUIRED, "E, the number of experts.")
        p.Define("num_shared", 0, "Experts besides, which every token takes (DeepSeekMoE).")

        # Which tokens they get, and how.
        p.Define("gating", Top2Gating.Params(), "Top2Gating.Params() or TopKGating.Params().")
        p.Define("group_size", None, "S, tokens of a group; None for the default.", optional=int)
        p.Define("train_capacity", Capacity.Params(), "C when training.")
        eval_capacity = Capacity.Params().Set(by=CapacityBy.TOKENS)
        p.Define("eval_capacity", eval_capacity, "C otherwise. By default no token is dropped.")
        p.Define("dispatch", Dispatch.EINSUM, "How tokens reach the buffers of their experts.")
        return p

    def __init__(self, params: InstantiableParams, *args: Any) -> None:
        super().__init__(params, *args)
        m = self.p.dim
        h = self.p.hidden_dim
        e = self.p.num_experts

        self._check()
        self.CreateChild("gate", self.p.gating.Copy().Set(num_experts=e))
        self.CreateChild("hidden_dropout", self.p.hidden_dropout)
        self.CreateChild("output_dropout", self.p.output_dropout)
        # `_`, not E: the gate is replicated, although experts are split (section 3.2).
        self.CreateVariable("wg", gaussian((m, e), "M_", fan_in=m))
        used = min(num_choices(self.p), e) / e
        wi = gaussian((e, m, h), "EMH", fan_in=m, share_used=used, use=Use.FACTOR)
        wo = gaussian((e, h, m), "EHM", fan_in=h, share_used=used, use=Use.FACTOR)
        self.CreateVariable("wi", wi)
        self.CreateVariable("wo", wo)
        if self.p.gated:
            self.CreateVariable("wi_gate", wi)

        # A single row for each expert, which is added to all of its rows.
        if self.p.biases:
            self.CreateVariable("wi_bias", constant((e, 1, h), "E_H", 0.0, share_used=used))
            self.CreateVariable("wo_bias", constant((e, 1, m), "E_M", 0.0, share_used=used))
            if self.p.gated:
                self.CreateVariable(
                    "wi_gate_bias", constant((e, 1, h), "E_H", 0.0, share_used=used)
                )

        # Experts that all tokens take are one dense layer, as wide as they are together.
        if self.p.num_shared:
            self.CreateChild("shared", self._shared_params())

        # Maps a function that multiplies tokens by a weight's name to the hidden units.
        self._hidden_units = functools.partial(hidden_units, self.p.activation, self.p.gated)

    # The sizes in a training step of m4.MoE128E36L on 128 devices. Each device has 4 of 512 groups
    # of 2048 tokens, and one of 128 experts, with 32 places for the tokens of a group:
    #
    #             on all devices         split   on one device
    #   x_GSM     [512, 2048, 1024]      G       [4, 2048, 1024]
    #   x_EGCM    [128, 512, 32, 1024]   E       [1, 512, 32, 1024]
    #   h_EGH     [128, 16384, 8192]     E       [1, 16384, 8192]
    #   y_GECM    [512, 128, 32, 1024]   G       [4, 128, 32, 1024]
    #   y_GSM     [512, 2048, 1024]      G       [4, 2048, 1024]

    def FProp(
        self, theta: NestedMap, x: tf.Tensor, valid_mask: tf.Tensor, context: Context
    ) -> tuple[tf.Tensor, Routing]:
        """Algorithm 2: routes x [B, L, M] through the experts, in its dtype; returns [B, L, M].

        `valid_mask` is float32 [B, L], 1 for a token, 0 for padding. The result is zero where a
        token overflowed. The experts' weights may be Items of stacks, as decoding has them in a
        LOOP. Raises ValueError if the group size does not divide the batch's tokens.
        """
        x_GSM, valid_GS = self._in_groups(x, valid_mask, context.mode)
        capacity = self._capacity(x_GSM, context)

        # Without a capacity, experts read what they need of their stacks. All else is read here.
        experts = self._experts(theta)
        theta = slices.all_read(theta)

        # Lines 1 and 2, gating: the experts of each token, and its places in their buffers. The
        # softmax is part of it. Logits are float32, because in 16 bits many would tie.
        with tf.name_scope("gate"):
            logits_GSE = FLOAT32.project("GSM,ME->GSE", tf.cast(x_GSM, tf.float32), theta.wg)
            logits_GSE = self.annotate(logits_GSE, "GSE")
        gates = self.gate.FProp(theta.gate, logits_GSE, valid_GS, capacity, context)
        gates = self._masked(theta, gates, context)

        # Lines 3 to 7, with or without a capacity.
        through_experts = functools.partial(self._through_experts, theta, x_GSM)
        has_place_for_all = capacity == x_GSM.shape[1]
        if has_place_for_all and (self._is_dropless or not context.training):
            y_GSM = without_overflow(
                x_GSM,
                gates,
                experts,
                through_experts,
                capacity=self.p.eval_capacity,
                context=context,
                annotator=self._annotator,
            )
        else:
            y_GSM = through_experts(gates, capacity, context)

        y_BLM = self.annotate(tf.reshape(y_GSM, x.shape), "BLM")
        if self.p.num_shared:
            shared_BLM = self.shared.FProp(theta.shared, x, context)
            y_BLM = self.annotate(y_BLM + shared_BLM, "BLM")
        return y_BLM, self._replicated_load(gates.routing)

    def _through_experts(
        self, theta: NestedMap, x_GSM: tf.Tensor, gates: Gates, capacity: int, context: Context
    ) -> tf.Tensor:
        """Lines 3 to 7 of Algorithm 2: the experts' outputs, weighted by the gates, [G, S, M]."""
        # Line 3, dispatch. From here on tensors are split by expert: the first all-to-all.
        dispatcher = self._dispatcher(gates, capacity, context)
        x_EGCM = context.product("GSEC,GSM->EGCM", dispatcher.dispatch, x_GSM)
        x_EGCM = self.annotate(x_EGCM, "EGCM")

        # Lines 4 and 5, the hidden units of the experts: relu(wi * x), or another activation.
        def project(name: str) -> tf.Tensor:
            h_EGH = context.einsum(
                "EGCM,EMH->E(GC)H",
                x_EGCM,
                theta[name],
                rounded=Rounded.RESULT | Rounded.LEFT,
            )
            return with_bias(h_EGH, theta, name)

        with tf.name_scope("experts"):
            h_EGH = self.annotate(self._hidden_units(project), "EGH")
            h_EGH = self.hidden_dropout.FProp(theta.hidden_dropout, h_EGH, "EGH", context)

        # Line 6, their outputs, which return to their groups: the second all-to-all.
        by_group = functools.partial(self._outputs_by_group, x_EGCM.shape, context.arithmetic)
        y_GECM = context.product("E(GC)H,EHM->GECM", by_group, h_EGH, theta.wo)
        y_GECM = with_bias(y_GECM, theta, "wo")

        # Line 7, combine: "GSEC,GECM->GSM" with the gates as weights.
        return self.annotate(dispatcher.combine(y_GECM), "GSM")

    def _masked(self, theta: NestedMap, gates: Gates, context: Context) -> Gates:
        """Returns the gates by which outputs are combined; the losses are those of all choices."""
        if not self.p.output_dropout.rate:
            return gates

        # A mask for each choice, not one for all of a token's.
        gates_GSk = tf.stack([choice.gate_GS for choice in gates.choices], -1)
        kept_GSk = self.output_dropout.FProp(theta.output_dropout, gates_GSk, "GS_", context)
        choices = [
            dataclasses.replace(choice, gate_GS=kept_GSk[..., i])
            for i, choice in enumerate(gates.choices)
        ]
        return dataclasses.replace(gates, choices=tuple(choices))

    @property
    def _is_dropless(self) -> bool:
        """Whether training drops no token."""
        return self.p.dispatch is Dispatch.RAGGED

    def _check(self) -> None:
        """Raises ValueError for settings that exclude each other or make no sense."""
        p = self.p
        if p.num_shared < 0:
            raise ValueError(f"{self.path}: num_shared must be 0 or more, got {p.num_shared}.")
        if self._is_dropless and p.hidden_dropout.rate:
            raise ValueError(
                f"{self.path}: dispatch=RAGGED has no dropout within experts; hidden_dropout.rate "
                f"must be 0, got {p.hidden_dropout.rate}."
            )

    def _shared_params(self) -> InstantiableParams:
        """Returns the settings of the shared experts."""
        p = self.p
        return FeedForwardLayer.Params().Set(
            dim=p.dim,
            hidden_dim=p.num_shared * p.hidden_dim,
            activation=p.activation,
            gated=p.gated,
            biases=p.biases,
            hidden_dropout=p.hidden_dropout,
        )

    def _experts(self, theta: NestedMap) -> Experts:
        """Returns what experts without buffers compute with."""
        names = ["wi", "wi_gate", "wo"] if self.p.gated else ["wi", "wo"]
        if self.p.biases:
            names += [f"{name}_bias" for name in names]
        return Experts({name: theta[name] for name in names}, self._hidden_units)

    def _in_groups(
        self, x: tf.Tensor, valid_mask: tf.Tensor, mode: Mode
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the batch and its mask as groups of consecutive tokens: [G, S, M] and [G, S]."""
        batch, length, dim = x.shape
        count = self._num_groups(batch, length, mode)
        x_GSM = self.annotate(tf.reshape(x, [count, -1, dim]), "GSM")
        valid_GS = self.annotate(tf.reshape(valid_mask, [count, -1]), "GS")
        return x_GSM, valid_GS

    def _num_groups(self, batch: int, length: int, mode: Mode) -> int:
        """Returns G for a batch [B, L], which may be one step of decoding."""
        if mode is not Mode.PREDICT:
            return num_groups(self.p, f"{self.path}: group_size", batch, length)
        if self.p.eval_capacity.by is not CapacityBy.TOKENS:
            return batch  # So that no example takes the places of another.

        # Enough groups for all partitions, as far as these divide the batch.
        (num_partitions,) = self._annotator.factor("G")
        num_parts = math.gcd(batch, num_partitions)
        tokens = batch * length
        return tokens // cheap_group_size(self.p, tokens // num_parts)

    def _capacity(self, x_GSM: tf.Tensor, context: Context) -> int:
        """Returns C, the places of an expert for the tokens of one group."""
        _, group_size, _ = x_GSM.shape
        if context.training:
            return group_size if self._is_dropless else train_places(self.p, group_size)
        capacity = self.p.eval_capacity.Instantiate()
        return capacity.places(group_size, self.p.num_experts, num_choices(self.p))

    def _dispatcher(
        self, gates: Gates, capacity: int, context: Context
    ) -> IndexedDispatcher | OneHotDispatcher:
        """Returns what moves tokens to their experts' buffers, and outputs back."""
        with tf.name_scope("gate"):
            if self.p.dispatch is Dispatch.GATHER:
                return IndexedDispatcher(gates, capacity, self._annotator)
            return OneHotDispatcher(gates, capacity, self._annotator, context.arithmetic)

    def _outputs_by_group(
        self,
        shape_EGCM: Sequence[int],
        arithmetic: Arithmetic,
        h_EGH: tf.Tensor,
        wo_EHM: Weight,
    ) -> tf.Tensor:
        """Returns the experts' outputs [G, E, C, M], split by group."""
        with tf.name_scope("experts"):
            y_EGM = arithmetic.project(
                "E(GC)H,EHM->E(GC)M", h_EGH, wo_EHM, rounded=Rounded.RESULT | Rounded.LEFT
            )
            # Without this annotation the partitioner may split the product over groups and
            # gather the weights, which costs less where experts are few.
            y_EGCM = self.annotate(tf.reshape(y_EGM, shape_EGCM), "EGCM")

        with tf.name_scope("combine"):
            return self.annotate(tf.transpose(y_EGCM, [1, 0, 2, 3]), "GECM")

    def _replicated_load(self, routing: Routing) -> Routing:
        """Returns the routing with its only vector, a metric, in full on every device."""
        return dataclasses.replace(routing, load_E=self.annotate(routing.load_E, "_"))


def num_choices(p: Params) -> int:
    """Returns k, the experts that a token chooses, without the shared ones."""
    return p.gating.cls.num_choices(p.gating)


def train_places(p: Params, group_size: int) -> int:
    """Returns C when training, the places of an expert in a group of `group_size` tokens."""
    return p.train_capacity.Instantiate().places(group_size, p.num_experts, num_choices(p))


def group_size(p: Params, tokens: int) -> int:
    """Returns S for a batch of `tokens` tokens with padding: p.group_size if set, or a default."""
    return default_group_size(p, tokens) if p.group_size is None else p.group_size


def default_group_size(p: Params, tokens: int) -> int:
    """Returns S for `tokens` tokens, a divisor of them, so that dispatch and overflow cost little.

    Experts that have few places for a group overflow even in perfect balance: with one place they
    lose 12 % of all tokens, with four 2 % (planning/tables/capacity.py). So groups may be larger
    than cheap_group_size, up to C = 4, as long as there are as many groups as experts, so that
    devices with one expert each also have a group each (section 3.1: G and E are O(D)).

    S does not depend on the number of devices, and neither do the results. A group size that is set
    takes the place of this one.
    """
    four_places = 4 * _one_place(p)
    one_group_an_expert = tokens / p.num_experts
    return _largest_divisor(tokens, max(_cheap(p), min(four_places, one_group_an_expert)))


def cheap_group_size(p: Params, tokens: int) -> int:
    """Returns S for `tokens` tokens, a divisor of them, so that dispatch costs little.

    Per token, dispatch and combine by einsum take 4 * E * C * M flops, and the experts take
    (E * C / S) * 4 * M * H: the former are S / H of the latter. So S is the largest divisor of
    `tokens` that is at most H / 10. With so many experts that C would be below 1, and be rounded
    up, S is the largest divisor that is at most E / factor.
    """
    return _largest_divisor(tokens, _cheap(p))


def _cheap(p: Params) -> float:
    # At least 1, where H is below 10.
    return max(1.0, p.hidden_dim / 10, _one_place(p))


def _one_place(p: Params) -> float:
    """Returns the number of tokens in a group of which each expert takes one: C = 1."""
    return p.num_experts / p.train_capacity.Instantiate().factor(num_choices(p))


def _largest_divisor(tokens: int, most: float) -> int:
    sizes = range(1, min(tokens, int(most)) + 1)
    return max(size for size in sizes if tokens % size == 0)


def num_groups(p: Params, name: str, batch: int, length: int) -> int:
    """Returns G for a batch [B, L].

    Raises ValueError if S, called `name`, does not divide its tokens.
    """
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
