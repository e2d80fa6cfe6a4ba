"""The tensors of an NLLB-MoE or M2M-100 model in transformers, and our weights that they are.

One of our weights is made of one tensor, or of one for each expert and each block of a LOOP. A
tensor of a product is transposed, since torch multiplies by [out, in], and its heads are one dim
with their sizes: q_proj.weight [N * D, M] is our wq [M, N, D].

    theta.encoder.layers[1].feed_forward.wi [E, M, H]
    model.encoder.layers.1.ffn.experts.expert_0.fc1.weight [H, M], and so on for each expert

B batch, M model, N heads, D head size, H hidden, E experts, V vocabulary, R blocks of a LOOP.
"""

import dataclasses
import enum
import itertools
import math
import re

from lingvo_gshard.core.base_layer import STACKED
from lingvo_gshard.sharding.layout import TensorSpec

TABLE = "theta.target_embedding.table"
SOURCE_TABLE = "theta.source_embedding.table"
SOFTMAX = "theta.softmax"


class Family(enum.StrEnum):
    """The model_type of a config.json, of models that we have the layers of."""

    NLLB_MOE = "nllb-moe"
    M2M_100 = "m2m_100"


# Our blocks of a layer, by the names that they have in either family.
_BLOCKS = {
    Family.NLLB_MOE: {
        "self_norm": "self_attn_layer_norm",
        "self_attention": "self_attn",
        "source_norm": "cross_attention_layer_norm",
        "source_attention": "cross_attention",
        "feed_forward_norm": "ff_layer_norm",
        "feed_forward": "ffn.",
    },
    Family.M2M_100: {
        "self_norm": "self_attn_layer_norm",
        "self_attention": "self_attn",
        "source_norm": "encoder_attn_layer_norm",
        "source_attention": "encoder_attn",
        "feed_forward_norm": "final_layer_norm",
        "feed_forward": "",
    },
}
_PROJECTIONS = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "out_proj"}
_PRODUCTS = {"wi": "fc1", "wo": "fc2"}
_NORMS = {"scale": "weight", "bias": "bias"}

_LAYER = re.compile(r"theta\.(encoder|decoder)\.(layers|block)\[(\d+)\]\.(\w+)\.(\w+)")
_FINAL_NORM = re.compile(r"theta\.(encoder|decoder)\.norm\.(scale|bias)")

# What files may hold besides: copies of the table; sinusoids and versions of fairseq's models.
IGNORED = re.compile(
    r"(model\.)?(((encoder|decoder)\.embed_tokens|shared|lm_head)\.weight"
    r"|(encoder|decoder)\.(embed_positions\.weights|version))"
)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A tensor, and the part of one of our weights that it is."""

    index: tuple[int, ...]  # Of the part: its block, its expert, both or neither.
    name: str  # Without `model.`.
    shape: tuple[int, ...]  # Of the tensor.


def pieces(path: str, spec: TensorSpec, family: Family, block_size: int) -> list[Piece]:
    """Returns the tensors of the weight at `path`, in the order of its elements.

    `block_size` is the number of layers of a block in its stack.
    """
    # The leading dims that tensors are counted by.
    counted = [letter for letter in spec.dims[:2] if letter in (STACKED, "E")]
    sizes = spec.shape[: len(counted)]
    shape = _tensor_shape(spec.shape[len(counted) :], spec.dims[len(counted) :])

    tensors = []
    for index in itertools.product(*map(range, sizes)):
        by_letter = dict(zip(counted, index, strict=True))
        name = _name(path, family, by_letter.get(STACKED), block_size, by_letter.get("E"))
        tensors.append(Piece(index, name, shape))
    return tensors


def num_summed(dims: str) -> int:
    """Returns how many first dims of a weight a product sums over: 2 of NDM, 1 of MH and MND."""
    return 2 if dims == "NDM" else 1


def is_transposed(dims: str) -> bool:
    """Returns whether a weight of these dims is the transpose of its tensor."""
    return len(dims) > 1 and dims not in ("VM", "ND", "_H", "_M")


def _tensor_shape(shape: tuple[int, ...], dims: str) -> tuple[int, ...]:
    """Returns the shape of a tensor, given the shape and dims of our part."""
    if dims == "VM":
        return shape
    if not is_transposed(dims):
        return (math.prod(shape),)
    summed = num_summed(dims)
    return (math.prod(shape[summed:]), math.prod(shape[:summed]))


def _name(path: str, family: Family, block: int | None, block_size: int, expert: int | None) -> str:
    """Returns the name of the tensor of one layer and expert; ValueError if there is none."""
    if path == SOFTMAX:
        return "lm_head.weight"
    norm = _FINAL_NORM.fullmatch(path)
    if norm is not None:
        return f"{norm[1]}.layer_norm.{_NORMS[norm[2]]}"

    layer = _LAYER.fullmatch(path)
    if layer is None:
        raise ValueError(f"{path}: no tensor of transformers' {family} is this weight.")
    side, _, number, part, weight = layer.groups()
    index = int(number) if block is None else block * block_size + int(number)
    block_name = f"{side}.layers.{index}.{_BLOCKS[family][part]}"
    if weight in _NORMS:
        return f"{block_name}.{_NORMS[weight]}"
    if weight == "wg":
        return f"{block_name}router.classifier.weight"

    # `wq` is a weight and `wq_bias` its bias.
    product = weight.removesuffix("_bias")
    kind = "weight" if product == weight else "bias"
    if part.endswith("attention"):
        return f"{block_name}.{_PROJECTIONS[product]}.{kind}"
    experts = "" if expert is None else f"experts.expert_{expert}."
    return f"{block_name}{experts}{_PRODUCTS[product]}.{kind}"
