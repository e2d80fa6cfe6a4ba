"""Model flops: the arithmetic that the mathematics of a training step asks for.

Matrix products alone, two experts a token; not what a program does beyond that: capacity that
stays empty, dispatch and combine by one-hot products, softmaxes, the optimizer.
"""

from __future__ import annotations

import math

from lingvo_gshard.model.translation import TranslationTask

# A product and a sum a weight and token; the backward pass does twice the forward's.
_FORWARD, _TRAINING = 2, 3
_EXPERTS_PER_TOKEN = 2


def train_step_flops(task: TranslationTask, batch: int, source_len: int, target_len: int) -> float:
    """Floating-point operations of one step on full rows, forward and backward.

    Args:
      task: the model.
      batch: B, rows.
      source_len: T, tokens of a row.
      target_len: L, tokens of a row.
    """
    source, target = batch * source_len, batch * target_len
    products = 0.0
    for path, spec in task.weight_specs.FlattenItems():
        if len(spec.axes) < 2 or "embedding" in path:
            continue  # Looked up or added, not multiplied.
        tokens = source if _reads_source(path) else target
        experts = dict(zip(spec.dims, spec.shape, strict=True)).get("E")
        share = _EXPERTS_PER_TOKEN / experts if experts else 1.0
        products += tokens * math.prod(spec.shape) * share
    products += _attention(task, batch, source_len, target_len)
    return _TRAINING * _FORWARD * products


def _reads_source(path: str) -> bool:
    memory = path.endswith(("source_attention.wk", "source_attention.wv"))
    return path.startswith("encoder") or memory


def _attention(task: TranslationTask, batch: int, source_len: int, target_len: int) -> float:
    """Products of queries with keys and of probabilities with values."""
    pairs = {
        "encoder": source_len * source_len,
        "decoder": target_len * target_len + target_len * source_len,
    }
    total = 0.0
    for name, count in pairs.items():
        stack = task.p.Get(name)
        attention = stack.layer.attention
        width = attention.num_heads * attention.head_dim
        total += 2.0 * batch * stack.num_layers * count * width
    return total
