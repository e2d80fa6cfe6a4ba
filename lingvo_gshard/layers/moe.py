"""The position-wise Mixture-of-Experts layer: Algorithm 2.

B batch, L length, G groups, S tokens of a group, E experts, C capacity, M model, H hidden: the
letters of sharding/layout.py. A name's suffix gives its dims. `(GC)` in an equation is a single dim
of G * C elements, which is annotated by its first letter: the rows of an expert in all groups.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

from lingvo_gshard.core.base_layer import BaseLayer, Use, gaussian
from lingvo_gshard.core.hyperparams import REQUIRED, setting
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import moe_sizes
from lingvo_gshard.layers.activations import hidden_units
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.dispatch import Dispatch, Indices, combine_weights
from lingvo_gshard.layers.dropout import DropoutLayer
from lingvo_gshard.layers.expert_tiles import Experts
from lingvo_gshard.layers.feed_forward import FeedForwardLayer, create_weights
from lingvo_gshard.layers.gating import Capacity, CapacityBy
from lingvo_gshard.layers.gating_layers import GatingLayer, Top2Gating
from lingvo_gshard.layers.ragged_experts import Ragged
from lingvo_gshard.layers.routing import Gates, Routing
from lingvo_gshard.layers.weight import Weight
from lingvo_gshard.sharding.annotator import Annotator

# The rounds that a batch is expected to need: the tokens of the fullest buffer over C.
_LIKELY_ROUNDS = 8


class MoELayer(BaseLayer):
    """Sends each token through at most k of E feed-forward experts and combines their outputs.

    y_s = sum_e G_s,e * FFN_e(x_s), where FFN_e(x) = wo_e * relu(wi_e * x), and G_s,e are gates, of
    which at most k, 2 in the paper, are not 0 (equations 1 to 3).

    Tensors are split by group, by expert, and by group again; each change is an all-to-all.

    By default only training has a capacity. Otherwise a token could lose its experts to others of
    its batch, and a translation would depend on the rest of its batch.
    """

    hidden_dropout: DropoutLayer
    output_dropout: DropoutLayer
    gate: GatingLayer
    shared: FeedForwardLayer

    # Each expert has the settings of a feed-forward layer.
    class Params(FeedForwardLayer.Params):
        # NLLB's expert output masking (2022, arXiv:2207.04672).
        output_dropout: DropoutLayer.Params = setting(
            DropoutLayer.Params().Set(rate=0.0),
            "Dropout of experts' whole outputs: a choice's gate is zeroed, or scaled up.",
        )
        num_experts: int = setting(REQUIRED, "E, the number of experts.")
        num_shared: int = setting(0, "Experts besides, which every token takes (DeepSeekMoE).")

        # Which tokens they get, and how.
        gating: GatingLayer.Params = setting(
            Top2Gating.Params(), "The Params of one of gating_layers.py."
        )
        group_size: int | None = setting(None, "S, tokens of a group; None for the default.")
        train_capacity: Capacity.Params = setting(Capacity.Params(), "C when training.")
        eval_capacity: Capacity.Params = setting(
            Capacity.Params().Set(by=CapacityBy.TOKENS),
            "C otherwise. By default no token is dropped.",
        )
        dispatch: Dispatch = setting(
            Dispatch.EINSUM, "How tokens reach the buffers of their experts."
        )

    p: Params

    def __init__(self, params: Params, *args: Any) -> None:
        super().__init__(params, *args)
        p = self.p
        e = p.num_experts

        self._check()
        self.CreateChild("gate", p.gating.cls.OfLayer(p.gating, e, p.dim))
        self.CreateChild("hidden_dropout", p.hidden_dropout)
        self.CreateChild("output_dropout", p.output_dropout)
        # `_`, not E: the gate is replicated, although experts are split (section 3.2).
        self.CreateVariable("wg", gaussian((p.dim, e), "M_", fan_in=p.dim, use=Use.ROUTER))
        create_weights(self, p, e, share_used=min(moe_sizes.num_choices(p), e) / e)

        # Experts that all tokens take are one dense layer, as wide as they are together.
        if p.num_shared:
            alike = ("dim", "activation", "gated", "biases", "hidden_dropout")
            shared = FeedForwardLayer.Params().Set(**{name: p.Get(name) for name in alike})
            self.CreateChild("shared", shared.Set(hidden_dim=p.num_shared * p.hidden_dim))

    def FProp(
        self, theta: NestedMap, x: tf.Tensor, valid_mask: tf.Tensor, context: Context
    ) -> tuple[tf.Tensor, Routing]:
        """Algorithm 2: routes x [B, L, M] through the experts, in its dtype; returns [B, L, M].

        `valid_mask` is float32 [B, L], 1 for a token, 0 for padding. The result is zero where a
        token overflowed. The experts' weights may be parts of stacks: decoding a LOOP has them
        so. Raises ValueError if the group size does not divide the batch's tokens.
        """
        x_GSM, valid_GS = self._in_groups(x, valid_mask, context.mode)
        num_groups, group_size, _ = x_GSM.shape

        # Buffers with a capacity or, where no token may be dropped, one of two ways without.
        path = expert_path(self.p, context.mode, num_groups, group_size, self._annotator)

        # Lines 1 and 2, gating: the experts of each token, and its places in their buffers. The
        # softmax is part of it. Logits are float32, because in 16 bits many would tie.
        with tf.name_scope("gate"):
            routed_GSM = self.gate.RouterInput(theta.gate, x_GSM, context)
            logits_GSE = context.einsum("GSM,ME->GSE", routed_GSM, theta.wg, exact=True)
            logits_GSE = self.annotate(logits_GSE, "GSE")
        gates = self.gate.FProp(theta.gate, logits_GSE, valid_GS, path.capacity, context)
        gates = self._masked(theta, gates, context)

        # Lines 3 to 7: see Buffers.
        y_GSM = path.outputs(x_GSM, gates, self._experts(theta, context))

        y_BLM = self.annotate(tf.reshape(y_GSM, x.shape), "BLM")
        if self.p.num_shared:
            shared_BLM = self.shared.FProp(theta.shared, x, context)
            y_BLM = self.annotate(y_BLM + shared_BLM, "BLM")

        # The routing's only vector, a metric, is whole on every device.
        sent_E = self.annotate(gates.routing.sent_E, "_")
        return y_BLM, dataclasses.replace(gates.routing, sent_E=sent_E)

    def _check(self) -> None:
        """Raises ValueError for settings that exclude each other or make no sense."""
        p = self.p
        self._check_setting("num_shared", p.num_shared >= 0, "0 or more")
        for capacity in (p.train_capacity, p.eval_capacity):
            capacity.Instantiate()
        if p.dispatch is Dispatch.RAGGED and p.hidden_dropout.rate:
            raise ValueError(
                f"{self.path}: dispatch=RAGGED has no dropout within experts; hidden_dropout.rate "
                f"must be 0, got {p.hidden_dropout.rate}."
            )

    def _in_groups(
        self, x: tf.Tensor, valid_mask: tf.Tensor, mode: Mode
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the batch and its mask as groups of consecutive tokens: [G, S, M] and [G, S]."""
        batch, length, dim = x.shape
        if mode is Mode.PREDICT:
            count = moe_sizes.num_decoded_groups(self.p, batch, length, self._annotator)
        else:
            count = moe_sizes.num_groups(self.p, f"{self.path}: group_size", batch, length)
        x_GSM = self.annotate(tf.reshape(x, [count, -1, dim]), "GSM")
        valid_GS = self.annotate(tf.reshape(valid_mask, [count, -1]), "GS")
        return x_GSM, valid_GS

    def _experts(self, theta: NestedMap, context: Context) -> Experts:
        """Returns the experts as a path computes them."""
        names = ["wi", "wi_gate", "wo"] if self.p.gated else ["wi", "wo"]
        if self.p.biases:
            names += [f"{name}_bias" for name in names]

        def dropout(h_EGH: tf.Tensor) -> tf.Tensor:
            return self.hidden_dropout.FProp(theta.hidden_dropout, h_EGH, "EGH", context)

        return Experts(
            NestedMap({name: Weight.of(theta[name]) for name in names}),
            functools.partial(hidden_units, self.p.activation, self.p.gated),
            self.p.hidden_dim,
            dropout,
            context.numerics,
        )

    def _masked(self, theta: NestedMap, gates: Gates, context: Context) -> Gates:
        """Returns the gates by which outputs are combined; losses still count all choices."""
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


