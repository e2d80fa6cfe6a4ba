"""The Mixture-of-Experts layer in PyTorch: top-2 gating, dispatch by index, batched experts.

B batch, L length, T = B * L tokens, G groups, S tokens of a group, E experts, C capacity, M model,
H hidden.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.torch_peer.sizes import Sizes


class MoE(nn.Module):
    """Sends each token to its top two experts, which have capacity C in each group.

    Padding is not supported.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        e = sizes.num_experts
        m = sizes.model_dim
        h = sizes.hidden_dim
        self.wg = nn.Parameter(torch.empty(m, e))
        self.wi = nn.Parameter(torch.empty(e, m, h))
        self.wo = nn.Parameter(torch.empty(e, h, m))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the output, [B, L, M] like x, and the auxiliary loss."""
        sizes = self.sizes
        tokens = x.reshape(-1, sizes.model_dim)
        slots, weights, aux_loss = self._route(tokens)

        # The last of the num_slots + 1 rows takes the tokens that overflow; it is read as zeros.
        num_slots = sizes.num_experts * tokens.shape[0] // sizes.group_size * sizes.capacity
        rows = tokens.expand(2, *tokens.shape).reshape(-1, sizes.model_dim)
        inputs = rows.new_zeros(num_slots + 1, sizes.model_dim).index_copy(0, slots, rows)

        hidden = torch.bmm(inputs[:-1].view(sizes.num_experts, -1, sizes.model_dim), self.wi)
        outputs = torch.bmm(F.relu(hidden), self.wo).view(num_slots, -1)
        outputs = torch.cat([outputs, outputs.new_zeros(1, sizes.model_dim)])

        # The outputs return to their tokens, with the gates as weights.
        taken = F.embedding(slots, outputs).view(2, *tokens.shape)
        y = (taken * weights[..., None].to(taken.dtype)).sum(0)
        return y.view(x.shape), aux_loss

    def _route(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Routes tokens [T, M] to their first and second choices.

        Returns:
          The choices' slots, int64 [2 * T], and weights, [2, T], and the auxiliary loss.
        """
        sizes = self.sizes
        logits = tokens.float() @ self.wg
        gates = torch.softmax(logits, -1).view(-1, sizes.group_size, sizes.num_experts)
        top, experts = gates.topk(2)
        weights = top / top.sum(-1, keepdim=True)

        # In the order [G, 2, S], second choices get their places after all first choices.
        experts = experts.transpose(1, 2)
        weights = weights.transpose(1, 2)
        chosen = F.one_hot(experts.flatten(1), sizes.num_experts)

        # A second expert is used with probability 2 * g2 (lines 17 to 20 of Algorithm 1).
        asked = torch.ones_like(experts, dtype=torch.bool)
        if sizes.random_second and self.training:
            asked[:, 1] = 2.0 * weights[:, 1] > torch.rand_like(weights[:, 1])
        counted = chosen * asked.flatten(1)[..., None]
        places = ((counted.cumsum(1) - counted) * chosen).sum(-1).view(experts.shape)
        kept = asked & (places < sizes.capacity)

        # Slots are ordered by expert, group and place.
        groups = torch.arange(gates.shape[0], device=gates.device).view(-1, 1, 1)
        slots = (experts * gates.shape[0] + groups) * sizes.capacity + places
        last = sizes.num_experts * gates.shape[0] * sizes.capacity
        slots = torch.where(kept, slots, last).transpose(0, 1).flatten()

        # Line 13, averaged over the groups.
        first = chosen[:, : sizes.group_size].float().mean(1)
        aux_loss = (first * gates.mean(1)).mean()
        return slots, (weights * kept).transpose(0, 1).flatten(1), aux_loss
