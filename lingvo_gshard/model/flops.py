"""Model flops: the floating-point operations that a training step mathematically needs.

These are the matrix products alone, with two experts for each token, or the only one. They leave
out what a program does besides: unused capacity, dispatch and combine by einsum, softmaxes, the
optimizer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lingvo_gshard.core.base_layer import WeightSpec

if TYPE_CHECKING:
    from lingvo_gshard.model.task import Task

_EXPERTS_OF_A_TOKEN = 2


def train_step_flops(task: Task, rows: int, source_len: int, target_len: int) -> float:
    """Returns the operations of a Transformer's step, forward and backward, on full rows.

    See Task.STACKS; a row has no source if `source_len` is 0.
    """
    products = 0.0
    for path, spec in task.weight_specs.FlattenItems():
        # Vectors and embeddings are added or looked up, not multiplied.
        if len(spec.axes) < 2 or "embedding" in path:
            continue
        tokens = rows * (source_len if task.ReadsSource(path) else target_len)
        products += tokens * math.prod(spec.shape) * _share_used(spec)
    products += _attention(task, rows, source_len, target_len)

    # A multiplication and an addition for each weight and token; backward takes twice forward.
    return 2 * 3 * products


def _share_used(spec: WeightSpec) -> float:
    """Returns the share of a weight that one token is multiplied by: that of its experts."""
    if "E" not in spec.dims:
        return 1.0
    experts = spec.shape[spec.dims.index("E")]
    return min(_EXPERTS_OF_A_TOKEN, experts) / experts


def _attention(task: Task, rows: int, source_len: int, target_len: int) -> float:
    """Returns the products of queries with keys, and of probabilities with values."""
    # Each stack attends to its own rows, and the last one to the source as well.
    *encoders, decoder = task.STACKS
    pairs = dict.fromkeys(encoders, source_len * source_len)
    pairs[decoder] = target_len * (target_len + source_len)

    products = 0.0
    for name, pairs_of_a_row in pairs.items():
        stack = task.p.Get(name)
        width = stack.layer.attention.num_heads * stack.layer.attention.head_dim
        products += 2.0 * rows * stack.num_layers * pairs_of_a_row * width
    return products