@dataclasses.dataclass(frozen=True)
class Buffers:
    """Lines 3 to 7 of Algorithm 2: each expert has C places for the tokens of each group.

    These are the sizes in a training step of m4.MoE128E36L on 128 devices. Each device has 4 of 512
    groups of 2048 tokens, and one of 128 experts, with 32 places for the tokens of a group:

                  on all devices         split   on one device
        x_GSM     [512, 2048, 1024]      G       [4, 2048, 1024]
        x_EGCM    [128, 512, 32, 1024]   E       [1, 512, 32, 1024]
        h_EGH     [128, 16384, 8192]     E       [1, 16384, 8192]
        y_GECM    [512, 128, 32, 1024]   G       [4, 128, 32, 1024]
        y_GSM     [512, 2048, 1024]      G       [4, 2048, 1024]
    """

    capacity: int  # C.
    dispatch: Dispatch
    annotator: Annotator

    def outputs(self, x_GSM: tf.Tensor, gates: Gates, experts: Experts) -> tf.Tensor:
        """Returns each token's expert outputs, weighted by its gates: [G, S, M]."""
        annotate = self.annotator.annotate
        n = experts.numerics
        theta = experts.theta
        indices: Indices | None = None

        # Line 3, dispatch. From here on tensors are split by expert: the first all-to-all.
        if self.dispatch is Dispatch.GATHER:
            with tf.name_scope("gate"):
                indices = Indices(gates, self.capacity, self.annotator, n)
            with tf.name_scope("dispatch"):
                x_EGCM = indices.dispatched(x_GSM)
        else:
            with tf.name_scope("gate"):
                weights_GSEC = annotate(combine_weights(gates, self.capacity), "GSEC")
            mask_GSEC = tf.cast(weights_GSEC > 0.0, x_GSM.dtype)
            with tf.name_scope("dispatch"):
                x_EGCM = n.einsum("GSEC,GSM->EGCM", mask_GSEC, x_GSM)
        x_EGCM = annotate(x_EGCM, "EGCM")

        # Lines 4 and 5, the hidden units of the experts: relu(wi * x), or another activation.
        project = functools.partial(n.project, "EGCM,EMH->E(GC)H", x_EGCM, theta)
        with tf.name_scope("experts"):
            h_EGH = annotate(experts.hidden_units(project), "EGH")
            h_EGH = experts.dropout(h_EGH)

            # Line 6, their outputs, which return to their groups: the second all-to-all.
            to_groups = functools.partial(self._to_groups, x_EGCM.shape)
            y_GECM = n.project("E(GC)H,EHM->GECM", h_EGH, theta, "wo", transpose=to_groups)

        # Line 7, combine.
        with tf.name_scope("combine"):
            if indices is None:
                y_GSM = n.einsum("GSEC,GECM->GSM", tf.cast(weights_GSEC, y_GECM.dtype), y_GECM)
            else:
                y_GSM = indices.combined(y_GECM)
        return annotate(y_GSM, "GSM")

    def _to_groups(self, shape_EGCM: Sequence[int], y_EGM: tf.Tensor) -> tf.Tensor:
        """Returns the experts' outputs [G, E, C, M], split by group, given [E, G * C, M]."""
        # Without this annotation the partitioner may split the product over groups and gather the
        # weights, which costs less where experts are few.
        y_EGCM = self.annotator.annotate(tf.reshape(y_EGM, shape_EGCM), "EGCM")
        with tf.name_scope("combine"):
            return self.annotator.annotate(tf.transpose(y_EGCM, [1, 0, 2, 3]), "GECM")


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Buffers that are filled as often as the fullest one needs, so that no token overflows.

    Memory does not grow with the number of partitions. Gradients would need the number of rounds.
    """

    capacity: int  # S: a gating has places for all tokens.
    buffers: Buffers  # Those of a round.

    def outputs(self, x_GSM: tf.Tensor, gates: Gates, experts: Experts) -> tf.Tensor:
        """Returns each token's expert outputs, weighted by its gates: [G, S, M]."""
        annotate = self.buffers.annotator.annotate
        size = self.buffers.capacity
        occupied = gates.occupied()
        inside = dataclasses.replace(experts, numerics=experts.numerics.in_loop(_LIKELY_ROUNDS))

        def next_round(start: tf.Tensor, y_GSM: tf.Tensor) -> list[tf.Tensor]:
            window = gates.window(start, size)

            # A token's two choices may have their turns in different rounds.
            y_GSM += self.buffers.outputs(x_GSM, window, inside)
            return [start + size, annotate(y_GSM, "GSM")]

        zeros_GSM = annotate(tf.zeros_like(x_GSM), "GSM")
        _, y_GSM = tf.while_loop(
            lambda start, _: start < occupied, next_round, [tf.constant(0), zeros_GSM]
        )
        return y_GSM


