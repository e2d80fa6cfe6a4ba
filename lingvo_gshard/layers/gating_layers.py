"""The gatings that an MoE layer can have: the paper's top-2, or the k experts of later papers.

A gating maps the router's logits to k choices of each token, with gates and positions in the
experts' buffers, and to the losses that keep the experts balanced.

G groups, S tokens of a group, E experts, C capacity of an expert in a group, k choices of a token:
the letters of gating.py and routing.py.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Any

from lingvo_gshard.core.base_layer import BaseLayer, constant, gaussian
from lingvo_gshard.core.hyperparams import REQUIRED, AnyParams, setting
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import gating
from lingvo_gshard.layers.context import Context
from lingvo_gshard.layers.gating import SecondExpert
from lingvo_gshard.layers.random import random_uniform
from lingvo_gshard.layers.routing import Choice, Gates, at_least_one, routing

_SMALLEST_TOTAL = 1e-20  # All gates can be 0, if sigmoids are, and padding's always are.


class GatingLayer(BaseLayer, abc.ABC):
    """The interface of a gating to its MoE layer."""

    class Params(BaseLayer.Params):
        num_experts: int = setting(REQUIRED, "E; the MoE layer sets it.")
        z_loss_weight: float = setting(0.0, "The weight of the router z-loss; 0.001 in ST-MoE.")

    p: Params

    def __init__(self, params: Params, *args: Any) -> None:
        super().__init__(params, *args)
        self._check_setting("z_loss_weight", self.p.z_loss_weight >= 0, "0 or more")

    @classmethod
    @abc.abstractmethod
    def num_choices(cls, p: AnyParams) -> int:
        """Returns k, the experts that a token chooses at most, for Params of this class."""

    @classmethod
    def OfLayer(cls, p: AnyParams, num_experts: int, dim: int) -> AnyParams:
        """Returns the Params of the gating of an MoE layer with E experts and model dim M."""
        return p.Copy().Set(num_experts=num_experts)

    def RouterInput(self, theta: NestedMap, x_GSM: tf.Tensor, context: Context) -> tf.Tensor:
        """Returns what wg multiplies, [G, S, M]: by default the tokens themselves."""
        return x_GSM

    @abc.abstractmethod
    def FProp(
        self,
        theta: NestedMap,
        logits_GSE: tf.Tensor,
        valid_GS: tf.Tensor,
        capacity: int,
        context: Context,
    ) -> Gates:
        """Chooses the experts of all tokens, and their places in buffers of `capacity` places.

        `logits_GSE` are the products of wg and RouterInput. `valid_GS` is 1 for tokens and 0 for
        padding, which neither chooses experts nor takes capacity.
        """

    def _router_loss(
        self, logits_GSE: tf.Tensor, valid_GS: tf.Tensor, context: Context
    ) -> tf.Tensor | None:
        """Returns the weighted z-loss, a scalar; None without a weight."""
        if not self.p.z_loss_weight:
            return None
        return self.p.z_loss_weight * z_loss(logits_GSE, valid_GS, context.tokens_of_mean)


def z_loss(
    logits_GSE: tf.Tensor,
    valid_GS: tf.Tensor,
    tokens_of_mean: Callable[[tf.Tensor], tf.Tensor] = at_least_one,
) -> tf.Tensor:
    """Returns the router z-loss, the mean over tokens of (log sum_e exp z_e)^2.

    It keeps logits small (Zoph et al. 2022, ST-MoE, arXiv:2202.08906, equation 5). Padding does not
    count. `tokens_of_mean` is Context.tokens_of_mean.
    """
    log_sum_exp_GS = tf.reduce_logsumexp(logits_GSE, -1)
    total = tf.reduce_sum(valid_GS * tf.square(log_sum_exp_GS))
    return total / tokens_of_mean(tf.reduce_sum(valid_GS))


class Top2Gating(GatingLayer):
    """Algorithm 1: two experts, of which the second may be asked for at random."""

    class Params(GatingLayer.Params):
        second_expert: SecondExpert = setting(
            SecondExpert.RANDOM, "Which tokens ask for their second expert."
        )

    p: Params

    @classmethod
    def num_choices(cls, p: Params) -> int:
        """Returns 2."""
        return 2

    def FProp(
        self,
        theta: NestedMap,
        logits_GSE: tf.Tensor,
        valid_GS: tf.Tensor,
        capacity: int,
        context: Context,
    ) -> Gates:
        """Applies Algorithm 1 to each group, with the draws that the experiment wants."""
        logits_GSE = self._routed(logits_GSE, valid_GS, context)

        # Lines 17 and 19 of Algorithm 1: 2 * g2 > rnd is g2 > rnd / 2.
        second_above: tf.Tensor | float = gating.ALWAYS
        if context.training and self.p.second_expert is not SecondExpert.ALL:
            moe_path = self.path.rpartition(".")[0]
            uniform_GS = random_uniform(tuple(valid_GS.shape), context.seed_for(moe_path))
            second_above = self.annotate(0.5 * uniform_GS, "GS")

        return gating.top2_gating(
            logits_GSE,
            valid_GS,
            capacity,
            second_above=second_above,
            all_counted=self.p.second_expert is SecondExpert.COUNTED,
            router_loss=self._router_loss(logits_GSE, valid_GS, context),
            numerics=context.numerics,
            tokens_of_mean=context.tokens_of_mean,
        )

    def _routed(self, logits_GSE: tf.Tensor, valid_GS: tf.Tensor, context: Context) -> tf.Tensor:
        """Returns the logits by which tokens are routed."""
        return logits_GSE


class SentenceTop2Gating(Top2Gating):
    """Algorithm 1 by sentence: all of a sentence's tokens have the same logits.

    The logits are wg times the mean of x over the tokens of the sentence, as in Lingvo's
    SentenceTop2Gating (lingvo/core/gshard_layers.py). Capacity and random draws stay per
    token. Sentences may be packed into rows, and groups may cut them. Only encoders have
    this gating, as a decoder does not know the rest of its sentence.
    """

    def _routed(self, logits_GSE: tf.Tensor, valid_GS: tf.Tensor, context: Context) -> tf.Tensor:
        """Returns the mean logits of each token's sentence; padding's are 0.

        Raises ValueError outside of an encoder.
        """
        mask_BLT = context.sentence_mask
        if mask_BLT is None:
            raise ValueError(
                f"{self.path}: SentenceTop2Gating needs whole sentences, which only an encoder "
                "has; expected Top2Gating or TopKGating in a decoder."
            )

        # wg times the mean of x is the mean of wg * x. Rows are whole, unlike groups.
        batch, length, _ = mask_BLT.shape
        size_BL1 = tf.reduce_sum(mask_BLT, -1, keepdims=True)  # At least 1, the token itself.
        logits_BLE = self.annotate(tf.reshape(logits_GSE, [batch, length, -1]), "BL_")
        sums_BLE = context.einsum("BLT,BTE->BLE", mask_BLT, logits_BLE, exact=True)
        means_BLE = self.annotate(sums_BLE / size_BL1, "BL_")

        means_GSE = tf.reshape(means_BLE, logits_GSE.shape) * valid_GS[..., None]
        return self.annotate(means_GSE, "GSE")


class TaskTop2Gating(Top2Gating):
    """Algorithm 1 by task: all tokens of a task's sentences have the same logits.

    The logits are wg times a learned embedding of the token's task, as in Lingvo's TaskTop2Gating
    (lingvo/core/gshard_layers.py), which takes the embeddings from its caller. Here each MoE layer
    has its own, and a sentence's task is the target language, whose token begins the source if the
    data has several. Capacity and random draws stay per token. Only encoders have this gating.
    """

    class Params(Top2Gating.Params):
        dim: int = setting(REQUIRED, "M; the MoE layer sets it.")
        num_tasks: int = setting(REQUIRED, "The target languages of the data.")
        first_piece: int = setting(
            4, "The source piece of the first task; the others' follow it. It is 4 in our data."
        )

    p: Params

    @classmethod
    def OfLayer(cls, p: AnyParams, num_experts: int, dim: int) -> AnyParams:
        return super().OfLayer(p, num_experts, dim).Set(dim=dim)

    def __init__(self, params: Params, *args: Any) -> None:
        super().__init__(params, *args)
        p = self.p
        self._check_setting("num_tasks", p.num_tasks >= 1, "1 or more")
        self._check_setting("first_piece", p.first_piece >= 0, "0 or more")
        # Replicated, as the router is.
        self.CreateVariable("embedding", gaussian((p.num_tasks, p.dim), "__", fan_in=1))

    def RouterInput(self, theta: NestedMap, x_GSM: tf.Tensor, context: Context) -> tf.Tensor:
        """Returns the embedding of each token's task, float32; 0 for padding.

        Raises ValueError outside of an encoder, and unless context.first_pieces has the shape of
        the batch.
        """
        pieces_BL = context.first_pieces
        if pieces_BL is None:
            raise ValueError(
                f"{self.path}: TaskTop2Gating needs the token that begins a source, which only an "
                "encoder has; expected Top2Gating or TopKGating in a decoder."
            )
        num_groups, group_size, _ = x_GSM.shape
        if math.prod(pieces_BL.shape) != num_groups * group_size:
            raise ValueError(
                f"{self.path}: first_pieces has the shape {tuple(pieces_BL.shape)}, expected a "
                f"piece for each of {num_groups * group_size} tokens."
            )

        task_GS = tf.reshape(pieces_BL, [num_groups, group_size]) - self.p.first_piece
        is_task_GSV = self.annotate(tf.one_hot(task_GS, self.p.num_tasks), "GS_")
        task_GSM = context.einsum("GSV,VM->GSM", is_task_GSV, theta.embedding, exact=True)
        return self.annotate(task_GSM, "GSM")


class Scores(enum.Enum):
    """How a router's logits become scores, of which the best k are chosen."""

    SOFTMAX = "softmax"  # One over all experts, as in the paper.
    SIGMOID = "sigmoid"  # One for each expert, as in DeepSeek-V3.


