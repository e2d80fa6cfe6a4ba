"""Model flops: the floating-point operations that a training step mathematically needs.

These are the matrix products alone, with the experts that a token has. They leave out what a
program does besides: unused capacity, dispatch and combine by einsum, softmaxes, the
optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap


def train_step_flops(
    weights: NestedMap,
    stacks: Sequence[Params],
    reads_source: Callable[[str], bool],
    rows: int,
    source_len: int,
    target_len: int,
) -> float:
    """Returns the operations of a Transformer's step, forward and backward, on full rows.

    Args:
      weights: The specs of all weights.
      stacks: The settings of its stacks; the last one attends to what is before it, too.
      reads_source: Whether the weight of a path is multiplied by the source's tokens.
      rows: The rows of a batch.
      source_len: The tokens of a row's source; 0 without one.
      target_len: The tokens of a row that are predicted.
    """
    products = 0.0
    for path, spec in weights.FlattenItems():
        # Vectors and embeddings are added or looked up, not multiplied; some biases have two dims.
        if len(spec.axes) < 2 or "embedding" in path or path.endswith("_bias"):
            continue
        tokens = rows * (source_len if reads_source(path) else target_len)
        products += tokens * math.prod(spec.shape) * spec.share_used
    products += _attention(stacks, rows, source_len, target_len)

    # A multiplication and an addition for each weight and token; backward takes twice forward.
    return 2 * 3 * products


def _attention(stacks: Sequence[Params], rows: int, source_len: int, target_len: int) -> float:
    """Returns the products of queries with keys, and of probabilities with values."""
    # Each stack attends to its own rows, and the last one to the source as well.
    *encoders, _ = stacks
    pairs = [source_len * source_len for _ in encoders]
    pairs.append(target_len * (target_len + source_len))

    products = 0.0
    for stack, pairs_of_a_row in zip(stacks, pairs, strict=True):
        width = stack.layer.attention.num_heads * stack.layer.attention.head_dim
        products += 2.0 * rows * stack.num_layers * pairs_of_a_row * width
    return products
