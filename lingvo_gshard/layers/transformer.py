"""A pre-norm Transformer layer, whose feed-forward may be an MoE layer (section 2.1, Figure 3).

B batch, L length (of the target in a decoder), T source length, M model, k beam size, P places of
a flat beam.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from lingvo_gshard.core.base_layer import BaseLayer
from lingvo_gshard.core.hyperparams import REQUIRED, InstantiableParams, setting
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.attention import MultiHeadAttention
from lingvo_gshard.layers.context import Context, LayerReport
from lingvo_gshard.layers.dropout import DropoutLayer
from lingvo_gshard.layers.feed_forward import FeedForwardLayer
from lingvo_gshard.layers.moe import MoELayer
from lingvo_gshard.layers.norms import LayerNorm, Norm, RMSNorm
from lingvo_gshard.layers.positions import NoPositions
from lingvo_gshard.layers.routing import Routing


@dataclasses.dataclass(frozen=True)
class Attended:
    """The tensors that tokens x [B, L, M] attend to. Masks are float32, 1 where they may."""

    mask: tf.Tensor  # For self-attention: [B, L, L], or [B, k, P] in a flat beam.
    valid_mask: tf.Tensor  # [B, L]: 0 for padding, and for tokens that should not take experts.
    source_mask: tf.Tensor | None = None  # [B, L, T]; None in an encoder.
    encoded: tf.Tensor | None = None  # [B, T, M], the source; None in an encoder or a flat beam.
    # int32 positions of x, [B, L], for layers whose self-attention reads them, and of the places of
    # a flat beam, [B, P], where these are its keys.
    positions: tf.Tensor | None = None
    key_positions: tf.Tensor | None = None
    # Whether a token attends to its whole sentence, the tokens after it included: an encoder's do.
    whole_sentences: bool = False
    first_pieces: tf.Tensor | None = None  # Context.first_pieces, in an encoder.

    @property
    def sentence_mask(self) -> tf.Tensor | None:
        """Context.sentence_mask: [B, L, L], or None where tokens see only a part of a sentence."""
        return self.mask if self.whole_sentences else None


class TransformerLayer(BaseLayer):
    """Self-attention, in a decoder attention to the source, and a feed-forward or MoE layer.

    Each of them takes its input through a norm and adds its output, after dropout, to that input:
    x + dropout(f(norm(x))). cached_decoding.py applies the layer to one token at a time.
    """

    self_norm: LayerNorm | RMSNorm
    self_attention: MultiHeadAttention
    self_dropout: DropoutLayer
    source_norm: LayerNorm | RMSNorm
    source_attention: MultiHeadAttention
    source_dropout: DropoutLayer
    feed_forward_norm: LayerNorm | RMSNorm
    feed_forward: FeedForwardLayer | MoELayer
    feed_forward_dropout: DropoutLayer

    class Params(BaseLayer.Params):
        dim: int = setting(REQUIRED, "M, the model dimension.")
        norm: Norm.Params = setting(LayerNorm.Params(), "LayerNorm.Params() or RMSNorm.Params().")
        attention: MultiHeadAttention.Params = setting(
            MultiHeadAttention.Params(), "Self- and source attention."
        )
        feed_forward: InstantiableParams = setting(
            REQUIRED, "FeedForwardLayer.Params() or MoELayer.Params()."
        )
        has_source: bool = setting(False, "Whether this is a decoder's layer.")
        residual_dropout: DropoutLayer.Params = setting(
            DropoutLayer.Params(), "Dropout before each residual sum."
        )

    p: Params

    def __init__(self, params: Params, *args: Any) -> None:
        super().__init__(params, *args)
        p = self.p
        # Params are copied where they become a child's, so each child has its own.
        norm = p.norm.Copy().Set(dim=p.dim)
        attention = p.attention.Copy().Set(dim=p.dim)

        self.CreateChild("self_norm", norm)
        self.CreateChild("self_attention", attention)
        self.CreateChild("self_dropout", p.residual_dropout)

        if p.has_source:
            self.CreateChild("source_norm", norm)
            # Positions in two different texts do not have a distance.
            source_attention = attention.Copy().Set(positions=NoPositions.Params())
            self.CreateChild("source_attention", source_attention)
            self.CreateChild("source_dropout", p.residual_dropout)

        self.CreateChild("feed_forward_norm", norm)
        self.CreateChild("feed_forward", p.feed_forward.Copy().Set(dim=p.dim))
        self.CreateChild("feed_forward_dropout", p.residual_dropout)

    def FProp(
        self, theta: NestedMap, x: tf.Tensor, attended: Attended, context: Context
    ) -> tuple[tf.Tensor, LayerReport]:
        """Applies the layer to whole sequences x [B, L, M]; returns [B, L, M] and a report."""
        # Self-attention.
        h = self.self_norm.FProp(theta.self_norm, x)
        positions = attended.positions
        memory = self.self_attention.Project(theta.self_attention, h, context, positions)
        h = self.self_attention.FProp(
            theta.self_attention, h, memory, attended.mask, context, positions
        )
        h = self.self_dropout.FProp(theta.self_dropout, h, "BLM", context)
        x = self.annotate(x + h, "BLM")

        # Source attention, in a decoder.
        if attended.encoded is not None:
            h = self.source_norm.FProp(theta.source_norm, x)
            memory = self.source_attention.Project(
                theta.source_attention, attended.encoded, context
            )
            h = self.source_attention.FProp(
                theta.source_attention, h, memory, attended.source_mask, context
            )
            h = self.source_dropout.FProp(theta.source_dropout, h, "BLM", context)
            x = self.annotate(x + h, "BLM")

        # Feed-forward, or experts.
        context = dataclasses.replace(
            context, sentence_mask=attended.sentence_mask, first_pieces=attended.first_pieces
        )
        x, routing = self.FeedForward(theta, x, attended.valid_mask, context)

        # Its growth is a sign of instability (section 4.3).
        mean_square = tf.reduce_mean(tf.square(tf.cast(x, tf.float32)))
        return x, LayerReport(mean_square, routing)

    def FeedForward(
        self, theta: NestedMap, x: tf.Tensor, valid_mask: tf.Tensor, context: Context
    ) -> tuple[tf.Tensor, Routing | None]:
        """Applies the feed-forward or MoE layer to x [B, L, M], with its norm and residual.

        Returns [B, L, M], and how the tokens were routed if there are experts. Tokens where
        `valid_mask`, float32 [B, L], is 0 do not take experts.
        """
        routing: Routing | None = None
        h = self.feed_forward_norm.FProp(theta.feed_forward_norm, x)
        if isinstance(self.feed_forward, MoELayer):
            h, routing = self.feed_forward.FProp(theta.feed_forward, h, valid_mask, context)
        else:
            h = self.feed_forward.FProp(theta.feed_forward, h, context)
        h = self.feed_forward_dropout.FProp(theta.feed_forward_dropout, h, "BLM", context)
        return self.annotate(x + h, "BLM"), routing
