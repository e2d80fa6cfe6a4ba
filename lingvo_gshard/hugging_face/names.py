"""The tensors of an NLLB-MoE or M2M-100 model in transformers, and our weights of them.

One of our weights has one tensor, or one for each expert and each block of a LOOP. A product's
tensor is transposed, since torch multiplies by [out, in], and its heads and head size are a single
dim: q_proj.weight [N * D, M] is our wq [M, N, D].

    theta.encoder.layers[1].feed_forward.wi [E, M, H]
    model.encoder.layers.1.ffn.experts.expert_0.fc1.weight [H, M], and so on for each expert

B batch, M model, N heads, D head size, H hidden, E experts, V vocabulary, R blocks of a LOOP.
"""

import dataclasses
import enum
import itertools
import math
import re
from collections.abc import Callable, Mapping

from lingvo_gshard.checkpoints.stack_forms import Form, layers_of
from lingvo_gshard.core.base_layer import STACKED
from lingvo_gshard.sharding.layout import TensorSpec

TABLE = "theta.target_embedding.table"
SOURCE_TABLE = "theta.source_embedding.table"
SOFTMAX = "theta.softmax"


class Family(enum.StrEnum):
    """The model_type in a config.json, for models whose layers we have."""

    NLLB_MOE = "nllb-moe"
    M2M_100 = "m2m_100"


# Each family's names for our blocks of a layer.
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

_LAYER = re.compile(r"theta\.(encoder|decoder)\.(?:layers|block)\[\d+\]\.(\w+)\.(\w+)")
_FINAL_NORM = re.compile(r"theta\.(encoder|decoder)\.norm\.(scale|bias)")

# Other tensors in files: copies of a table; sinusoids, which we compute, and versions of fairseq's
# models.
TABLES = re.compile(r"(model\.)?((encoder|decoder)\.embed_tokens|shared|lm_head)\.weight")
COMPUTED = re.compile(r"(model\.)?(encoder|decoder)\.(embed_positions\.weights|version)")


@dataclasses.dataclass(frozen=True)
class Piece:
    """A tensor, which is a part of one of our weights."""

    index: tuple[int, ...]  # The part's block, its expert, both or neither.
    name: str  # The tensor's name, without `model.`.
    shape: tuple[int, ...]  # The tensor's shape.


def pieces(
    path: str,
    spec: TensorSpec,
    forms: Mapping[str, Form],
    name_of: Callable[[str, int | None, int | None], str],
) -> list[Piece]:
    """Returns the tensors of the weight at `path`, in the order of its blocks and experts.

    `forms` has the form of each stack, and `name_of` is Config.name.
    """
    # The leading dims, along which there are several tensors.
    counted = [letter for letter in spec.dims[:2] if letter in (STACKED, "E")]
    sizes = spec.shape[: len(counted)]
    shape = _tensor_shape(spec.shape[len(counted) :], spec.dims[len(counted) :])
    place = layers_of(path, spec.shape, forms)

    tensors = []
    for index in itertools.product(*map(range, sizes)):
        by_letter = dict(zip(counted, index, strict=True))
        layer = None if place is None else place[1][by_letter.get(STACKED, 0)]
        tensors.append(Piece(index, name_of(path, layer, by_letter.get("E")), shape))
    return tensors


def is_transposed(dims: str) -> bool:
    """Returns whether a weight of these dims is the transpose of its tensor."""
    return len(dims) > 1 and dims not in ("VM", "ND", "_H", "_M")


def _tensor_shape(shape: tuple[int, ...], dims: str) -> tuple[int, ...]:
    """Returns the shape of a tensor, given our part's shape and dims."""
    if dims == "VM":
        return shape
    if not is_transposed(dims):
        return (math.prod(shape),)
    summed = 2 if dims == "NDM" else 1  # The leading dims that a product sums over.
    return (math.prod(shape[summed:]), math.prod(shape[:summed]))


def name(path: str, family: Family, layer: int | None, expert: int | None) -> str:
    """Returns the name of one layer's and expert's tensor; ValueError for an unknown weight."""
    if path == SOFTMAX:
        return "lm_head.weight"
    norm = _FINAL_NORM.fullmatch(path)
    if norm is not None:
        return f"{norm[1]}.layer_norm.{_NORMS[norm[2]]}"

    of_layer = _LAYER.fullmatch(path)
    if of_layer is None:
        raise ValueError(f"{path}: transformers' {family} has no tensor for this weight.")
    side, part, weight = of_layer.groups()
    block_name = f"{side}.layers.{layer}.{_BLOCKS[family][part]}"
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
