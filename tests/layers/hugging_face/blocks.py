"""Computes layers of T5 by Hugging Face's code, as numbers for tests.

Run it where torch and transformers are installed, in the root of the checkout:

    python -m tests.layers.hugging_face.blocks

It writes a file for each stack beside itself: random weights under the names of their module, `x`,
the output `y` of one layer, and the buckets of distances. torch 2.13.0 and transformers
4.55.4 made the files here.

B batch, L length, M model, N heads, D head size, H hidden.
"""

import pathlib

import numpy as np
import torch
from transformers.models.t5 import modeling_t5

B, L, M, N, D, H = 2, 7, 12, 3, 4, 20
_HERE = pathlib.Path(__file__).parent


def main() -> None:
    """Writes all files."""
    torch.manual_seed(0)
    with torch.no_grad():
        write("t5_encoder", *_t5(is_decoder=False))
        write("t5_decoder", *_t5(is_decoder=True))


def _t5(is_decoder):
    """A layer with T5's relative positions and GEGLU, without its attention to a source."""
    config = modeling_t5.T5Config(
        d_model=M,
        d_kv=D,
        d_ff=H,
        num_heads=N,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=5,
        feed_forward_proj="gated-gelu",
        is_decoder=is_decoder,
        dropout_rate=0.0,
    )
    self_attention = modeling_t5.T5LayerSelfAttention(config, has_relative_attention_bias=True)
    layer = randomized(torch.nn.ModuleList([self_attention, modeling_t5.T5LayerFF(config)]))
    x = torch.randn(B, L, M)
    bias = self_attention.SelfAttention.compute_bias(L, L)
    mask = _causal() if is_decoder else 0.0
    hidden = self_attention(x, position_bias=bias + mask, cache_position=torch.arange(L))[0]

    # Buckets of distances beyond x's.
    distances = torch.arange(-300, 301)
    buckets = self_attention.SelfAttention._relative_position_bucket(
        distances, bidirectional=not is_decoder, num_buckets=32, max_distance=128
    )
    y = layer[1](hidden)
    return layer, {"x": x, "y": y, "distances": distances, "buckets": buckets}


def randomized(layer):
    """Gives all weights different values, norms and biases included."""
    for weight in layer.parameters():
        scale = 0.5 if weight.ndim < 2 else weight.shape[-1] ** -0.5
        weight.copy_(scale * torch.randn(weight.shape) + (weight.ndim < 2) * 0.7)
    return layer.eval()


def _causal():
    """Returns 0 where a query may attend to a key, and a large negative number elsewhere."""
    return torch.triu(torch.full((L, L), -1e9), 1)[None, None]


def write(name, layer, arrays):
    """Writes a file with the weights under their own names, and arrays under theirs."""
    weights = {path: weight.detach().numpy() for path, weight in layer.named_parameters()}
    arrays = {key: value.detach().numpy() for key, value in arrays.items()}
    np.savez_compressed(_HERE / f"{name}.npz", **weights, **arrays)
    print(name, sorted(weights))


if __name__ == "__main__":
    main()
