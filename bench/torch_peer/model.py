"""A pre-norm encoder-decoder Transformer in PyTorch with experts in every other feed-forward layer.

B batch, L target length, T source length, M model, H hidden, N heads, D head size, V vocabulary.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.torch_peer.moe import MoE
from bench.torch_peer.sizes import Sizes

_EPSILON = 1e-6


class Attention(nn.Module):
    """Multi-head attention; projections of the same input share one product."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        self.dropout = sizes.dropout
        self.width = sizes.num_heads * sizes.head_dim
        self.project = nn.Linear(sizes.model_dim, 3 * self.width, bias=False)
        self.out = nn.Linear(self.width, sizes.model_dim, bias=False)

    def forward(self, x: Tensor, memory: Tensor | None, mask: Tensor) -> Tensor:
        """Attends from x [B, L, M] to memory [B, T, M] where mask [B, 1, L, T] is true.

        Without memory, x attends to itself.
        """
        if memory is None:
            q, k, v = self.project(x).chunk(3, -1)
        else:
            w_q, w_kv = self.project.weight.split([self.width, 2 * self.width])
            q = F.linear(x, w_q)
            k, v = F.linear(memory, w_kv).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two projections with a ReLU between them."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.wi = nn.Linear(sizes.model_dim, sizes.hidden_dim, bias=False)
        self.wo = nn.Linear(sizes.hidden_dim, sizes.model_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the output, [B, L, M] like x."""
        return self.wo(F.relu(self.wi(x)))


class Layer(nn.Module):
    """Self-attention, a decoder's attention to the source, and a feed-forward or MoE layer."""

    def __init__(self, sizes: Sizes, *, has_source: bool, has_experts: bool) -> None:
        super().__init__()
        self.self_norm = nn.LayerNorm(sizes.model_dim, _EPSILON)
        self.self_attention = Attention(sizes)
        if has_source:
            self.source_norm = nn.LayerNorm(sizes.model_dim, _EPSILON)
            self.source_attention = Attention(sizes)
        self.feed_forward_norm = nn.LayerNorm(sizes.model_dim, _EPSILON)
        self.feed_forward = MoE(sizes) if has_experts else FeedForward(sizes)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(
        self, x: Tensor, mask: Tensor, source: Tensor | None, source_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | float]:
        """Returns the output, [B, L, M] like x, and the auxiliary loss, 0 without experts."""
        x = x + self.dropout(self.self_attention(self.self_norm(x), None, mask))
        if source is not None:
            attended = self.source_attention(self.source_norm(x), source, source_mask)
            x = x + self.dropout(attended)
        y = self.feed_forward_norm(x)
        aux_loss = 0.0
        y = self.feed_forward(y)
        if isinstance(self.feed_forward, MoE):
            y, aux_loss = y
        return x + self.dropout(y), aux_loss


class Stack(nn.Module):
    """A stack of layers and a final norm."""

    def __init__(self, sizes: Sizes, *, has_source: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Layer(sizes, has_source=has_source, has_experts=i % 2 == 1)
            for i in range(sizes.num_layers)
        )
        self.norm = nn.LayerNorm(sizes.model_dim, _EPSILON)

    def forward(self, x: Tensor, *args: Tensor | None) -> tuple[Tensor, Tensor]:
        """Takes the arguments of Layer and returns its results; auxiliary losses are summed."""
        losses = []
        for layer in self.layers:
            x, aux_loss = layer(x, *args)
            losses.append(aux_loss)
        return self.norm(x), sum(losses)


class Translator(nn.Module):
    """The translation model and its loss on packed rows."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.source_embedding = nn.Embedding(sizes.source_vocab_size, sizes.model_dim)
        self.target_embedding = nn.Embedding(sizes.target_vocab_size, sizes.model_dim)
        self.dropout = nn.Dropout(sizes.dropout)
        self.encoder = Stack(sizes, has_source=False)
        self.decoder = Stack(sizes, has_source=True)
        self.softmax = nn.Linear(sizes.model_dim, sizes.target_vocab_size, bias=False)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Returns the training loss of full rows: int64 [B, T] source_* and [B, L] target_*."""
        source_ids = batch["source_segment_ids"]
        target_ids = batch["target_segment_ids"]
        x = self._embed(self.source_embedding, batch["source_ids"], batch["source_positions"])
        encoded, encoder_aux = self.encoder(x, _same_example(source_ids, source_ids), None, None)
        x = self._embed(self.target_embedding, batch["target_ids"], batch["target_positions"])
        causal = torch.ones(
            2 * target_ids.shape[1:], dtype=torch.bool, device=target_ids.device
        ).tril()
        mask = _same_example(target_ids, target_ids) & causal
        x, decoder_aux = self.decoder(x, mask, encoded, _same_example(target_ids, source_ids))
        nll = F.cross_entropy(
            self.softmax(x).flatten(0, 1),
            batch["target_labels"].flatten(),
            label_smoothing=self.sizes.label_smoothing,
        )
        return nll + self.sizes.aux_loss_weight * (encoder_aux + decoder_aux)

    def _embed(self, table: nn.Embedding, ids: Tensor, positions: Tensor) -> Tensor:
        x = table(ids) * math.sqrt(self.sizes.model_dim)
        return self.dropout(x + _sinusoids(positions, self.sizes.model_dim))


def _same_example(queries: Tensor, keys: Tensor) -> Tensor:
    """Returns whether a query and a key belong to the same example, bool [B, 1, L, T]."""
    return (queries[:, :, None] == keys[:, None, :])[:, None]


def _sinusoids(positions: Tensor, dim: int) -> Tensor:
    """Returns sines and cosines with wavelengths from 2 pi to 20000 pi, [B, L, dim]."""
    rates = 10000.0 ** (-torch.arange(dim // 2, device=positions.device) / (dim // 2 - 1))
    angles = positions[..., None] * rates
    return torch.cat([angles.sin(), angles.cos()], -1)