class TopKGating(GatingLayer):
    """The k experts with the highest scores, nothing at random.

    With k = 1 and gates that are not normalized it is Switch's (Fedus et al. 2021,
    arXiv:2101.03961), with normalized gates Mixtral's (Jiang et al. 2024, arXiv:2401.04088).

    With sigmoids and a bias_rate it is DeepSeek-V3's (2024, arXiv:2412.19437, section 2.1.2,
    without its groups of experts): a bias of each expert is added to the scores where experts are
    chosen, and not to the gates. After each step it moves by bias_rate, down if the expert had more
    than the mean of all choices, up if it had less. So experts are balanced without an auxiliary
    loss, whose weight is the task's aux_loss_weight.
    """

    class Params(GatingLayer.Params):
        k: int = setting(REQUIRED, "The experts of a token.")
        scores: Scores = setting(Scores.SOFTMAX, "What logits become.")
        normalized: bool = setting(True, "Whether the k gates of a token are divided by their sum.")
        scale: float = setting(1.0, "What gates are multiplied by; 2.5 in DeepSeek-V3.")
        bias_rate: float = setting(0.0, "The step of the experts' biases; 0.001 in DeepSeek-V3.")

    p: Params

    @classmethod
    def num_choices(cls, p: Params) -> int:
        """Returns p.k."""
        return p.k

    def __init__(self, params: Params, *args: Any) -> None:
        super().__init__(params, *args)
        p = self.p
        is_possible = 1 <= p.k <= p.num_experts
        self._check_setting("k", is_possible, f"from 1 to num_experts, which is {p.num_experts}")
        self._check_setting("scale", p.scale > 0, "above 0")
        self._check_setting("bias_rate", p.bias_rate >= 0, "0 or more")
        if p.bias_rate:
            # Replicated, as the router is.
            bias = constant((p.num_experts,), "_", 0.0)
            self.CreateVariable("bias", dataclasses.replace(bias, sign_step=p.bias_rate))

    def FProp(
        self,
        theta: NestedMap,
        logits_GSE: tf.Tensor,
        valid_GS: tf.Tensor,
        capacity: int,
        context: Context,
    ) -> Gates:
        """Chooses the best k experts of each token. All first choices take places, then the next.

        l_aux is Algorithm 1's, but counts all k choices in place of the first ones.
        """
        is_softmax = self.p.scores is Scores.SOFTMAX
        scores_GSE = tf.nn.softmax(logits_GSE) if is_softmax else tf.nn.sigmoid(logits_GSE)

        # Choices, whose gates know no bias.
        ranked_GSE = scores_GSE + theta.bias if self.p.bias_rate else scores_GSE
        choices = top_k(scores_GSE, ranked_GSE, valid_GS, capacity, self.p.k)
        chosen_GSE = tf.add_n([choice.mask_GSE for choice in choices])
        choices = self._weighted(choices)

        # The losses that balance the experts.
        router_loss = self._router_loss(logits_GSE, valid_GS, context)
        if self.p.bias_rate:
            bias_loss = bias_gradient(theta.bias, tf.reduce_sum(chosen_GSE, [0, 1]))
            router_loss = bias_loss if router_loss is None else router_loss + bias_loss

        # Of probabilities, which sigmoids are only beside each other.
        gates_GSE = scores_GSE
        if not is_softmax:
            total_GS1 = tf.reduce_sum(scores_GSE, -1, keepdims=True)
            gates_GSE = scores_GSE / tf.maximum(total_GS1, _SMALLEST_TOTAL)
        dropped_GS = tf.add_n([choice.wanted_GS - choice.kept_GS for choice in choices])
        statistics = routing(
            choices,
            valid_GS,
            gating.auxiliary_loss(gates_GSE, chosen_GSE / self.p.k, valid_GS),
            -tf.reduce_sum(tf.math.xlogy(gates_GSE, gates_GSE), -1),
            own_GS={"dropped_choices": dropped_GS / self.p.k},
            router_loss=router_loss,
            tokens_of_mean=context.tokens_of_mean,
        )
        return Gates(choices, statistics)

    def _weighted(self, choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
        """Returns the choices with gates as the settings want them."""
        factor_GS = self.p.scale
        if self.p.normalized:
            total_GS = tf.add_n([choice.gate_GS for choice in choices])
            factor_GS = self.p.scale / tf.maximum(total_GS, _SMALLEST_TOTAL)
        return tuple(
            dataclasses.replace(choice, gate_GS=choice.gate_GS * factor_GS) for choice in choices
        )


def top_k(
    scores_GSE: tf.Tensor, ranked_GSE: tf.Tensor, valid_GS: tf.Tensor, capacity: int, k: int
) -> tuple[Choice, ...]:
    """Returns k choices of each token, whose gates are scores.

    The experts are the highest in `ranked_GSE`, where lower indices win ties. They take
    tokens in the order of Algorithm 1: all first choices, then all second ones, and so on.
    """
    num_experts = scores_GSE.shape[-1]
    choices = []
    taken_GE = tf.zeros_like(scores_GSE[:, 0])
    for _ in range(k):
        expert_GS = tf.argmax(ranked_GSE, -1, output_type=tf.int32)
        expert_GSE = tf.one_hot(expert_GS, num_experts)
        mask_GSE = expert_GSE * valid_GS[..., None]
        gate_GS = tf.reduce_sum(scores_GSE * mask_GSE, -1)

        position_GS = gating.positions(mask_GSE, mask_GSE, taken_GE)
        choices.append(gating.choice_of(mask_GSE, expert_GS, gate_GS, position_GS, 1.0, capacity))

        # The next choice is another expert, and its places begin after the taken ones.
        taken_GE += tf.reduce_sum(mask_GSE, 1)
        ranked_GSE = tf.where(expert_GSE > 0, ranked_GSE.dtype.min, ranked_GSE)
    return tuple(choices)


def bias_gradient(bias_E: tf.Tensor, count_E: tf.Tensor) -> tf.Tensor:
    """Returns 0, a scalar whose gradient by the bias is an expert's count less the mean of all.

    As a part of the loss, it moves the biases: by the sum over all that a step adds up, be it a
    pipeline's microbatches or the parts of a batch.
    """
    excess_E = tf.stop_gradient(count_E - tf.reduce_mean(count_E))
    linear = tf.reduce_sum(excess_E * bias_E)
    return linear - tf.stop_gradient(linear)
