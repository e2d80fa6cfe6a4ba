"""A language model small enough to compile in seconds, its packed batches and its prompts.

B batch, L length, T length of prompts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lingvo_gshard.core.hyperparams import InstantiableParams
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model.language_model import LanguageModelTask

B, L, T = 8, 7, 5
VOCAB = 23
M, H, N, D, E = 8, 10, 2, 4, 8


def task_params(num_layers: int = 2, **settings: Any) -> InstantiableParams:
    """A decoder with experts in every other layer, of a few thousand weights."""
    p = LanguageModelTask.Params().Set(
        vocab_size=VOCAB, dim=M, label_smoothing=0.1, aux_loss_weight=0.01
    )
    p.input_dropout.rate = 0.2
    p.decoder.Set(num_layers=num_layers)
    p.decoder.dense.hidden_dim = H
    p.decoder.layer.attention.Set(num_heads=N, head_dim=D)
    p.decoder.layer.attention.dropout.rate = 0.2
    p.decoder.layer.residual_dropout.rate = 0.2
    p.decoder.moe.Set(hidden_dim=H, num_experts=E, group_size=L)
    return p.Set(**settings)


def random_batch(seed: int) -> NestedMap:
    """Rows of two documents and padding."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 4, (B, 2))
    rows = []
    for first, second in lengths:
        padding = L - first - second
        segments = np.repeat([1, 2, 0], [first, second, padding])
        positions = np.concatenate([np.arange(first), np.arange(second), np.zeros(padding)])
        labels = rng.integers(4, VOCAB, L) * (segments > 0)
        inputs = np.where(positions == 0, 1, np.roll(labels, 1)) * (segments > 0)
        rows.append((inputs, segments, positions, labels))

    ids, segments, positions, labels = np.array(rows, np.int32).transpose(1, 0, 2)
    return NestedMap(
        features=NestedMap(ids=ids, segment_ids=segments, positions=positions),
        labels=NestedMap(
            labels=labels,
            weights=(segments > 0).astype(np.float32),
            num_bytes=(segments > 0).astype(np.int32) * 3,
        ),
    )


def prompts(seed: int, pad_last: bool = False) -> NestedMap:
    """BOS and up to T - 1 tokens in each row; the last row may be padding."""
    rng = np.random.default_rng(seed)
    is_token = np.arange(T) < rng.integers(1, T + 1, (B, 1))
    is_token[-1] &= not pad_last
    ids = rng.integers(4, VOCAB, (B, T))
    ids[:, 0] = 1
    return NestedMap(
        ids=(ids * is_token).astype(np.int32),
        segment_ids=is_token.astype(np.int32),
        positions=np.tile(np.arange(T, dtype=np.int32), (B, 1)),
        seeds=np.stack([np.full(B, seed), np.arange(B)], 1).astype(np.int32),
    )
