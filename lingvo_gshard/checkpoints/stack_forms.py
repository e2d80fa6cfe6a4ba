"""The forms of stacks, by the paths of their weights.

layers/stack.py names the weights of a stack by the way in which the program applies its layers. The
weight PATH of layer i in the stack theta.encoder is

    UNROLLED   theta.encoder.layers[i].PATH
    LOOP       [r] of theta.encoder.block[j].PATH, with i = F + r * J + j

A block has J layers: one if all layers are dense, and two if every second layer has experts. In a
LOOP, the F layers before the first block, if any, have the paths of UNROLLED.

R blocks, J layers of a block, F layers before the first block.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

# The groups are the stack, its form, the number in brackets, and the weight's path in its layer.
LAYER = re.compile(r"(.+?)\.(layers|block)\[(\d+)\]\.(.+)")
_UNROLLED = "layers"
LOOP = "block"


@dataclasses.dataclass(frozen=True)
class Form:
    """The form of one stack."""

    num_layers: int
    num_first: int  # F; all layers if it is UNROLLED.
    block_size: int  # J; 0 if it is UNROLLED.

    @property
    def kind(self) -> tuple[int, int]:
        """What the paths depend on besides the number of layers."""
        return (self.num_first, self.block_size) if self.block_size else (0, 0)


def layers_of(
    path: str, shape: Sequence[int], forms: Mapping[str, Form]
) -> tuple[str, tuple[int, ...]] | None:
    """Returns the path of a weight's stack, and the numbers of the weight's layers in it.

    In a LOOP, a weight belongs to one layer of each block. `forms` has the form of each stack.
    Returns None for a weight that is not in a stack.
    """
    layer = LAYER.fullmatch(path)
    if layer is None:
        return None
    stack, kind, number, _ = layer.groups()
    if kind != LOOP:
        return stack, (int(number),)
    form = forms[stack]
    first = form.num_first + int(number)
    return stack, tuple(first + r * form.block_size for r in range(shape[0]))


def forms_of(arrays: Mapping[str, Any]) -> dict[str, Form]:
    """Returns the form of each stack by its path, given its weights, or their specs."""
    counts: dict[tuple[str, str], int] = {}  # The number of layers, in a LOOP of each block.
    blocks: dict[str, int] = {}  # The number of blocks, R, of each LOOP.
    for path, array in arrays.items():
        layer = LAYER.fullmatch(path)
        if layer is None:
            continue
        stack, kind, number, _ = layer.groups()
        counts[stack, kind] = max(counts.get((stack, kind), 0), int(number) + 1)
        if kind == LOOP:
            blocks[stack] = array.shape[0]

    forms = {}
    for stack in dict.fromkeys(stack for stack, _ in counts):
        num_first = counts.get((stack, _UNROLLED), 0)
        block_size = counts.get((stack, LOOP), 0)
        num_layers = num_first + block_size * blocks.get(stack, 0)
        forms[stack] = Form(num_layers, num_first, block_size)
    return forms
