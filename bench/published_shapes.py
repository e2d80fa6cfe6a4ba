"""Layers of experts whose times others publish, as settings of an MoELayer and a number of tokens.

T tokens, E experts, K of them for a token, C rows of an expert, M model, H hidden.
"""

import dataclasses

from bench.balanced_layer import BalancedLayer
from lingvo_gshard.layers.activations import Activation
from lingvo_gshard.layers.dispatch import Dispatch
from lingvo_gshard.layers.gating_layers import TopKGating
from lingvo_gshard.layers.moe import MoELayer
from repro.published import mixture_layer
from repro.published.mixture_layer import LayerRecord


@dataclasses.dataclass(frozen=True)
class Figure:
    """A published time of a whole shape in bfloat16, forward and backward."""

    machine: str
    record: LayerRecord
    forward_secs: float | None = None  # None where only the sum is published.


@dataclasses.dataclass(frozen=True)
class Shape:
    """A layer, and the times that others publish for it."""

    name: str
    layer: BalancedLayer
    figures: tuple[Figure, ...]  # The one to beat first.
    note: str = ""  # Other published results.


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of each expert of a layer with gated hidden units, forward and backward."""

    equation: str
    times: int
    is_forward: bool


PRODUCTS = (
    Product("ECM,EMH->ECH", 2, is_forward=True),  # x by wi and by wi_gate
    Product("ECH,EHM->ECM", 1, is_forward=True),  # the hidden units by wo
    Product("ECM,EHM->ECH", 1, is_forward=False),  # d_y by wo
    Product("ECH,EMH->ECM", 2, is_forward=False),  # their gradients by wi and by wi_gate
    Product("ECM,ECH->EMH", 2, is_forward=False),  # the gradients of wi and wi_gate
    Product("ECH,ECM->EHM", 1, is_forward=False),  # the gradient of wo
)

_RECORDS = {record.id: record for record in mixture_layer.PUBLISHED}
_MEGATRON = _RECORDS["megatron.mixtral.a2a"]
_EIGHT_H100 = "an H100 of eight, with all-to-all"

# The source's logbook has the number of tokens: rows of 4096 tokens, one on each GPU.
_QWEN3 = mixture_layer.Layer(tokens=4096, M=2048, H=768, E=128, K=8)
_QWEN3_MEGATRON = LayerRecord(
    "marin.qwen3.megatron", _QWEN3, 12.41e-3, "marin-community/marin issues/3666"
)
_QWEN3_JAX = LayerRecord("marin.qwen3.jax", _QWEN3, 13.1e-3, "marin-community/marin issues/4311")


def _of(layer: mixture_layer.Layer) -> BalancedLayer:
    assert not layer.shared_H, layer
    return BalancedLayer(tokens=layer.tokens, M=layer.M, H=layer.H, E=layer.E, K=layer.K)


SHAPES = {
    shape.name: shape
    for shape in (
        # Megatron's performance test of Mixtral's layer. baseline.json has both passes.
        Shape(
            "megatron",
            _of(_MEGATRON.layer),
            (Figure(_EIGHT_H100, _MEGATRON, forward_secs=4.2617e-3),),
        ),
        # The layer of Qwen3-30B-A3B: Megatron's with DeepEP's kernels, and JAX's.
        Shape(
            "qwen3",
            _of(_QWEN3),
            (
                Figure("an H100 of eight, with DeepEP", _QWEN3_MEGATRON),
                Figure("an H100 of eight, in JAX", _QWEN3_JAX),
            ),
        ),
        # benchmarks/moe-cute.py --thiek 32768,4096,1024,128,8 of Dao-AILab/sonic-moe.
        Shape(
            "sonic",
            BalancedLayer(tokens=32_768, M=4096, H=1024, E=128, K=8),
            (),
            "SonicMoE (arXiv:2512.14080) states ratios alone: 1.86 times ScatterMoE on an H100.",
        ),
    )
}


def part(shape: Shape, tokens: int | None, experts: int | None) -> BalancedLayer:
    """Returns the layer of fewer tokens, or of fewer experts with their share of the tokens.

    Args:
      shape: the whole shape.
      tokens: the number of tokens for all experts; None for the shape's own.
      experts: the number of experts; None for all.

    Raises:
      ValueError: the experts cannot share the tokens evenly, or there are fewer than a token needs,
        or more than the shape has.
    """
    whole = shape.layer
    num_tokens = whole.tokens if tokens is None else tokens
    num_experts = whole.E if experts is None else experts
    if not whole.K <= num_experts <= whole.E:
        raise ValueError(f"--experts={num_experts}: expected from {whole.K} to {whole.E}.")
    if not 1 <= num_tokens <= whole.tokens:
        raise ValueError(f"--tokens={num_tokens}: expected from 1 to {whole.tokens}.")
    if num_tokens * num_experts % whole.E or num_tokens * whole.K % whole.E:
        raise ValueError(
            f"--tokens={num_tokens}: {num_experts} of {whole.E} experts cannot share the "
            f"{whole.K} choices of each token evenly."
        )
    return dataclasses.replace(whole, tokens=num_tokens * num_experts // whole.E, E=num_experts)


def settings(layer: BalancedLayer, dispatch: Dispatch) -> MoELayer.Params:
    """Returns the layer's settings: SwiGLU, the best K experts, and one group of all tokens.

    Its capacity is K * T / E. With balanced routing, that is room for every token.
    """
    return MoELayer.Params().Set(
        dim=layer.M,
        hidden_dim=layer.H,
        num_experts=layer.E,
        activation=Activation.SILU,
        gated=True,
        gating=TopKGating.Params().Set(k=layer.K),
        group_size=layer.tokens,
        dispatch=dispatch,
    )


def product_gflop(layer: BalancedLayer) -> float:
    """Returns the work of one product of all experts, which is the same for all of PRODUCTS."""
    return 2 * layer.E * layer.rows * layer.M * layer.H / 1e9


def gflop(layer: BalancedLayer, *, is_forward: bool) -> float:
    """Returns the work of the experts' products, forward or backward; the router's are few."""
    times = sum(product.times for product in PRODUCTS if product.is_forward == is_forward)
    return times * product_gflop(layer)


def needed_gib(layer: BalancedLayer, num_processes: int) -> float:
    """Returns the memory in float32, in which one process computes at a time; a rule of thumb.

    Each process keeps its weights. The one that computes also has their gradients, a third of them
    transposed, and about four times the experts' inputs and six times their hidden units.
    """
    weights = layer.weight_count * (num_processes + 1 + 1 / 3)
    activations = layer.E * layer.rows * (4 * layer.M + 6 * layer.H)
    return 4 * (weights + activations) / 2**30


def fitting_experts(layer: BalancedLayer, gib: float, num_processes: int) -> int | None:
    """Returns a half of the experts, a quarter, and so on, that fits; None if none does."""
    experts = layer.E // 2
    while experts >= layer.K:
        fewer = dataclasses.replace(layer, tokens=layer.tokens * experts // layer.E, E=experts)
        if needed_gib(fewer, num_processes) <= gib:
            return experts
        experts //= 2
    return None
