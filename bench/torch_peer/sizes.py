"""The sizes of the peer's model: plain numbers that cross a process boundary as JSON."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Sizes:
    """An MoE Transformer's sizes, in the paper's words.

    Attributes:
      num_layers: of the encoder, and as many of the decoder; odd ones have experts.
      model_dim: M.
      hidden_dim: H.
      num_heads: N.
      head_dim: D.
      num_experts: E.
      group_size: S, tokens.
      capacity: C, of an expert in a group.
      source_vocab_size: pieces.
      target_vocab_size: pieces.
      dropout: its rate, everywhere.
      label_smoothing: the share spread over all pieces.
      aux_loss_weight: k.
      random_second: second experts with probability 2 * g2, otherwise always.
    """

    num_layers: int
    model_dim: int
    hidden_dim: int
    num_heads: int
    head_dim: int
    num_experts: int
    group_size: int
    capacity: int
    source_vocab_size: int
    target_vocab_size: int
    dropout: float
    label_smoothing: float
    aux_loss_weight: float
    random_second: bool
