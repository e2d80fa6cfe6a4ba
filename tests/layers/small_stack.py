"""A small stack of Transformer layers, and inputs for it.

B batch, L length, T source length, M model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gshard.core.hyperparams import InstantiableParams
from lingvo_gshard.layers import attention
from lingvo_gshard.layers.stack import TransformerStack
from lingvo_gshard.layers.transformer import Attended
from tests.layers import building

B, L, T, M = 2, 4, 6, 8


def params(
    num_layers: int = 4, has_source: bool = False, has_experts: bool = True, **settings: Any
) -> InstantiableParams:
    """The Params of a stack: of a decoder with `has_source`."""
    p = TransformerStack.Params().Set(dim=M, num_layers=num_layers, **settings)
    p.layer.has_source = has_source
    p.layer.attention.Set(num_heads=2, head_dim=3)
    p.dense.hidden_dim = 10
    if has_experts:
        p.moe.Set(hidden_dim=5, num_experts=3, group_size=L)
    else:
        p.moe = None
    return p


def stack(**settings: Any) -> TransformerStack:
    """The stack of `params`, to run eagerly."""
    return params(**settings).Instantiate(building.Unannotated(), "stack")


def x_BLM() -> tf.Tensor:
    """Random activations."""
    return _normal(1, (B, L, M))


def encoded_BTM() -> tf.Tensor:
    """A random source."""
    return _normal(2, (B, T, M))


def attended(encoded: tf.Tensor | None = None) -> Attended:
    """Valid tokens attend to the tokens before them, and to the whole source, if it is given."""
    return Attended(
        mask=tf.tile(attention.causal_mask(L), [B, 1, 1]),
        valid_mask=tf.ones([B, L]),
        source_mask=None if encoded is None else tf.ones([B, L, T]),
        encoded=encoded,
    )


def _normal(seed: int, shape: tuple[int, ...]) -> tf.Tensor:
    return tf.constant(np.random.default_rng(seed).standard_normal(shape), tf.float32)