# All have outputs(x_GSM, gates, experts), given gates for their capacity.
ExpertPath: TypeAlias = Buffers | Rounds | Ragged


def expert_path(
    p: MoELayer.Params, mode: Mode, num_groups: int, group_size: int, annotator: Annotator
) -> ExpertPath:
    """Returns the way in which tokens pass through the experts of an MoELayer with these Params.

    Buffers may overflow. Otherwise all tokens are computed in one of two other ways, whichever
    moves less: buffers of S places for each expert in each group would be mostly empty. Raises
    ValueError if training by RAGGED cannot divide the tokens evenly.
    """
    num_tokens = num_groups * group_size
    _, num_parts = annotator.factor("EG")  # Y in ragged_experts.py, whose parts are equal.

    # Training has gradients, which rounds do not have.
    if mode is Mode.TRAIN and p.dispatch is not Dispatch.RAGGED:
        return Buffers(moe_sizes.train_places(p, group_size), p.dispatch, annotator)
    if mode is Mode.TRAIN:
        if num_tokens % num_parts:
            raise ValueError(
                f"dispatch=RAGGED: {num_tokens} tokens of a batch are not divisible by the "
                f"{num_parts} parts of the mesh that share no experts."
            )
        return Ragged(group_size, annotator)

    # Evaluation and decoding, with a capacity.
    capacity = p.eval_capacity.Instantiate()
    num_choices = moe_sizes.num_choices(p)
    places = capacity.places(group_size, p.num_experts, num_choices)
    if places < group_size:
        return Buffers(places, p.dispatch, annotator)

    # A round moves whole buffers, however few tokens are left for it.
    round_places = capacity.even_places(group_size, p.num_experts, num_choices)
    buffer_rows = p.num_experts * num_groups * round_places
    is_even = num_tokens % num_parts == 0
    if is_even and gathering_moves_less(num_tokens, buffer_rows, annotator):
        return Ragged(group_size, annotator)
    return Rounds(group_size, Buffers(round_places, p.dispatch, annotator))


def gathering_moves_less(num_tokens: int, buffer_rows: int, annotator: Annotator) -> bool:
    """Returns whether ragged experts move fewer rows of a partition than dispatch in rounds does.

    Ragged experts gather the tokens of all partitions of the experts and send back an output for
    each of them. A round sends a partition's share of all buffers, E * G * C rows, to the experts
    and back. So rounds win on many partitions, and gathering wins on few.
    """
    _, num_parts = annotator.factor("EG")  # Y in ragged_experts.py
    (num_partitions,) = annotator.factor("G")
    gathered_rows = num_tokens / num_parts
    dispatched_rows = _LIKELY_ROUNDS * buffer_rows / num_partitions
    return gathered_rows <= dispatched_rows
