"""Which layers of a stack have experts, and the blocks that repeat."""

from __future__ import annotations

import dataclasses

from lingvo_gshard.core.hyperparams import AnyParams


@dataclasses.dataclass(frozen=True)
class LayerOrder:
    """The kinds of a stack's layers, as first ones and then blocks, which are all alike."""

    have_experts: tuple[bool, ...]  # By layer.
    num_first: int  # The layers before the first block.
    block_size: int  # The layers of a block.

    @property
    def num_layers(self) -> int:
        """The number of all layers."""
        return len(self.have_experts)

    @property
    def num_blocks(self) -> int:
        """The number of whole blocks."""
        return (self.num_layers - self.num_first) // self.block_size

    @property
    def is_whole(self) -> bool:
        """Whether no layer is left over after the last block."""
        return self.num_first + self.num_blocks * self.block_size == self.num_layers

    def parts(self) -> list[range]:
        """Returns the layers of each part in order: each first layer alone, then each block.

        The last block may be shorter.
        """
        first = [range(i, i + 1) for i in range(self.num_first)]
        starts = range(self.num_first, self.num_layers, self.block_size)
        return first + [range(i, min(i + self.block_size, self.num_layers)) for i in starts]


def layer_order(p: AnyParams, path: str) -> LayerOrder:
    """Returns the order of the layers of a TransformerStack with these Params, called `path`.

    Raises ValueError for layers that the stack lacks.
    """
    if p.num_layers < 1:
        raise ValueError(f"{path}: num_layers must be 1 or more, got {p.num_layers}.")
    if p.moe_every < 1:
        raise ValueError(f"{path}: moe_every must be 1 or more, got {p.moe_every}.")
    if p.moe is None:
        return LayerOrder((False,) * p.num_layers, 0, 1)

    # Every n-th layer: a block ends with it.
    if p.moe_layers is None:
        every = p.moe_every
        return LayerOrder(tuple(i % every == every - 1 for i in range(p.num_layers)), 0, every)

    if not set(p.moe_layers) <= set(range(p.num_layers)):
        raise ValueError(
            f"{path}: moe_layers must be layers from 0 to {p.num_layers - 1}, got {p.moe_layers}."
        )
    return _shortest(tuple(i in p.moe_layers for i in range(p.num_layers)))


def _shortest(kinds: tuple[bool, ...]) -> LayerOrder:
    """Returns the order with the fewest layers up to the end of the first block.

    Of several, it is the one with the fewest layers before the first block.
    """
    orders = []
    for first in range(len(kinds)):
        rest = kinds[first:]
        for size in range(1, len(rest) + 1):
            if len(rest) % size == 0 and rest == rest[:size] * (len(rest) // size):
                orders.append(LayerOrder(kinds, first, size))
                break
    return min(orders, key=lambda order: order.num_first + order.block_size)
