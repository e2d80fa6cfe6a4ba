"""The sizes of the peer's model, which its process gets as JSON."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes and settings of an MoE Transformer; letters are the paper's.

    Attributes:
      num_layers: the number of layers of the encoder, and of the decoder; odd layers have experts.
      model_dim: M.
      hidden_dim: H.
      num_heads: N.
      head_dim: D.
      num_experts: E.
      group_size: S, in tokens.
      capacity: C, the most tokens of a group that an expert can take.
      source_vocab_size: the number of source pieces.
      target_vocab_size: the number of target pieces.
      dropout: the rate of every dropout.
      label_smoothing: the probability that is spread over all pieces.
      aux_loss_weight: k, the weight of the auxiliary loss.
      random_second: whether a second expert is used with probability 2 * g2, or always.
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
