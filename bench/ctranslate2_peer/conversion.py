"""Converts the weights of a dense Transformer of this project to a CTranslate2 model.

The layers are the same: norms come first, projections lack biases, the activation is ReLU, rows of
the tables are multiplied by sqrt(M), and the softmax has a separate table.
"""

import dataclasses
import pathlib

import numpy as np
from ctranslate2.specs import attention_spec, common_spec, transformer_spec

_FIRST_PIECES = ("<pad>", "<s>", "</s>", "<unk>")


@dataclasses.dataclass(frozen=True)
class DenseSizes:
    """The sizes that cannot be read off the arrays.

    Attributes:
      num_layers: the number of layers of the encoder, and of the decoder.
      num_heads: N.
      norm_epsilon: the number that norms add to the variance.
    """

    num_layers: int
    num_heads: int
    norm_epsilon: float


@dataclasses.dataclass(frozen=True)
class _Weights:
    """The arrays below a path such as decoder.layers.0; a projection is [out, in]."""

    arrays: dict[str, np.ndarray]
    path: str = ""

    def below(self, name: str) -> "_Weights":
        return _Weights(self.arrays, f"{self.path}{name}.")

    def take(self, name: str) -> np.ndarray:
        """Removes and returns an array; the remaining arrays have not been converted."""
        return self.arrays.pop(f"{self.path}{name}")


def convert(sizes: DenseSizes, weights: pathlib.Path, out: pathlib.Path) -> None:
    """Writes a model to the folder `out`.

    Args:
      sizes: the model's sizes.
      weights: an .npz file that bench.peer wrote, including `sinusoids` [positions, M].
      out: a folder that does not exist yet.

    Raises:
      ValueError: CTranslate2's model lacks some of the weights.
    """
    arrays = dict(np.load(weights))
    sinusoids = arrays.pop("sinusoids")
    root = _Weights(arrays)

    layers = (sizes.num_layers, sizes.num_layers)
    spec = transformer_spec.TransformerSpec.from_config(layers, sizes.num_heads, pre_norm=True)
    spec.config.layer_norm_epsilon = sizes.norm_epsilon
    spec.config.add_source_eos = False

    source_table = root.take("source_embedding.weight")
    target_table = root.take("target_embedding.weight")
    spec.encoder.embeddings[0].weight = source_table
    spec.decoder.embeddings.weight = target_table
    spec.decoder.projection.weight = root.take("softmax.weight")
    _fill_stack(spec.encoder, root.below("encoder"), sinusoids)
    _fill_stack(spec.decoder, root.below("decoder"), sinusoids)
    if arrays:
        raise ValueError(f"CTranslate2's model lacks the weights {', '.join(sorted(arrays))}.")

    spec.register_source_vocabulary(_pieces(len(source_table)))
    spec.register_target_vocabulary(_pieces(len(target_table)))
    spec.validate()
    out.mkdir()
    spec.save(str(out))


def piece(index: int) -> str:
    """Returns the text of a piece, by its id."""
    return _FIRST_PIECES[index] if index < len(_FIRST_PIECES) else f"t{index}"


def index_of(text: str) -> int:
    """Returns the id of a piece, by its text."""
    if text in _FIRST_PIECES:
        return _FIRST_PIECES.index(text)
    return int(text.removeprefix("t"))


def _pieces(count: int) -> list[str]:
    return [piece(index) for index in range(count)]


def _fill_stack(
    stack: transformer_spec.TransformerEncoderSpec | transformer_spec.TransformerDecoderSpec,
    weights: _Weights,
    sinusoids: np.ndarray,
) -> None:
    stack.position_encodings.encodings = sinusoids
    _fill_norm(stack.layer_norm, weights.below("norm"))

    for index, layer in enumerate(stack.layer):
        ours = weights.below(f"layers.{index}")

        query_key_value = ours.take("self_attention.project.weight")
        _fill_norm(layer.self_attention.layer_norm, ours.below("self_norm"))
        layer.self_attention.linear[0].weight = query_key_value
        layer.self_attention.linear[1].weight = ours.take("self_attention.out.weight")

        if isinstance(stack, transformer_spec.TransformerDecoderSpec):
            _fill_source_attention(layer.attention, ours)

        _fill_norm(layer.ffn.layer_norm, ours.below("feed_forward_norm"))
        layer.ffn.linear_0.weight = ours.take("feed_forward.wi.weight")
        layer.ffn.linear_1.weight = ours.take("feed_forward.wo.weight")


def _fill_source_attention(
    attention: attention_spec.MultiHeadAttentionSpec, weights: _Weights
) -> None:
    query, key, value = np.split(weights.take("source_attention.project.weight"), 3)
    _fill_norm(attention.layer_norm, weights.below("source_norm"))
    attention.linear[0].weight = query
    attention.linear[1].weight = np.concatenate([key, value])
    attention.linear[2].weight = weights.take("source_attention.out.weight")


def _fill_norm(norm: common_spec.LayerNormSpec, weights: _Weights) -> None:
    norm.gamma = weights.take("weight")
    norm.beta = weights.take("bias")
