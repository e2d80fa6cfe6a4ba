"""Model flops: the floating-point operations that a training step mathematically needs.

These are the matrix products alone, with the experts that a token has. They leave out what a
program does besides: unused capacity, dispatch and combine by einsum, softmaxes, the
optimizer.
"""

from __future__ import annotations

import math

from lingvo_gshard.model.translation import TranslationTask


def train_step_flops(task: TranslationTask, batch: int, source_len: int, target_len: int) -> float:
    """Returns the operations of one step, forward and backward, on rows without padding."""
    products = 0.0
    for path, spec in task.weight_specs.FlattenItems():
        # Vectors and embeddings are added or looked up, not multiplied.
        if len(spec.axes) < 2 or "embedding" in path:
            continue
        tokens = batch * (source_len if reads_source(path) else target_len)
        products += tokens * math.prod(spec.shape) * spec.share_used
    products += _attention(task, batch, source_len, target_len)

    # A multiplication and an addition for each weight and token; backward takes twice forward.
    return 2 * 3 * products


def reads_source(path: str) -> bool:
    """Returns whether the weight of this path is multiplied by the source's tokens."""
    is_memory = path.endswith(("source_attention.wk", "source_attention.wv"))
    return path.startswith("encoder") or is_memory


def _attention(task: TranslationTask, batch: int, source_len: int, target_len: int) -> float:
    """Returns the products of queries with keys, and of probabilities with values."""
    encoder_pairs = source_len * source_len
    decoder_pairs = target_len * (target_len + source_len)

    products = 0.0
    for stack, pairs in ((task.p.encoder, encoder_pairs), (task.p.decoder, decoder_pairs)):
        width = stack.layer.attention.num_heads * stack.layer.attention.head_dim
        products += 2.0 * batch * stack.num_layers * pairs * width
    return products
