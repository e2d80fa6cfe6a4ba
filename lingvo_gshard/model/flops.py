"""Model flops: the floating-point operations that a training step mathematically needs.

These are the matrix products alone, with two experts for each token, or the only one. They leave
out what a program does besides: unused capacity, dispatch and combine by einsum, softmaxes, the
optimizer.
"""

import math

from lingvo_gshard.model.translation import TranslationTask


def train_step_flops(task: TranslationTask, batch: int, source_len: int, target_len: int) -> float:
    """The operations of one step, forward and backward, on rows without padding."""
    products = 0.0
    for path, spec in task.weight_specs.FlattenItems():
        if len(spec.axes) < 2 or "embedding" in path:
            continue  # It is looked up or added, not multiplied.
        tokens = batch * (source_len if reads_source(path) else target_len)
        experts = dict(zip(spec.dims, spec.shape, strict=True)).get("E")
        share = min(2, experts) / experts if experts else 1.0
        products += tokens * math.prod(spec.shape) * share
    products += _attention(task, batch, source_len, target_len)
    # A multiplication and an addition for each weight and token; backward takes twice forward.
    return 2 * 3 * products


def reads_source(path: str) -> bool:
    """Returns whether the weight of this path is multiplied by the source's tokens."""
    memory = path.endswith(("source_attention.wk", "source_attention.wv"))
    return path.startswith("encoder") or memory


def _attention(task: TranslationTask, batch: int, source_len: int, target_len: int) -> float:
    """The products of queries with keys, and of probabilities with values."""
    total, pairs = 0.0, (source_len * source_len, target_len * (target_len + source_len))
    for stack, count in zip((task.p.encoder, task.p.decoder), pairs, strict=True):
        width = stack.layer.attention.num_heads * stack.layer.attention.head_dim
        total += 2.0 * batch * stack.num_layers * count * width
    return total
